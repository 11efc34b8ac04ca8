"""Which calls are taken for one that has passed all checks, by torch's guards and without them."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.core import planes
from megamoe.core.config import Problem
from megamoe.formats.quantization import quantize_rows
from megamoe.formats.weights import ExpertWeights
from megamoe.layer import signature
from megamoe.layer.inputs import Inputs
from megamoe.layer.signature import Signature, Signatures
from megamoe.testing import make_inputs, make_weights

TOKENS, HIDDEN, TOP_K = 6, 144, 2
PROBLEM = Problem(HIDDEN, 48, 3, TOP_K, max_tokens=8, bias=True, precision="fp8")
ROWS = "x", "topk_ids", "topk_weights"
FURTHER = "num_tokens_device", "x_scale", "out"
WEIGHTS = tuple(ExpertWeights.__dataclass_fields__)


def plain():
    """Return a call with nothing but what each has."""
    i, w = make_inputs(PROBLEM, TOKENS), make_weights(replace(PROBLEM, precision="bf16"))
    call = {"x": i.x, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights}
    call |= dict.fromkeys(FURTHER)
    return call | dict.fromkeys(WEIGHTS) | {"w13": w.w13, "w2": w.w2}


def full():
    """Return a call with everything that there is."""
    i, w = make_inputs(PROBLEM, TOKENS), make_weights(PROBLEM)
    q, scale = quantize_rows(i.x)
    call = {"x": q, "topk_ids": i.topk_ids, "topk_weights": i.topk_weights, **w.named()}
    count = torch.tensor([TOKENS], dtype=torch.int32)
    return call | {"num_tokens_device": count, "out": torch.empty_like(i.x), "x_scale": scale}


def weights_of(call):
    return ExpertWeights(**{name: call[name] for name in WEIGHTS})


def signature_of(call):
    rows = [call[name] for name in ROWS]
    inputs = Inputs.of(*rows, weights_of(call), call["num_tokens_device"], call["x_scale"])
    return Signature(inputs, call["out"], True)


def fits(made, call, **changes):
    call = {**call, **changes}
    rows = [call[name] for name in ROWS]
    try:
        return made.fits(*rows, weights_of(call), *(call[name] for name in FURTHER))
    except RuntimeError:  # as Signatures.find() takes it
        return False


CALLS = {"plain": plain, "full": full}
TENSORS = [
    (kind, name) for kind, make in CALLS.items() for name, t in make().items() if t is not None
]


def of_tensors(chosen=lambda name, t: True):
    """Parametrize by the tensors of each call, or some of them."""
    some = [(kind, name) for kind, name in TENSORS if chosen(name, CALLS[kind]()[name])]
    return pytest.mark.parametrize(("kind", "name"), some)


class Sub(torch.Tensor):
    pass


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def apart(t):
    """Return it with other strides; a vector of one element has none that matter."""
    if t.dim() == 1:
        return t.new_zeros(2 * t.numel())[::2]
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def of_inference(t):
    with torch.inference_mode():
        return t.clone()


def other_dtype(t):
    return t.view({1: torch.uint8, 2: torch.float16, 4: torch.uint32, 8: torch.float64}[t.itemsize])


CHANGES = {
    "fewer": lambda t: torch.cat((t, t))[: len(t) + 1],
    "one dimension more": lambda t: t[None],
    "strides": apart,
    "dtype": other_dtype,
    "device": lambda t: t.to("meta"),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "a subclass": lambda t: t.as_subclass(Sub),
    "an inference tensor": of_inference,
    "freed": freed,
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_low_heap_makes_no_call_another(kind, monkeypatch):
    """Where all memory lies low, as that of a Python that is no PIE does: what was freed is still seen."""
    for module in (signature, planes):
        monkeypatch.setattr(module, "SUSPECT_BELOW", 1 << 63)
    call = CALLS[kind]()
    made = signature_of(call)
    assert fits(made, call)
    for name in ROWS:
        assert not fits(made, call, **{name: freed(call[name])})


@of_tensors()
def test_equal_calls_fit(kind, name):
    """Other memory of what a call brings makes no other call; other memory of weights does."""
    call = CALLS[kind]()
    made = signature_of(call)
    assert fits(made, call)
    assert fits(made, call, **{name: call[name].clone()}) == (name not in WEIGHTS)
    assert fits(made, call), "saying no changes nothing"


@of_tensors()
@pytest.mark.parametrize("change", CHANGES)
def test_another_tensor_does_not_fit(kind, name, change):
    call = CALLS[kind]()
    made = signature_of(call)
    assert not fits(made, call, **{name: CHANGES[change](call[name])})
    assert fits(made, call)


@of_tensors(lambda name, t: t.dtype != torch.float8_e4m3fn)  # of which torch has no negatives
def test_a_negative_view_does_not_fit(kind, name):
    call = CALLS[kind]()
    made = signature_of(call)
    other = torch._neg_view(call[name])
    assert other.data_ptr() == call[name].data_ptr()
    assert not fits(made, call, **{name: other})


@of_tensors(lambda name, t: t.is_floating_point())
def test_a_gradient_is_noticed(kind, name):
    call = CALLS[kind]()
    made = signature_of(call)
    assert not made.requires_grad
    other = {name: call[name].detach().requires_grad_()}
    assert not fits(made, call, **other)
    if name == "out":
        return  # a call whose gradients are recorded has none
    with_gradient = signature_of({**call, **other})
    assert with_gradient.requires_grad
    assert fits(with_gradient, call, **other)
    assert not fits(with_gradient, call)


@of_tensors(lambda name, t: name in WEIGHTS)
def test_weights_that_move_do_not_fit(kind, name):
    call = CALLS[kind]()
    made, old = signature_of(call), call[name].data
    call[name].data = old.clone()
    assert not fits(made, call)
    call[name].data = old
    assert fits(made, call)


@pytest.mark.parametrize("name", ["b13", "b2", "w13_scale", "w2_scale", *FURTHER])
def test_what_is_given_or_left_out_is_noticed(name):
    few, many = plain(), full()
    made = signature_of(few)
    assert not fits(made, few, **{name: many[name]})
    with_it = signature_of({**few, name: many[name]})
    assert fits(with_it, few, **{name: many[name]})
    assert not fits(with_it, few)
    made = signature_of(many)
    assert not fits(made, many, **{name: None})


def test_tensors_in_the_place_of_others_do_not_fit():
    """Two of one shape and type: which of them is there matters."""
    call = plain() | {"b2": torch.zeros(3, HIDDEN)}
    made = signature_of(call)
    assert not fits(made, call, b2=None, b13=call["b2"])


def test_out_that_is_x_is_as_good_as_none():
    call = plain()
    made = signature_of(call)
    assert fits(made, call, out=call["x"])
    in_place = signature_of({**call, "out": call["x"]})
    for out in (None, call["x"]):
        assert fits(in_place, call, out=out)
    assert not fits(in_place, call, out=torch.empty_like(call["x"]))
    x = call["x"].clone()
    assert fits(in_place, call, x=x, out=x)


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("kind", CALLS)
def test_out_that_overlaps_x_does_not_fit(kind, shift):
    """Rows of e4m3 are shorter: there `out` at the address of x is no x."""
    call = plain() | {"out": torch.empty(TOKENS, HIDDEN).bfloat16()} if kind == "plain" else full()
    made = signature_of(call)
    rows = torch.zeros(TOKENS + 2, HIDDEN, dtype=torch.bfloat16)
    x = rows[1 : 1 + TOKENS].view(-1).view(call["x"].dtype)[: TOKENS * HIDDEN].view(TOKENS, HIDDEN)
    out = rows[1 + shift : 1 + shift + TOKENS]
    same = kind == "plain" and shift == 0
    assert fits(made, call, x=x, out=out) == same
    assert fits(made, call, x=x, out=out.clone())


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def vmap():
    """Be inside of it, where tensors that it does not batch are plain ones still."""
    with torch._functorch.vmap.vmap_increment_nesting(2, "error"):
        yield


@contextmanager
def functional_grad():
    with torch._functorch.eager_transforms.grad_increment_nesting():
        yield


MODES = {
    "a mode": Seen,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "forward AD": forward_ad.dual_level,
    "vmap": vmap,
    "torch.func.grad": functional_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CALLS)
def test_a_mode_or_transform_does_not_fit(kind, mode):
    call = CALLS[kind]()
    made = signature_of(call)
    with MODES[mode]():
        assert not fits(made, call)
    assert fits(made, call)


def test_tensors_that_vmap_batches_are_not_found():
    call = plain()
    known = Signatures()
    known.add(signature_of(call))
    given = call["topk_ids"], call["topk_weights"], weights_of(call), None, None, None
    found = []

    def one(x):
        found.append(known.find(x, *given))
        return x

    torch.vmap(one)(call["x"][None])
    assert found == [None]
    assert known.find(call["x"], *given) is not None


def test_fake_tensors_do_not_fit():
    call = plain()
    made = signature_of(call)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    assert not fits(made, call, x=mode.from_tensor(call["x"]))
    with mode:
        assert not fits(made, call, x=mode.from_tensor(call["x"]))


LAYOUTS = {
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning", "ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@of_tensors(lambda name, t: t.itemsize > 1)
def test_tensors_without_strides_are_not_found(kind, name, layout):
    """Torch's guards end the process where one is nested."""
    call = CALLS[kind]()
    known = Signatures()
    known.add(signature_of(call))
    try:
        other = LAYOUTS[layout](call[name])
    except (RuntimeError, IndexError):
        return  # there is none of this type
    call = {**call, name: other}
    rows, further = ([call[n] for n in names] for names in (ROWS, FURTHER))
    assert known.find(*rows, weights_of(call), *further) is None


def test_none_and_what_is_no_tensor_is_not_found():
    call = plain()
    known = Signatures()
    made = known.add(signature_of(call))
    rest = None, None, None
    for name in ROWS:
        for wrong in (None, 1, [1], "x"):
            given = [{**call, name: wrong}[n] for n in ROWS]
            assert known.find(*given, weights_of(call), *rest) is None, (name, wrong)
    good = [call[n] for n in ROWS]
    for wrong in (None, 1, {}):
        assert known.find(*good, wrong, *rest) is None
        assert known.find(*good, replace(weights_of(call), w13=wrong), *rest) is None
    for place in range(3):
        wrong = [None] * 3
        wrong[place] = "x"
        assert known.find(*good, weights_of(call), *wrong) is None
    assert known.find(*good, weights_of(call), *rest) is made


def test_calls_of_many_shapes_are_known_at_a_time(monkeypatch):
    monkeypatch.setattr(signature, "MAX_SHAPES", 3)
    call, known = plain(), Signatures()
    parts = [{**call, **{n: call[n][:tokens] for n in ROWS}} for tokens in range(4)]

    def found(part):
        return known.find(*(part[n] for n in ROWS), weights_of(part), None, None, None)

    made = [known.add(signature_of(part)) for part in parts[:3]]
    assert [found(part) for part in parts] == [*made, None]
    last = known.add(signature_of(parts[3]))
    assert [found(part) for part in parts] == [None, None, None, last]


def test_the_last_calls_of_a_shape_are_known():
    """A layer that is called in several ways in turn is not checked again each time."""
    known, call = Signatures(), plain()
    calls = [{**call, "topk_weights": call["topk_weights"].clone()}]
    for _ in range(signature.OF_A_SHAPE):  # other weights
        calls.append({**call, "w2": call["w2"].detach().clone()})

    def found(part):
        return known.find(*(part[n] for n in ROWS), weights_of(part), None, None, None)

    made = [known.add(signature_of(part)) for part in calls]
    assert [found(part) for part in calls] == [None, *made[1:]]


def test_no_tokens_lie_nowhere():
    """Memory of nothing has no address, and is not freed memory."""
    call = plain()
    call |= {name: torch.empty_like(call[name][:0]) for name in ROWS}
    assert fits(signature_of(call), call)
