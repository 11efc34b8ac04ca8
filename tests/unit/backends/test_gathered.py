"""Records on their way to other ranks: what comes out is what went in, through pickle, which refuses float8."""

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from megamoe.backends.call import Call, GradRequest, Needs
from megamoe.backends.gathered import mapped, pack, unpack
from megamoe.core.config import Problem
from megamoe.formats.quantization import quantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import TransposedWeights
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(144, 48, 3, 2, max_tokens=8, bias=True, precision="fp8")
E4M3 = torch.float8_e4m3fn


def through(record):
    """Return it as another rank has it."""
    return unpack(pickle.loads(pickle.dumps(pack(record))))


def assert_same(found, given):
    """The same types, down to the leaves, and the same bits; strides are not kept."""
    assert type(found) is type(given)
    if isinstance(given, torch.Tensor):
        assert (found.dtype, found.shape, found.device) == (given.dtype, given.shape, given.device)
        assert found.is_contiguous()
        assert not found.requires_grad
        contiguous = given.detach().clone(memory_format=torch.contiguous_format)
        as_bytes = [t.view(-1).view(torch.uint8) for t in (found, contiguous)]
        assert torch.equal(*as_bytes)
    elif isinstance(given, dict):
        assert list(found) == list(given)
        for name, part in given.items():
            assert_same(found[name], part)
    elif isinstance(given, tuple):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    elif hasattr(given, "__dataclass_fields__"):
        for name in given.__dataclass_fields__:
            assert_same(getattr(found, name), getattr(given, name))
    else:
        assert found == given


@dataclass(frozen=True)
class Inner:
    numbers: Any
    flag: bool = True


class Outer(NamedTuple):
    inner: Inner
    named: dict
    nothing: None = None


def numbers():
    """Return a tensor of each kind."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(5, 16, generator=g)
    return {
        "fp32": x,
        "bf16": x.bfloat16(),
        "e4m3": x.to(E4M3),
        "bytes": x.view(torch.uint8),
        "ids": x.long(),
        "int32": x.int(),
        "bool": x > 0,
        "transposed": x.t(),
        "with gaps": x[:, ::2].bfloat16()[:, :3],
        "e4m3 with gaps": x.to(E4M3)[::2, 3:7],
        "one column": x[:, :1].as_strided((5, 1), (16, 7)),
        "expanded": x[:, :1].expand(5, 4),
        "empty": x[:0].bfloat16(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "leaf": x.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(x.bfloat16()).detach(),
    }


def records():
    yield from numbers().values()
    yield from (None, True, False, 0, 2.5, "text", (), {})
    deep = Inner({"a": numbers()["e4m3"], "b": (None, True, {"c": numbers()["bf16"]})}, False)
    yield Outer(deep, {"none": None, "more": Outer(Inner(None), {}), "pair": (1, 2.0)})
    yield (deep, [1, None], (numbers(),))


def test_records_go_round():
    for record in records():
        assert_same(through(record), record)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_call_and_what_is_wanted_go_round(quantized):
    i, weights = make_inputs(PROBLEM, 5), make_weights(PROBLEM)
    x = QuantizedRows(*quantize_rows(i.x)) if quantized else i.x
    call = Call(x, i.topk_ids, i.topk_weights, weights, torch.tensor([3], dtype=torch.int32))
    transposed = TransposedWeights.of(PROBLEM, weights)
    into = {"w13": torch.ones(3, 96, 144), "b2": torch.ones(3, 144).bfloat16()}
    wanted = GradRequest(Needs(x=False, b13=False), into, True, transposed)
    given = call, i.x, torch.arange(64, dtype=torch.uint8), wanted
    found = through(given)
    assert_same(found, given)
    assert found[0].weights.w13.dtype == found[3].transposed.w13.dtype == E4M3
    plain = call._replace(num_tokens_device=None)
    assert_same(through((plain, None, GradRequest())), (plain, None, GradRequest()))


def test_what_is_packed_is_a_copy():
    """A thread that gathers sees no later write to what another one brought."""
    x = torch.zeros(3, 4)
    packed = pack({"x": x, "part": x[:, ::2]})
    x.fill_(1)
    found = unpack(packed)
    assert not found["x"].any()
    assert not found["part"].any()


def test_tensors_without_dimensions_go_round():
    """A number on the device is one, which view() does not take apart into bytes; so with none or one element."""
    numbers = (torch.tensor(7), torch.tensor(-1.5), torch.tensor(0.5).to(E4M3), torch.tensor(True))
    assert [type(part) for part in pack(numbers)] == [type(pack(torch.ones(1)))] * 4
    assert_same(through(numbers), numbers)
    sizes = (torch.zeros(0), torch.zeros(3, 0, dtype=torch.bfloat16), torch.ones(1, 1).to(E4M3))
    assert_same(through(sizes), sizes)


def test_tensors_of_modes_and_subclasses_are_plain_afterwards():
    with torch.inference_mode():
        x = torch.ones(2, 3)
    found = through((torch.nn.Parameter(torch.ones(2, 3)), x))
    assert [type(t) for t in found] == [torch.Tensor] * 2
    assert not any(t.requires_grad or t.is_inference() for t in found)
    negative = torch._neg_view(torch.ones(2, 3))
    assert torch.equal(through(negative), torch.full((2, 3), -1.0))


def test_mapped_puts_a_result_in_the_place_of_every_leaf():
    record = Outer(Inner(torch.ones(2)), {"a": (torch.zeros(3), None)})
    assert mapped(lambda t: t.numel(), record) == Outer(Inner(2), {"a": (3, None)})
    sizes = mapped(str, (1, True, {"a": 2}, torch.ones(1)), int)
    assert sizes[:3] == ("1", "True", {"a": "2"})
    assert torch.equal(sizes[3], torch.ones(1))
