"""Gradients of w13 and w2 that are added to main_grad, behind a backend that saves and one that recomputes."""

import pytest
import saving  # noqa: F401, registers the backend
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trained import leaves, made, same, train

import megamoe
from megamoe.core.errors import ArgumentError
from megamoe.layer import main_grad
from megamoe.testing import assert_close

WEIGHTS = ("w13", "w2")
pytestmark = pytest.mark.parametrize("backend", ["saving", "staged"])


def adding(backend, dtype=torch.float32, flag=True, fill=0.0, **options):
    """Return a layer whose weights have a main_grad and, with `flag`, Megatron's attribute."""
    layer = made(backend, accumulate_into_main_grad=True, **options)
    for name in WEIGHTS:
        p = getattr(layer, name)
        p.main_grad = torch.full(p.shape, fill, dtype=dtype)
        if flag:
            p.grad_added_to_main_grad = False
    return layer


def run(layer, seed=0, through=None):
    call = leaves(layer, seed)
    y = (through or (lambda f, *a: f(*a)))(layer, *call)
    y.float().square().sum().backward()
    return y.detach(), call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_added(backend, precision, dtype):
    layer = adding(backend, dtype, fill=1.0, precision=precision)
    parts = [train(made(backend, precision=precision), seed=seed) for seed in range(2)]
    for seed in range(2):
        _, call = run(layer, seed)
        same({"x": call[0].grad}, {"x": parts[seed]["x"]})
        same({"s": call[2].grad}, {"s": parts[seed]["topk_weights"]})
    for name in WEIGHTS:
        p = getattr(layer, name)
        expected = torch.ones(p.shape, dtype=dtype)
        for part in parts:
            expected.add_(part[name])
        # staged has gradients of dequantized weights in fp32: p.grad rounds them to bf16, main_grad does not
        relative = 4e-3 if precision == "fp8" and backend == "staged" else 0
        assert_close(p.main_grad, expected, relative=relative, name=name)
        assert p.grad_added_to_main_grad is True
    for name in ("b13", "b2"):  # in the ordinary way
        assert torch.equal(getattr(layer, name).grad, parts[0][name] + parts[1][name])


def test_autograd_is_given_a_placeholder_that_nothing_allocates(backend):
    layer = adding(backend)
    run(layer)
    first = {name: getattr(layer, name).grad for name in WEIGHTS}
    layer.zero_grad()  # set_to_none, as Megatron's hook does
    run(layer)
    for name in WEIGHTS:
        p = getattr(layer, name)
        assert p.grad.shape == p.shape
        assert p.grad.dtype == p.dtype
        assert p.grad.data_ptr() == first[name].data_ptr()  # taken over by autograd without a copy
        p.zero_out_wgrad = True
        p.grad.fill_(7)
    layer.zero_grad()
    run(layer)
    for name in WEIGHTS:
        assert not getattr(layer, name).grad.any()


def test_without_megatrons_flag_there_is_no_gradient(backend):
    layer = adding(backend, flag=False)
    run(layer)
    for name in WEIGHTS:
        p = getattr(layer, name)
        assert p.grad is None
        assert p.main_grad.any()
        assert not hasattr(p, "grad_added_to_main_grad")


def test_megatrons_hook(backend):
    """What its DDP does after each gradient, with overlap_grad_reduce."""
    layer, seen = adding(backend), []

    def make_hook(p):
        def hook(*_):
            assert p.grad is not None
            if not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None
            seen.append(p)

        return hook

    nodes = []
    for p in layer.parameters():
        if not hasattr(p, "main_grad"):
            p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), False
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        node.register_hook(make_hook(p))
        nodes.append(node)
    expected = train(made(backend))
    run(layer)
    assert len(seen) == 4
    for name, p in layer.named_parameters():
        assert torch.equal(p.main_grad, expected[name].to(p.main_grad.dtype)), name


def test_overwritten_where_that_is_asked_for(backend):
    layer = adding(backend, fill=5.0)
    layer.w13.overwrite_main_grad = True
    run(layer)
    expected = train(made(backend))
    assert torch.equal(layer.w13.main_grad, expected["w13"].float())
    assert torch.equal(layer.w2.main_grad, 5 + expected["w2"].float())


@pytest.mark.parametrize("frozen", [("w13",), ("w2",), WEIGHTS])
def test_frozen(backend, frozen):
    layer = adding(backend)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    expected = train(made(backend))
    run(layer)
    for name in WEIGHTS:
        p = getattr(layer, name)
        value = torch.zeros_like(p.main_grad) if name in frozen else expected[name].float()
        assert torch.equal(p.main_grad, value)
        assert p.grad_added_to_main_grad is (name not in frozen)


def test_parts_of_wider_tensors(backend):
    """In any order of dimensions: each element has its place."""
    layer, expected = adding(backend), train(made(backend))
    for name in WEIGHTS:
        p = getattr(layer, name)
        (num, rows, width), wide = (
            p.shape,
            torch.zeros(p.shape[1] + 3, p.shape[2] + 5, p.shape[0] + 1),
        )
        p.main_grad = wide.permute(2, 0, 1)[1:, 2:-1, 3:-2]
        assert p.main_grad.shape == (num, rows, width)
    run(layer)
    for name in WEIGHTS:
        assert torch.equal(getattr(layer, name).main_grad, expected[name].float())


def test_frozen_behind_the_call(backend):
    """As autograd drops a gradient then."""
    layer, expected = adding(backend), train(made(backend))
    y = layer(*leaves(layer))
    layer.w2.requires_grad_(False)
    layer.w2.main_grad = None
    y.float().square().sum().backward()
    assert torch.equal(layer.w13.main_grad, expected["w13"].float())
    assert layer.w2.grad is None
    assert layer.w2.grad_added_to_main_grad is False


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "offload", "mode", "retain"])
def test_ways(backend, way):
    """Each adds once: the parameter is the one that was called with, whatever saved tensors became."""
    layer, expected = adding(backend), train(made(backend))
    times = 1
    if way.endswith("reentrant"):
        options = {"use_reentrant": way == "reentrant"}
        run(layer, through=lambda f, *a: checkpoint(f, *a, **options))
    elif way == "offload":
        moved = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)

        def through(f, *a):
            with moved:
                return f(*a)

        run(layer, through=through)
    elif way == "mode":

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                return function(*args, **(kwargs or {}))

        with Watch():
            run(layer)
    else:
        loss = layer(*leaves(layer)).float().square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        times = 2
    for name in WEIGHTS:
        value = getattr(layer, name).main_grad
        assert torch.equal(value, times * expected[name].float()), name


WRONG = {
    "missing": (lambda p: delattr(p, "main_grad"), "main_grad is None"),
    "shape": (lambda p: setattr(p, "main_grad", p.main_grad[:-1]), r"main_grad\.shape"),
    "dtype": (lambda p: setattr(p, "main_grad", p.main_grad.half()), r"main_grad\.dtype"),
    "device": (lambda p: setattr(p, "main_grad", p.main_grad.to("meta")), r"main_grad\.device"),
    "type": (lambda p: setattr(p, "main_grad", 1), "main_grad is int"),
    "one place": (
        lambda p: setattr(p, "main_grad", p.main_grad[:1].expand_as(p)),
        r"main_grad.stride\(\) is \(0, ",
    ),
    "rows in rows": (
        lambda p: setattr(p, "main_grad", p.main_grad.as_strided(p.shape, (32, p.shape[2], 1))),
        r"main_grad.stride\(\) is \(32, ",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("when", ["first call", "known call", "backward"])
def test_a_wrong_main_grad_is_refused(backend, wrong, when):
    layer = adding(backend)
    if when != "first call":
        y = layer(*leaves(layer))
    spoil, message = WRONG[wrong]
    spoil(layer.w2)
    with pytest.raises(ArgumentError, match=message):
        y.float().sum().backward() if when == "backward" else layer(*leaves(layer))
    assert not layer.w13.main_grad.any()
    with torch.no_grad():
        layer(*leaves(layer))  # nothing is added


def test_refused_where_it_would_be_wrong(backend):
    layer = adding(backend)
    for function in (megamoe.grad_norm, lambda m: megamoe.clip_grad_norm_(m, 1.0)):
        with pytest.raises(ArgumentError, match="accumulate_into_main_grad is True"):
            function(torch.nn.Sequential(layer))
    x, ids, scores = leaves(layer)
    y = layer(x, ids, scores).float().square().sum()
    with pytest.raises(ArgumentError, match="create_graph is True"):
        torch.autograd.grad(y, x, create_graph=True)
    layer.prepare()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="is not seen by torch.compile"):
        compiled(x, ids, scores)
    torch._dynamo.reset()


def test_a_graph_breaks_around_it(backend):
    layer, expected = adding(backend), train(made(backend))
    layer.prepare()
    torch._dynamo.reset()
    run(torch.compile(layer, backend="aot_eager"), through=lambda f, *a: f(*a))
    for name in WEIGHTS:
        assert torch.equal(getattr(layer, name).main_grad, expected[name].float())


def test_the_placeholder_is_one_for_all_of_a_shape(backend):
    main_grad._placeholders.clear()
    for _ in range(3):
        run(adding(backend))
    assert len(main_grad._placeholders) == len(WEIGHTS)
