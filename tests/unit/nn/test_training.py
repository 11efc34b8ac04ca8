"""Gradients of a layer whose backend saves a state, against those of `staged`, which recomputes: the same bits.

The backend is tests/unit/saving.py: what it computes is staged mathematics, so that only the way there can differ.
"""

from contextlib import nullcontext

import pytest
import torch
from functorch.compile import make_boxed_func
from saving import Saving
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from trained import TOKENS, gradients, leaves, made, no_calls, same, train  # noqa: F401

from megamoe.backends.call import GradRequest
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.weights import ExpertWeights
from megamoe.layer import backward
from megamoe.layer.inputs import Inputs
from megamoe.testing import make_inputs

OPS = torch.ops.megamoe


@pytest.fixture(scope="module")
def expected():
    return train(made("staged"))


def kinds():
    return [call[0] for call in Saving.calls]


@pytest.mark.parametrize("way", ["known", "first", "operator", "3d", "strided", "sliced dy"])
def test_gradients_are_staged_ones(expected, way):
    layer = made()
    if way == "known":  # the checks have passed, and are not repeated
        train(layer)
        Saving.calls.clear()
        same(train(layer), expected)
    elif way == "operator":  # seen by a mode
        seen = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(function)
                return function(*args, **(kwargs or {}))

        with Watch():
            same(train(layer), expected)
        assert seen.count(OPS.moe_forward.default) == 1
        assert seen.count(OPS.moe_backward.default) == 1
    elif way == "3d":

        def split(f, *a):
            return f(*(t.view(2, TOKENS // 2, -1) for t in a)).view(TOKENS, -1)

        same(train(layer, split), expected)
    elif way == "strided":  # copied before the call

        def wide(f, x, *a):
            return f(torch.cat((x, x), dim=1)[:, : x.shape[1]], *a)

        same(train(layer, wide), expected)
    elif way == "sliced dy":  # contiguous, and two bytes behind where the kernel could read it

        def joined(f, *a):
            return torch.cat((torch.zeros(1, dtype=torch.bfloat16), f(*a).flatten()))

        found = train(layer, joined)
        found["y"] = found["y"][1:].view(TOKENS, -1)
        same(found, expected)
    else:
        same(train(layer), expected)
    assert kinds() == ["train", "backward"]


def test_without_gradients_nothing_is_saved():
    layer, call = made(), make_inputs(made().problem, TOKENS)
    arguments = call.x, call.topk_ids, call.topk_weights
    for _ in range(2):
        with torch.no_grad():
            layer(*arguments)
    layer.requires_grad_(False)(*arguments)
    assert kinds() == ["forward"] * 3


def test_the_comparison_sees_a_wrong_state(expected, monkeypatch):
    backward_of = Saving.backward

    def with_swapped_ids(self, call, dy, state, wanted):
        state = state.clone()
        ids, _ = self.parts(state, call.x.shape[0])
        ids.copy_(ids.flip(1))
        return backward_of(self, call, dy, state, wanted)

    monkeypatch.setattr(Saving, "backward", with_swapped_ids)
    found = train(made())
    assert torch.equal(found["y"], expected["y"])
    assert not torch.equal(found["x"], expected["x"])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_layers_and_microbatches_in_flight(order):
    layers = [made(seed=1), made(seed=2)]
    alone = [train(layers[n % 2], seed=n) for n in range(4)]
    for layer in layers:
        layer.zero_grad()
    calls = [leaves(layers[n % 2], seed=n) for n in range(4)]
    ys = [layers[n % 2](*call) for n, call in enumerate(calls)]
    for n in order:
        layers[n % 2].zero_grad()
        ys[n].float().square().sum().backward()
        same({"y": ys[n].detach(), **gradients(layers[n % 2], calls[n])}, alone[n])


def test_gradients_accumulate():
    layer = made()
    parts = [train(layer, seed=n) for n in range(2)]
    layer.zero_grad()
    for n in range(2):
        layer(*leaves(layer, seed=n)).float().square().sum().backward()
    for name, p in layer.named_parameters():
        assert torch.equal(p.grad, parts[0][name] + parts[1][name]), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(expected, reentrant):
    same(train(made(), lambda f, *a: checkpoint(f, *a, use_reentrant=reentrant)), expected)
    # without reentrance torch records the first forward pass, too, and drops what it saved
    first = "forward" if reentrant else "train"
    assert kinds() == [first, "train", "backward"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_state_may_move(expected, lost):
    """Hooks that take saved tensors elsewhere and bring them back in other memory."""
    layer, moved = made(), []

    def pack(t):
        is_state = t.dtype == torch.uint8
        if is_state:
            moved.append(t.data_ptr())
        return is_state, t.detach().clone()

    def unpack(packed):
        is_state, value = packed
        return torch.zeros_like(value) if is_state and lost else value

    def offloaded(function, *arguments):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return function(*arguments)

    with pytest.raises(AssertionError, match="not the state") if lost else nullcontext():
        same(train(layer, offloaded), expected)
    assert len(moved) == 1


def test_retain_graph(expected):
    layer = made()
    call = leaves(layer)
    y = layer(*call)
    state = y.grad_fn.saved_tensors[-1]
    before = state.clone()
    loss = y.float().square().sum()
    loss.backward(retain_graph=True)
    first = gradients(layer, call)
    loss.backward()
    assert torch.equal(state, before)
    assert not state.requires_grad
    for name, gradient in gradients(layer, call).items():
        assert torch.equal(gradient, 2 * first[name])
        assert torch.equal(first[name], expected[name])


def test_a_changed_state_is_torchs_error():
    layer = made()
    y = layer(*leaves(layer))
    y.grad_fn.saved_tensors[-1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.float().sum().backward()


@pytest.mark.parametrize("backend", ["saving", "staged"])
def test_second_derivatives_are_refused_by_name(backend):
    layer = made(backend)
    x, ids, scores = leaves(layer)
    (dx,) = torch.autograd.grad(layer(x, ids, scores).float().square().sum(), x, create_graph=True)
    assert dx.requires_grad
    with pytest.raises(MegaMoEError, match="differentiated again"):
        dx.float().sum().backward()


NEEDS = {
    "all": ([], (True,) * 6),
    "frozen experts": (["w13", "w2", "b13", "b2"], (True, True, False, False, False, False)),
    "frozen x": (["x"], (False, True, True, True, True, True)),
    "frozen w2, b13": (["w2", "b13"], (True, True, True, False, False, True)),
    "weights only": (["x", "topk_weights"], (False, False, True, True, True, True)),
}


@pytest.mark.parametrize("case", NEEDS)
def test_needs(expected, case):
    frozen, needs = NEEDS[case]
    layer = made()
    for name, p in layer.named_parameters():
        p.requires_grad_(name not in frozen)
    x, ids, scores = leaves(layer)
    x.requires_grad_("x" not in frozen)
    scores.requires_grad_("topk_weights" not in frozen)
    layer(x, ids, scores).float().square().sum().backward()
    assert Saving.calls[-1][1] == needs
    for name, gradient in gradients(layer, (x, ids, scores)).items():
        assert gradient is None if name in frozen else torch.equal(gradient, expected[name]), name


def test_fewer_tokens_than_rows():
    count = torch.tensor([11], dtype=torch.int32)
    expected = train(made("staged"), num_tokens_device=count)
    found = train(made(), num_tokens_device=count)
    assert not found["x"][11:].any()
    same(found, expected)


def test_y_that_nobody_differentiates_still_takes_part():
    """Backward is collective: a gradient that is undefined here may not be on another rank."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    layer = made()
    x, ids, scores = leaves(layer)
    Cut.apply(layer(x, ids, scores)).float().sum().backward()
    assert kinds() == ["train", "backward"]
    assert not x.grad.any()


WRONG_DY = {
    "shape": lambda dy: dy[:-1],
    "dtype": lambda dy: dy.float(),
    "device": lambda dy: dy.to("meta"),
    "layout": lambda dy: dy.float().to_sparse().to(torch.bfloat16),
}


@pytest.mark.parametrize("wrong", WRONG_DY)
def test_a_wrong_dy_is_refused_before_the_backend_runs(wrong):
    layer = made()
    layer.prepare()
    runtime, call, w = layer._layer._runtime, leaves(layer), layer.expert_weights()
    inputs = Inputs.of(*(t.detach() for t in call), w)
    with torch.no_grad():
        y, state = OPS.moe_forward(*inputs, runtime.handle, runtime.state_bytes, True)
    Saving.calls.clear()

    def gradients_of(dy, state=state):
        return backward.gradients(runtime, backward.Pass(inputs, dy, state), GradRequest())

    with pytest.raises(ArgumentError, match=f"dy.{wrong}"):
        gradients_of(WRONG_DY[wrong](torch.ones_like(y)))
    with pytest.raises(ArgumentError, match=r"state\.shape"):
        gradients_of(torch.ones_like(y), state[1:])
    assert not Saving.calls
    # and what only lies otherwise is read as it is meant
    expanded, negative = torch.ones(1).bfloat16().expand_as(y), torch._neg_view(-torch.ones_like(y))
    right = gradients_of(torch.ones_like(y))
    for dy in (expanded, negative, torch.ones_like(y.t()).t()):
        for found, value in zip(gradients_of(dy), right, strict=True):
            assert torch.equal(found, value)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_operators(precision):
    layer = made(precision=precision)
    layer.prepare()
    runtime, w = layer._layer._runtime, layer.expert_weights()
    x, ids, scores = leaves(layer)
    inputs = Inputs.of(x, ids, scores, w, torch.tensor([13]).int())
    for keep in (False, True):
        call = (*inputs, runtime.handle, runtime.state_bytes, keep)
        torch.library.opcheck(OPS.moe_forward.default, call)
    _, state = OPS.moe_forward(*call)
    plain = [t if t is None else t.detach() for t in inputs]
    needs = [True, False, True, True, False, True]
    arguments = (torch.ones_like(x), *plain, runtime.handle, needs, state.detach())
    torch.library.opcheck(OPS.moe_backward.default, arguments)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_compiled_whole(precision):
    layer = made(precision=precision)
    layer.prepare()
    eager = train(layer)
    torch._dynamo.reset()
    graphs = []

    def record(graph, example):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    same(train(layer, lambda f, *a: torch.compile(f, fullgraph=True, backend=backend)(*a)), eager)
    assert graphs[0].count(OPS.moe_forward.default) == 1
    assert graphs[1].count(OPS.moe_backward.default) == 1


def test_the_operator_keeps_its_state_where_it_was_not_asked_to():
    """As who calls the operator by itself, and lets torch record it."""
    layer = made()
    layer.prepare()
    call, w = leaves(layer), layer.expert_weights()
    given = ExpertWeights(**{name: t.detach() for name, t in w.named().items()})
    y, _ = OPS.moe_forward(*Inputs.of(*call, given), layer._layer.handle, 0, False)
    y.float().square().sum().backward()
    expected = train(made("staged"))
    same({"x": call[0].grad}, {"x": expected["x"]})
    assert kinds() == ["train", "backward"]
