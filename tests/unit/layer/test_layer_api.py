"""Layer: gradients over the caller's weights, num_tokens_device, out, the scaling factor, the two ways of a call."""

import operator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import megamoe
from megamoe import ExpertWeights, Layer, MegaMoE, Problem, invalidate
from megamoe.backends.call import Call
from megamoe.backends.staged import StagedBackend
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.layer import layer as layer_file
from megamoe.testing import assert_close, make_inputs, make_weights, same_bits

PROBLEM = Problem(48, 32, 7, 3, max_tokens=64, bias=True, activation="swiglu_oai")
NAMES = ("w13", "w2", "b13", "b2")


def problem_of(precision="bf16"):
    if precision == "fp8":
        return replace(PROBLEM, hidden=144, intermediate=80, precision="fp8")
    return PROBLEM


def leaves_of(problem, tokens=24, seed=0):
    """Return leaves x, topk_weights and those of the weights, and the ids."""
    inputs = make_inputs(problem, tokens, seed=seed)
    masters = make_weights(problem, quantize=False)
    leaves = {"x": inputs.x, "topk_weights": inputs.topk_weights, **masters.named()}
    return {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}, inputs.topk_ids


def weights_of(leaves):
    return ExpertWeights(**{name: leaves[name] for name in NAMES})


def step(call, leaves, ids, dy, **options):
    y = call(leaves["x"], ids, leaves["topk_weights"], weights_of(leaves), **options)
    y.backward(dy)
    return {"y": y.detach(), **{n: t.grad for n, t in leaves.items()}}


@pytest.mark.parametrize("backend", ["staged", "reference"])
def test_gradients_of_every_tensor(backend):
    leaves, ids = leaves_of(PROBLEM)
    dy = torch.randn(24, 48).bfloat16()
    layer = Layer(PROBLEM, backend=backend)
    found = step(layer, leaves, ids, dy)
    again, _ = leaves_of(PROBLEM)
    staged = StagedBackend(PROBLEM)
    expected = step(lambda *a: staged.forward(Call(*a))[0], again, ids, dy)
    # reference rounds gu, h and dgu to bf16 on the way, as the kernel does: up to 5e-3 apart, 2026-11-22
    relative = {"staged": 0, "reference": 1e-2}[backend]
    for name, value in expected.items():
        assert value.abs().max() > 0
        assert_close(found[name], value, relative=relative, name=name)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_tokens_behind_num_tokens_device_have_no_gradient(precision):
    """Their dy is NaN here, since their rows of y are undefined: nothing of it may arrive."""
    problem = problem_of(precision)
    leaves, ids = leaves_of(problem)
    dy = torch.randn(24, problem.hidden).bfloat16()
    dirty = dy.clone()
    dirty[13:] = float("nan")
    count = torch.tensor([13], dtype=torch.int32)
    layer = Layer(problem, backend="staged")
    found = step(layer, leaves, ids, dirty, num_tokens_device=count)
    short, _ = leaves_of(problem)
    for name in ("x", "topk_weights"):
        short[name] = short[name].detach()[:13].clone().requires_grad_()
    expected = step(layer, short, ids[:13], dy[:13])
    for name in ("y", "x", "topk_weights"):
        assert same_bits(found[name][:13], expected[name]), name
        assert not found[name][13:].any(), name
    for name in NAMES:
        assert expected[name].abs().max() > 0
        assert same_bits(found[name], expected[name]), name


def test_num_tokens_device_of_the_module():
    layer = MegaMoE(48, 32, 7, 3, backend="staged", init_seed=1)
    inputs = make_inputs(layer.problem, 24)
    count = torch.tensor([5], dtype=torch.int32)
    x = inputs.x.view(2, 12, 48).clone().requires_grad_()
    ids, scores = inputs.topk_ids.view(2, 12, 3), inputs.topk_weights.view(2, 12, 3)
    y = layer(x, ids, scores, num_tokens_device=count)
    y.float().sum().backward()
    assert y.shape == x.shape
    assert y.view(24, 48)[:5].any(1).all()
    assert not y.view(24, 48)[5:].any()
    assert x.grad.view(24, 48)[:5].any(1).all()
    assert not x.grad.view(24, 48)[5:].any()
    with pytest.raises(ArgumentError, match="num_tokens_device.dtype is torch.int64"):
        layer(x, ids, scores, num_tokens_device=count.long())


def test_out():
    leaves, ids = leaves_of(PROBLEM)
    layer = Layer(PROBLEM, backend="staged")
    call = leaves["x"].view(4, 6, 48), ids.view(4, 6, 3), leaves["topk_weights"].view(4, 6, 3)
    weights = weights_of(leaves)
    out = torch.full((4, 6, 48), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="out is given, expected None while gradients"):
        layer(*call, weights, out=out)
    with torch.no_grad():
        y = layer(*call, weights)
        assert layer(*call, weights, out=out) is out
        assert same_bits(out, y)
        with pytest.raises(ArgumentError, match=r"out.shape is \[24, 48\]"):
            layer(*call, weights, out=torch.empty(24, 48, dtype=torch.bfloat16))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        into = torch.zeros_like(out)
        assert same_bits(compiled(*call, weights, out=into), y)
        assert same_bits(into, y)


def test_y_is_no_view_when_gradients_are_recorded():
    leaves, ids = leaves_of(PROBLEM)
    layer = Layer(PROBLEM, backend="staged")
    call = leaves["x"].view(4, 6, 48), ids.view(4, 6, 3), leaves["topk_weights"].view(4, 6, 3)
    y = layer(*call, weights_of(leaves))
    assert y.shape == (4, 6, 48)
    assert y.requires_grad
    assert not y._is_view()


@pytest.mark.parametrize("way", ["layer", "module"])
def test_routed_scaling_factor(way):
    leaves, ids = leaves_of(PROBLEM)
    dy = torch.randn(24, 48).bfloat16()
    plain = step(Layer(PROBLEM, backend="staged"), leaves, ids, dy)
    again, _ = leaves_of(PROBLEM)
    if way == "module":
        layer = MegaMoE(
            *(48, 32, 7, 3),
            **{"bias": True, "activation": "swiglu_oai", "backend": "staged"},
            routed_scaling_factor=4.0,
        )
        for name in NAMES:
            setattr(layer, name, torch.nn.Parameter(again[name].detach()))
            again[name] = getattr(layer, name)

        def call(x, i, s, _):
            return layer(x, i, s)
    else:
        call = Layer(PROBLEM, backend="staged", routed_scaling_factor=4.0)
    for _ in range(2):  # the second call is like one that passed all checks
        found = step(call, again, ids, dy)
        for name, value in plain.items():  # a power of two: exact
            assert value.abs().max() > 0
            assert same_bits(found[name], value * 4), name
        for leaf in again.values():
            leaf.grad = None
        with torch.no_grad():
            y = call(again["x"], ids, again["topk_weights"], weights_of(again))
        assert same_bits(y, plain["y"] * 4)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", ["staged", "reference"])
def test_direct_call_has_the_bits_of_the_operator(precision, backend, monkeypatch):
    problem = problem_of(precision)
    leaves, ids = leaves_of(problem)
    layer = Layer(problem, backend=backend)
    call = leaves["x"], ids, leaves["topk_weights"], weights_of(leaves)
    operators = []
    apply = layer_file.apply
    counted = lambda *a, **k: operators.append(1) or apply(*a, **k)  # noqa: E731
    monkeypatch.setattr(layer_file, "apply", counted)
    layer.prepare(call[3])
    with Names():
        through_operator = layer(*call).detach()
    assert len(operators) == 1
    for _ in range(2):  # checked, and then known
        assert same_bits(layer(*call).detach(), through_operator)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert same_bits(layer(*call), through_operator)
    frozen = [t.detach() for t in call[:3]]
    experts = ExpertWeights(**{name: leaves[name].detach() for name in NAMES})
    assert same_bits(layer(*frozen, experts), through_operator)
    assert len(operators) == 1, "a call that nobody watches went through the operator"


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_operator():
    leaves, ids = leaves_of(PROBLEM)
    layer = Layer(PROBLEM, backend="staged")
    call = leaves["x"], ids, leaves["topk_weights"], weights_of(leaves)
    with torch.no_grad():
        layer.prepare(call[3])
        with Names() as names:
            layer(*call)
        assert names.seen == ["megamoe.moe_forward.default"]
        with FlopCounterMode(display=False) as counter:
            layer(*call)
        assert counter.get_total_flops() == 0, "the backend's own operations were counted"
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            y = layer(fake.from_tensor(leaves["x"]), *call[1:])
        assert type(y).__name__ == "FakeTensor"
        traced = torch.fx.experimental.proxy_tensor.make_fx(layer)(*call)
        called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
        targets = [target for target in called if target is not operator.getitem]  # of (y, state)
        assert targets == [torch.ops.megamoe.moe_forward.default]


def test_known_calls_are_checked_again_when_anything_changes(monkeypatch):
    """The fast way trusts shapes, types, devices and addresses that were checked: nothing else may take it."""
    inputs = make_inputs(PROBLEM, 24)
    weights = make_weights(PROBLEM)
    layer = Layer(PROBLEM, backend="staged")
    count = torch.tensor([5], dtype=torch.int32)
    out = torch.empty_like(inputs.x)
    good = {"x": inputs.x, "topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights}
    options = {"weights": weights, "num_tokens_device": count, "out": out}
    checked = []
    check = Layer._checked
    monkeypatch.setattr(Layer, "_checked", lambda *a: checked.append(1) or check(*a))
    for _ in range(3):
        layer(**good, **options)
    assert len(checked) == 1
    layer(**{n: t.clone() for n, t in good.items()}, **options)
    assert len(checked) == 1
    for name, value in (
        ("x", inputs.x.float()),
        ("x", inputs.x[:, :32]),
        ("x", None),
        ("topk_ids", inputs.topk_ids.short()),
        ("topk_ids", inputs.topk_ids[:5]),
        ("topk_weights", inputs.topk_weights.to("meta")),
        ("num_tokens_device", count.long()),
        ("num_tokens_device", torch.zeros(2, dtype=torch.int32)),
        ("out", out.float()),
        ("out", out[:5]),
        ("weights", replace(weights, b2=weights.b2.bfloat16())),
        ("weights", replace(weights, b2=None)),
    ):
        before = len(checked)
        with pytest.raises(ArgumentError, match=rf"{name}"):
            layer(**{**good, **options, name: value})
        assert len(checked) == before + 1
    layer(**{**good, **options, "x": inputs.x.T.contiguous().T})  # copied, not refused
    assert len(checked) == 14
    weights.w2.data = weights.w2.data.view(-1)[: 7 * 48 * 16].view(7, 48, 16)  # the same address
    with pytest.raises(ArgumentError, match=r"weights.w2.shape is \[7, 48, 16\]"):
        layer(**good, **options)


def test_fp8_copies_are_found_by_identity_and_never_stale():
    layer = MegaMoE(144, 80, 7, 3, precision="fp8", backend="staged", init_seed=1)
    inputs = make_inputs(layer.problem, 24)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    inner = layer._layer
    with torch.no_grad():
        first = layer(*call)
        made = inner._runtime.weights(layer._experts())
        assert inner._runtime.weights(layer._experts()) is made
        changes = (
            lambda: layer.w13.mul_(2),
            lambda: setattr(layer.w13, "data", layer.w13.data * 2),
            lambda: setattr(layer, "w13", torch.nn.Parameter(layer.w13 * 2)),
            lambda: (layer.w13.data.mul_(2), layer.invalidate()),
            lambda: (layer.w13.data.mul_(2), invalidate()),
        )
        for number, change in enumerate(changes):
            change()
            fresh = Layer(layer.problem, backend="staged")
            expected = fresh(*call, layer.expert_weights())
            assert same_bits(layer(*call), expected), number
            assert not same_bits(expected, first)
            first = expected


def test_close_and_reopen_without_gradients():
    layer = MegaMoE(48, 32, 7, 3, backend="staged", init_seed=1)
    inputs = make_inputs(layer.problem, 24)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    with torch.no_grad():
        y = [layer(*call) for _ in range(2)][-1]
        layer.close()
        assert same_bits(layer(*call), y)


def test_parameters_that_are_replaced_are_used():
    layer = MegaMoE(48, 32, 7, 3, backend="staged", init_seed=1)
    inputs = make_inputs(layer.problem, 24)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    other = {n: p.detach() * 2 for n, p in layer.named_parameters()}
    with torch.no_grad():
        layer(*call)
        before = layer(*call)
        swapped = torch.func.functional_call(layer, other, call)
        assert same_bits(layer(*call), before)
        torch.nn.utils.parametrize.register_parametrization(layer, "w2", Doubled())
        parametrized = layer(*call)
        assert_close(parametrized, before * 2, relative=1e-2)
        layer.w13.data = other["w13"]
        assert same_bits(layer(*call), swapped)


class Doubled(torch.nn.Module):
    def forward(self, w):
        return w * 2


def test_bad_arguments_are_named():
    leaves, ids = leaves_of(PROBLEM)
    layer = Layer(PROBLEM, backend="staged")
    x, scores, weights = leaves["x"], leaves["topk_weights"], weights_of(leaves)
    for call, message in (
        ((x.view(4, 6, 48), ids.view(4, 6, 3), scores), r"topk_weights.shape is \[24, 3\]"),
        ((x.view(4, 6, 48), ids, scores), r"topk_ids.shape is \[24, 3\], expected \[4, 6\]"),
        ((None, ids, scores), "x is NoneType"),
        ((x, [1], scores), "topk_ids is list"),
        ((x[0], ids, scores), r"x.shape is \[48\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            layer(*call, weights)
    with pytest.raises(ArgumentError, match=r"weights.w2.shape is \[7, 48, 31\]"):
        layer(x, ids, scores, replace(weights, w2=weights.w2[:, :, :31]))
    with pytest.raises(ConfigError, match="ep_size is 2, expected 1"):
        Layer(replace(PROBLEM, ep_size=2))
    with pytest.raises(ConfigError, match="layer is closed"):
        _ = layer.handle
    layer.prepare(weights)
    assert layer.handle.device.type == "cpu"
    layer.close()
    layer.close()


def test_fp8_weights_of_the_caller():
    problem = problem_of("fp8")
    inputs, masters = make_inputs(problem, 24), make_weights(problem, quantize=False)
    layer = Layer(problem, backend="staged")
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    y = layer(*call, masters)
    assert same_bits(layer(*call, masters.quantized(problem)), y)
    other = make_weights(problem, seed=5, quantize=False)
    changed = layer(*call, other)
    assert not same_bits(changed, y)
    assert same_bits(layer(*call, masters), y), "the copies of other weights were used"


def test_threads_take_turns():
    """One thread's copies of its weights were overwritten, or taken, by another's call."""
    problem = replace(problem_of("fp8"), bias=False)
    layer, i = Layer(problem, backend="staged"), make_inputs(problem, 24)
    own = [make_weights(problem, quantize=False, seed=seed) for seed in range(3)]

    def call(index):
        return layer(i.x, i.topk_ids, i.topk_weights, own[index])

    expected = [call(index) for index in range(3)]

    def right(index):
        return all(same_bits(call(index), expected[index]) for _ in range(8))

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(right, range(3)))


def test_options_are_a_record_or_given_by_name():
    record = megamoe.Options(routed_scaling_factor=2.5, chunks=2)
    problem = megamoe.Problem(64, 48, 6, 2, max_tokens=16)
    layer = megamoe.Layer(problem, options=record, chunks=4)
    assert layer.options == megamoe.Options(routed_scaling_factor=2.5, chunks=4)
    assert record.chunks == 2
    of_backend = {"chunks": 4, "exchange": "exact"}
    assert layer.options.of_backend() == of_backend
    module = megamoe.MegaMoE(64, 48, 6, 2, options=megamoe.Options(init_seed=3), max_tokens=16)
    same = megamoe.MegaMoE(64, 48, 6, 2, init_seed=3, max_tokens=16)
    assert torch.equal(module.w13, same.w13)
    placement = megamoe.ExpertPlacement([0, 1, 2, 3, 4, 5, 0, 1])
    placed = megamoe.MegaMoE(64, 48, 6, 2, options=megamoe.Options(placement=placement))
    assert placed.placement is placement
    assert len(placed.w13) == 8
    for wrong, message in (
        ({"options": {"chunks": 2}}, "options is dict, expected megamoe.Options"),
        ({"reserve": 2}, "option is 'reserve', expected one of routed_scaling_factor"),
        ({"placement": placement}, "placement is given, expected None: such a Layer is"),
        ({"options": megamoe.Options(reserve_sms=-1)}, "reserve_sms is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            megamoe.Layer(problem, **wrong)
