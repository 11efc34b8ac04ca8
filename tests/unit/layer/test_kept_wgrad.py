"""Weight gradients of several backward passes that kept their rows: by one launch, which meets no other rank."""

import warnings

import pytest
import saving  # noqa: F401, registers the backend
import torch
from outcomes import outcome
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from trained import backward, gradients, leaves, made, of_ranks, same, train, waits_for_weights

import megamoe
from megamoe.adapters.library_parameters import joined, tie
from megamoe.backends.call import StashedRows
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError, WorkspaceTooSmall
from megamoe.testing import launch

WEIGHTS = ("w13", "w2", "b13", "b2")


def keeping(backend="emulate", **options):
    return made(backend, delay_wgrad="keep", **options)


def assert_near(found, expected, step):
    """step: rounding of the type that sums have, and of each pass that is added one by one."""
    for name in WEIGHTS:
        got, wanted = found[name].float(), sum(e[name].float() for e in expected)
        assert wanted.abs().max() > 0
        atol = step * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=step, atol=atol, msg=name)


E4M3 = {"precision": "fp8", "weight_gradients": "e4m3"}


@pytest.mark.parametrize("options", [{}, {"precision": "fp8"}, E4M3], ids=["bf16", "fp8", "e4m3"])
def test_sums_of_passes(options):
    """One pass has the bits of one that did not wait, three are their sum; two rounds, of one layer."""
    expected = [train(made("emulate", **options), seed=seed) for seed in range(3)]
    layer = keeping(**options)
    for passes in (3, 1):
        layer.zero_grad()
        calls = [backward(layer, seed) for seed in range(passes)]
        waits_for_weights(layer, calls, expected)
        waiting = layer._layer._delayed._queue
        assert [type(p.rows) for p in waiting] == [StashedRows] * passes
        layer.backward_dw(passes)
        assert layer.num_delayed == 0
        assert_near(gradients(layer, calls[0]), expected[:passes], 2**-7)
    same({n: getattr(layer, n).grad for n in WEIGHTS}, {n: expected[0][n] for n in WEIGHTS})


@pytest.mark.parametrize("backend", ["saving", "staged"])
def test_backends_that_keep_nothing_make_them_pass_by_pass(backend):
    expected = [train(made(backend), seed=seed) for seed in range(3)]
    layer = keeping(backend)
    for seed in range(3):
        backward(layer, seed)
    layer.backward_dw(passes=2)
    assert layer.num_delayed == 1
    layer.backward_dw()
    same(
        {n: getattr(layer, n).grad for n in WEIGHTS},
        {n: expected[0][n] + expected[1][n] + expected[2][n] for n in WEIGHTS},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_and_hooks(dtype):
    """More passes than a launch takes are refused; a hook runs once a launch, as for one pass."""
    layer, seen = keeping(accumulate_into_main_grad=True), []
    expected = [train(made("emulate"), seed=seed) for seed in range(2)]
    for name in ("w13", "w2"):
        p = getattr(layer, name)
        p.main_grad, p.grad_added_to_main_grad = torch.ones(p.shape, dtype=dtype), False
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    layer.prepare()
    assert layer._layer._runtime.backend.max_stashed == 8
    for i in range(10):
        backward(layer, i % 2)
    with pytest.raises(
        ArgumentError, match="passes is 9, expected at most 8, which a launch takes"
    ):
        layer.backward_dw(passes=9)
    for passes in (8, 2):
        layer.backward_dw(passes)
    assert sorted(seen) == ["w13", "w13", "w2", "w2"]
    found = {n: getattr(layer, n).main_grad.float() - 1 for n in ("w13", "w2")}
    found |= {n: getattr(layer, n).grad for n in ("b13", "b2")}
    assert_near(found, expected * 5, 2**-6 if dtype == torch.bfloat16 else 2**-7)
    assert layer.w13.grad_added_to_main_grad


@pytest.mark.parametrize("backend", ["emulate", "saving", "staged"])
def test_sums_are_written_over_a_main_grad_once(backend):
    """Where passes are made one by one, the last one's alone were left; the next call writes anew."""
    layer = keeping(backend, accumulate_into_main_grad=True)
    expected = [train(made(backend), seed=seed) for seed in range(3)]
    for name in ("w13", "w2"):
        p = getattr(layer, name)
        p.main_grad, p.overwrite_main_grad = torch.full(p.shape, 7.0), True
    for seeds in (range(3), range(1, 3)):
        layer.zero_grad()
        for seed in seeds:
            backward(layer, seed)
        layer.backward_dw(passes=len(seeds))
        found = {n: getattr(layer, n).main_grad for n in ("w13", "w2")}
        found |= {n: getattr(layer, n).grad for n in ("b13", "b2")}
        assert_near(found, [expected[seed] for seed in seeds], 2**-7)


@pytest.mark.parametrize(
    "way", ["reentrant", "not reentrant", "count", "no tokens", "only weights"]
)
def test_ways(way):
    options = {"num_tokens_device": torch.tensor([11 * (way == "count")], dtype=torch.int32)}
    options = options if way in ("count", "no tokens") else {}
    layer, expected = keeping(), train(made("emulate"), seed=1)
    counted = train(made("emulate"), **options)

    def through(f, *a):
        if way.endswith("reentrant"):
            return checkpoint(f, *a, use_reentrant=way == "reentrant")
        return f(*(t.detach() for t in a)) if way == "only weights" else f(*a)

    backward(layer, through=through, **options)
    backward(layer, seed=1)
    layer.backward_dw(passes=2)
    assert_near({n: getattr(layer, n).grad for n in WEIGHTS}, [counted, expected], 2**-7)


def test_frozen_and_passes_that_are_not_asked_for_weights():
    layer, expected = keeping(), train(made("emulate"))
    x, ids, scores = leaves(layer)
    loss = layer(x, ids, scores).float().square().sum()
    (dx,) = torch.autograd.grad(loss, x)
    assert torch.equal(dx, expected["x"])
    assert layer.num_delayed == 0
    backward(layer)
    layer.w2.requires_grad_(False)
    layer.backward_dw()
    assert layer.w2.grad is None
    assert torch.equal(layer.w13.grad, expected["w13"])


def test_weights_of_several_passes():
    """Joined of the same parameters anew for each pass, in place: one gradient for all. Otherwise they are refused."""
    module = made("emulate")
    problem = module.problem
    found = {}
    for lie in ("one by one", "together", "apart"):
        layer = megamoe.Layer(problem, backend="emulate", delay_wgrad="keep")
        w13 = [nn.Parameter(w.clone()) for w in module.w13.detach()]
        if lie != "apart":
            tie(w13)
        for seed in range(2):
            weights = megamoe.ExpertWeights(
                joined(w13), module.w2.detach(), module.b13.detach(), module.b2.detach()
            )
            layer(*leaves(module, seed), weights).float().square().sum().backward()
        if lie == "apart":  # joined by a copy
            with pytest.raises(ArgumentError, match="number 1 had other weights than number 0"):
                layer.backward_dw(passes=2)
            assert layer.num_delayed == 2
            continue
        for passes in (1, 1) if lie == "one by one" else (2,):
            layer.backward_dw(passes)
        found[lie] = torch.stack([p.grad for p in w13])
    step = 2**-7 * float(found["together"].abs().max())
    torch.testing.assert_close(found["together"], found["one by one"], rtol=2**-7, atol=step)


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = keeping().bfloat16()

    def forward(self, *call):
        return self.moe(*call)


def under_fsdp(rank):
    parent = Parent()
    fully_shard(parent)
    parent(*leaves(parent.moe)).float().square().sum().backward()
    return str(outcome(parent.moe.backward_dw))


def test_fsdp_is_refused():
    assert "weights.w13 is memory that was freed, as FSDP2 does" in launch(under_fsdp, 1)[0]


def test_errors():
    for wrong in ("kept", 2, None):
        with pytest.raises(ConfigError, match="delay_wgrad is .*, expected False, True or 'keep'"):
            made("emulate", delay_wgrad=wrong)
    layer = keeping()
    call = leaves(layer)
    layer(*call)
    with pytest.raises(ArgumentError, match="while no backward pass waits"):
        layer.backward_dw(passes=2)
    backward(layer)
    for wrong in (0, -1, True, 1.0, "all"):
        with pytest.raises(
            ArgumentError, match="passes is .* expected a number of backward passes"
        ):
            layer.backward_dw(wrong)
    with pytest.raises(ArgumentError, match="passes is 2, expected at most 1, which wait"):
        layer.backward_dw(passes=2)
    with pytest.raises(MegaMoEError, match="while 1 backward passes"):
        torch.optim.SGD(layer.parameters()).step()
    with pytest.raises(ArgumentError, match="create_graph is True"):
        torch.autograd.grad(layer(*call).float().sum(), call[0], create_graph=True)
    assert layer.num_delayed == 1
    layer._layer._runtime.backend.reset()
    with pytest.raises(MegaMoEError, match=r"reset\(\) was called since 1 of 1 backward passes"):
        layer.backward_dw()
    backward(layer)
    with pytest.warns(RuntimeWarning, match="1 backward passes wait for backward_dw"):
        layer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.close()


def test_a_pass_that_filled_its_pool_twice():
    """The pass itself is right, and its weights' gradients are refused by name: some of its rows are gone."""
    shape = {"hidden": 48, "intermediate": 32, "num_experts": 5, "top_k": 4, "max_tokens": 200}
    problem = megamoe.Problem(**shape)
    least = megamoe.launch.layout.min_pool_rows(problem)
    layer = megamoe.MegaMoE(**shape, backend="emulate", delay_wgrad="keep", pool_rows=least)
    report = megamoe.memory_report(layer, least)
    inputs = megamoe.testing.make_inputs(problem, 200)
    y = layer(inputs.x.requires_grad_(), inputs.topk_ids, inputs.topk_weights)
    y.float().square().sum().backward()
    assert int(layer.statistics().passes) > 1
    (waiting,) = layer._layer._delayed._queue
    assert waiting.rows.memory.numel() == report["stash_bytes"]
    assert report["stash_bytes"] >= least * (4 * 48 + 2 * 3 * 32)
    with pytest.raises(WorkspaceTooSmall, match=f"not all rows of pass 0 .*pool_rows={least}"):
        layer.backward_dw()
    assert inputs.x.grad.isfinite().all()


def over_ranks(rank, backend):
    expected = [train(of_ranks(backend), seed=10 * rank + seed) for seed in range(2)]
    found = of_ranks(backend, delay_wgrad="keep")
    for seed in range(2):
        backward(found, 10 * rank + seed)
    for passes in (2,) if rank else (1, 1):  # each as it likes: the other does not wait
        found.backward_dw(passes)
    close = [
        torch.allclose(
            p.grad, sum(e[n] for e in expected), rtol=2**-7, atol=2**-7 * float(p.grad.abs().max())
        )
        for n, p in found.named_parameters()
    ]
    backward(found, rank)
    alone = None
    if rank:  # its error is its own
        alone = str(outcome(lambda: found.backward_dw(2)))
    found.backward_dw()
    return (
        close,
        alone,
        str(outcome(lambda: of_ranks(backend, delay_wgrad="keep" if rank else True))),
    )


def test_over_ranks():
    for rank, (close, alone, differing) in enumerate(
        launch(over_ranks, 2, "emulate", timeout_s=120)
    ):
        assert close == [True, True]
        assert alone is None or "expected at most 1, which wait" in alone
        assert (alone is None) == (rank == 0)
        assert "delay_wgrad is 'keep' on rank 1" in differing or "delay_wgrad" in differing
