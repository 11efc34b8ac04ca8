"""Experts that are a parameter each: where they are read in place, where gradients go; activations found by trying."""

import pytest
import torch
import torch.nn.functional as F

from megamoe.adapters.library_activations import candidates, matching
from megamoe.adapters.library_parameters import as_one, joined, tie
from megamoe.core.config import ACTIVATIONS, Activation
from megamoe.core.errors import ConfigError
from megamoe.formats.joined import join_w1_w3


def parameters(count=3, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, 4, 8, generator=generator).to(dtype)
    return [torch.nn.Parameter(part.clone()) for part in drawn]


def views(order, gap=0):
    """Parameters that lie in one buffer in an order, with a gap between them."""
    whole = torch.randn(4, 32 + gap).bfloat16()
    return [torch.nn.Parameter(whole[i, :32].view(4, 8)) for i in order]


@pytest.mark.parametrize("given", [views([0, 1, 2]), views([1, 3], gap=8), views([2])])
def test_equal_distances_are_read_in_place(given):
    found = joined(given)
    assert torch.equal(found, torch.stack(given))
    assert found.data_ptr() == given[0].data_ptr()
    with torch.no_grad():
        given[-1].add_(1)
    assert torch.equal(found, torch.stack(given))


OTHERS = {
    "apart": parameters(), "descending": views([2, 1, 0]), "uneven": views([0, 1, 3]),
    "the same twice": views([1, 1]), "no multiple of 16 bytes": views([0, 1], gap=4),
    "transposed": [p.detach().t() for p in views([0, 1])],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_copied(name):
    given = OTHERS[name]
    assert as_one(given) is None
    found = joined(given)
    assert torch.equal(found, torch.stack(given))
    assert found.data_ptr() != given[0].data_ptr()


def test_neighbours_of_another_storage_are_not_read():
    """Tensors may lie behind each other by chance; a view of the first one's storage would not reach the second."""
    memory = bytearray(128)
    halves = [torch.frombuffer(memory, dtype=torch.bfloat16, count=32, offset=o) for o in (0, 64)]
    assert halves[1].data_ptr() - halves[0].data_ptr() == 64
    assert as_one(halves) is None


def test_tied_parameters_are_in_place_and_stay_themselves():
    given = parameters()
    before = [p.detach().clone() for p in given]
    identities = [id(p) for p in given]
    tie(given)
    assert as_one(given) is not None
    assert [id(p) for p in given] == identities
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_reach_each_parameter_that_wants_one(tied):
    given = parameters()
    if tied:
        tie(given)
    given[1].requires_grad_(False)
    dy = torch.randn(3, 4, 8).bfloat16()
    joined(given).backward(dy)
    assert torch.equal(given[0].grad, dy[0])
    assert given[1].grad is None
    assert torch.equal(given[2].grad, dy[2])
    assert not joined(given[1:2]).requires_grad


class NoGradient(torch.autograd.Function):
    """A use that gives the second argument no gradient, as a layer whose weight gradients wait."""

    @staticmethod
    def forward(ctx, x, w):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def test_a_use_without_a_gradient_leaves_parts_without_one():
    x, given = torch.zeros(3, requires_grad=True), parameters(2)
    halves = [part.requires_grad_() for part in torch.randn(2, 3, 4, 8).unbind()]
    for whole, parts in ((joined(given), given), (join_w1_w3(*halves), halves)):
        NoGradient.apply(x, whole).sum().backward()
        assert all(p.grad is None for p in parts)


def test_activations_are_found_by_what_they_give():
    def gated(act, limit=None, offset=0.0):
        def gate(v):
            first, second = v.chunk(2, dim=-1)
            if limit is not None:
                first, second = first.clamp(max=limit), second.clamp(-limit, limit)
            return act(first) * (second + offset)

        return gate

    def quick(v):
        return v * torch.sigmoid(1.702 * v)

    tried = candidates(True, [7.0], [1.702])
    assert matching(gated(quick, 7.0, 1.0), tried, "a test") == ACTIVATIONS["swiglu_oai"]
    assert matching(gated(F.silu), candidates(True), "a test") == ACTIVATIONS["swiglu"]
    plain = matching(gated(quick), candidates(True, [None], [1.702]), "a test")
    assert plain == Activation("clamped_swiglu", alpha=1.702)
    relu2 = matching(lambda v: F.relu(v).square(), candidates(False), "a test")
    assert relu2 == ACTIVATIONS["relu2"]
    for other in (gated(F.relu), gated(F.silu, 7.5), gated(F.silu, None, 0.5)):
        with pytest.raises(ConfigError, match="activation is that of a test, expected one of swig"):
            matching(other, tried, "a test")
