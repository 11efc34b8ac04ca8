"""Every call computes with the weights of now: y and all gradients have the bits of a layer that never saw others.

By the kernel's own source on the CPU, in FP8, with biases, and with several blocks of scales in both directions: one
block's transpose is the block itself. Weights change between calls in each way, one tensor at a time.
"""

from dataclasses import replace

import pytest
import torch

from megamoe import ExpertWeights, Layer, Problem
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(144, 144, 2, 2, max_tokens=4, precision="fp8", bias=True)


def drawn(seed, given=False):
    """Return weights by name, each a leaf; those in e4m3 have no gradient."""
    torch.manual_seed(seed)
    masters = make_weights(PROBLEM, quantize=False, seed=seed)
    masters = replace(masters, b13=torch.randn_like(masters.b13), b2=torch.randn_like(masters.b2))
    made = (masters.quantized(PROBLEM) if given else masters).named()
    return {n: t.clone().requires_grad_(not given or n[0] == "b") for n, t in made.items()}


def results(layer, held):
    """Return y and all gradients of one call."""
    inputs = make_inputs(PROBLEM, 3)
    x, scores = (t.clone().requires_grad_() for t in (inputs.x, inputs.topk_weights))
    y = layer(x, inputs.topk_ids, scores, ExpertWeights(**held))
    wanted = {"x": x, "scores": scores, **{n: t for n, t in held.items() if t.requires_grad}}
    grads = torch.autograd.grad(y.float().square().sum(), list(wanted.values()))
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def fresh(held):
    copies = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in held.items()}
    return results(Layer(PROBLEM, backend="emulate"), copies)


def bits(t):
    return t.contiguous().view(torch.uint8)


def in_a_buffer(held, name):
    """Let the tensor lie at the front of memory that has room for another; return that memory."""
    t = held[name]
    buffer = t.detach().new_empty(2 * len(t), *t.shape[1:])
    bits(buffer[: len(t)]).copy_(bits(t.detach()))
    t.data = buffer[: len(t)]
    return buffer


def put(target, value):
    with torch.no_grad():
        target.copy_(value)


def written(layer, held, name, value):
    put(held[name], value)


def replaced(layer, held, name, value):
    held[name] = value.clone().requires_grad_(held[name].requires_grad)


def data_replaced(layer, held, name, value):
    held[name].data = value.clone()


def moved_behind(layer, held, name, value):
    """As a host does that keeps several versions in one buffer."""
    place = in_a_buffer(held, name)[len(value) :]
    put(place, value)
    results(layer, held)
    held[name].data = place


def moved_between(layer, held, name, value):
    """To other strides from the same first byte."""
    place = in_a_buffer(held, name)[::2]
    put(place[1:], value[1:])
    results(layer, held)
    held[name].data = place


def stepped(*closure):
    def write(layer, held, name, value):
        """A fused optimizer, whose writes torch does not count; its closure calls the layer."""
        optimizer = torch.optim.AdamW([held[name]], lr=1e-1, fused=True)

        def gradient():
            held[name].grad = results(layer, held)[name]
            return 0.0

        before = held[name].detach().clone()
        if closure:
            optimizer.step(gradient)
        else:
            gradient()
            optimizer.step()
        assert not torch.equal(before, held[name])

    return write


WAYS = {
    "copy_": written,
    "another tensor": replaced,
    ".data": data_replaced,
    ".data behind": moved_behind,
    ".data between": moved_between,
    "step": stepped(),
    "step(closure)": stepped(True),
}


@pytest.mark.parametrize("name", ["w13", "w2", "b13", "b2"])
def test_after_changes_of_one_tensor(name):
    layer, held = Layer(PROBLEM, backend="emulate"), drawn(0)
    change(layer, held, name, [way for way in WAYS if name[0] == "w" or "between" not in way])


@pytest.mark.parametrize("name", ["w13", "w2", "w13_scale", "w2_scale"])
def test_after_changes_of_one_tensor_in_e4m3(name):
    layer, held = Layer(PROBLEM, backend="emulate"), drawn(0, given=True)
    ways = [w for w in WAYS if "step" not in w and ("scale" not in name or "between" not in w)]
    change(layer, held, name, ways)


def change(layer, held, name, ways):
    seen = [results(layer, held)["y"]]
    for seed, way in enumerate(ways, 1):
        WAYS[way](layer, held, name, drawn(seed, "w13_scale" in held)[name].detach())
        found, expected = results(layer, held), fresh(held)
        wrong = [n for n in expected if not torch.equal(bits(found[n]), bits(expected[n]))]
        assert not wrong, f"after {way}: {wrong} of other weights"
        assert not any(torch.equal(found["y"], y) for y in seen), way
        seen.append(found["y"])


@pytest.mark.parametrize("given", [False, True])
def test_one_layer_with_two_sets_of_weights(given):
    """Calls of both lie before their backward passes: each differentiates what it has multiplied."""
    layer, sets = Layer(PROBLEM, backend="emulate"), [drawn(seed, given) for seed in (1, 2)]
    inputs, ys = make_inputs(PROBLEM, 3), []
    sources = [inputs.x.clone().requires_grad_() for _ in sets]
    for x, held in zip(sources, sets, strict=True):
        ys.append(layer(x, inputs.topk_ids, inputs.topk_weights, ExpertWeights(**held)))
    for y, x, held in zip(ys, sources, sets, strict=True):
        y.float().square().sum().backward()
        expected = fresh(held)
        assert torch.equal(y, expected["y"])
        assert torch.equal(x.grad, expected["x"])
        assert torch.equal(held["b13"].grad, expected["b13"])


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_one_matrix_made_in_inference_mode(name):
    """Of its writes nothing is counted; those of the other are."""
    held, layer = drawn(0), Layer(PROBLEM, backend="staged")
    inputs = make_inputs(PROBLEM, 3)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    with torch.inference_mode():
        held = {n: t.clone() if n == name else t.detach() for n, t in held.items()}
        assert held[name].is_inference()
        for seed in range(1, 3):
            y = layer(*call, ExpertWeights(**held))
            held[name].copy_(drawn(seed)[name])
            found = layer(*call, ExpertWeights(**held))
            copies = ExpertWeights(**{n: t.clone() for n, t in held.items()})
            assert torch.equal(found, Layer(PROBLEM, backend="staged")(*call, copies))
            assert not torch.equal(found, y)
