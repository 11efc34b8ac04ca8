"""Weights that adapters compute from parameters in every call are quantized once a step, and never stale."""

import copy
import io

import pytest
import torch
from copies import watched
from writes import WRITES, other_values

import megamoe
from megamoe.adapters.library_parameters import joined, tie
from megamoe.core.config import Problem
from megamoe.formats.versions import made_of
from megamoe.formats.weights import ExpertWeights
from megamoe.launch import cache as cache_module

PROBLEM = Problem(
    hidden=32, intermediate=16, num_experts=4, top_k=2, max_tokens=32, precision="fp8"
)
STEPS = 3
DUE = 2 * (1 + STEPS)


class Experts(torch.nn.Module):
    """A library's: w1 and w3 [L, I, H] apart, w2 [L, H, I]; a layer over what is made of them in each call."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        shapes = {"w1": (4, 16, 32), "w3": (4, 16, 32), "w2": (4, 32, 16)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape).to(dtype)))
        if kind == "tied":
            tie((self.w1, self.w3))
        self.layer = megamoe.Layer(PROBLEM, backend="staged")

    def weights(self):
        w13 = joined((self.w1, self.w3)).transpose(0, 1).bfloat16()
        wanted = self.w1.requires_grad or self.w3.requires_grad
        made_of(w13, (self.w1, self.w3), trains=wanted)
        w2 = made_of(self.w2.bfloat16(), (self.w2,), trains=self.w2.requires_grad)
        return ExpertWeights(w13, w2)

    def invalidate(self):
        megamoe.invalidate()

    def forward(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(12, 32, generator=generator).bfloat16()
        weights, ids = torch.randn(12, 4, generator=generator).softmax(-1).topk(2)
        return self.layer(x, ids, weights, self.weights())


KINDS = ("tied", "apart", "fp32")


@pytest.fixture(params=KINDS)
def experts(request):
    return Experts(request.param)


@pytest.mark.parametrize("fused", [True, False])
def test_once_a_step(experts, fused):
    optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2, fused=fused)
    with watched() as seen:
        for _ in range(STEPS):
            for micro in range(3):
                experts(micro).float().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            experts()
            experts()
    assert seen == {"stale": 0, "q": DUE}


def test_copies_of_parameters_are_not_kept():
    experts = Experts("apart")
    with torch.no_grad():
        experts()
    kept = experts.layer._runtime.cache._entries["w13"].kept
    assert [s.cdata for s in kept] == [w.untyped_storage()._cdata for w in (experts.w1, experts.w3)]


def copied(experts, name):
    WRITES["copy_"](experts, other_values(experts, name))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("write", ["copy_", ".data =", "load_state_dict", ".data.copy_"])
@pytest.mark.parametrize("name", ["w1", "w3", "w2"])
def test_writes_to_one_parameter(experts, write, name, grad):
    with watched() as seen, torch.set_grad_enabled(grad):
        experts()
        WRITES[write](experts, other_values(experts, name))
        experts()
        experts()
    assert seen["stale"] == 0
    assert seen["q"] <= 4


def test_weights_that_are_kept():
    """Views follow a write that came after them; copies are of the values that they were made of."""
    with watched() as seen, torch.no_grad():
        for kind in KINDS:
            experts = Experts(kind)
            old = experts.weights()
            experts.weights = lambda old=old: old
            for name in ("w1", "w3", "w2"):
                experts()
                copied(experts, name)
                experts()
            old.w13.mul_(2)  # a copy, too, may be written to
            experts()
    assert seen["stale"] == 0


def trained_by(optimizer):
    def write(w):
        for t in (w.w13, w.w2):
            t.grad = torch.ones_like(t)
        optimizer([w.w13, w.w2], lr=0.1, fused=True).step()

    return write


def pointed_into(w):
    w.w13.data.mul_(2)
    megamoe.invalidate()


def written_in_place(w):
    w.w13.mul_(2)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", [trained_by(torch.optim.AdamW), pointed_into, written_in_place])
def test_copies_that_are_kept_are_weights_of_their_own(write, inference):
    experts = Experts("apart")
    with torch.inference_mode(inference), watched() as seen:
        kept = ExpertWeights(*(t.detach().clone() for t in experts.weights().named().values()))
        for name in ("w13", "w2"):  # as join() marks what it has copied
            made_of(getattr(kept, name), (experts.w1, experts.w3))
        experts.weights = lambda: kept
        for _ in range(3):
            experts()
            write(kept)
            experts()
    assert seen["stale"] == 0


@pytest.mark.parametrize("kind", ["tied", "apart"])
def test_saved_and_copied_tensors_are_made_of_nothing(kind):
    experts, file = Experts(kind).requires_grad_(False), io.BytesIO()
    torch.save(experts.weights().named(), file)
    file.seek(0)
    loaded = ExpertWeights(**torch.load(file))
    copied = copy.deepcopy(experts.weights())
    with watched() as seen, torch.no_grad():
        for w in (experts.weights(), loaded, copied, loaded, copied):
            w.w13.mul_(2)
            experts.weights = lambda w=w: w
            experts()
    assert seen["stale"] == 0


def test_a_backward_pass_behind_a_write():
    """The copies of the old values, which backward needs once more, are not those of the next call."""
    experts = Experts("apart")
    with watched() as seen:
        y = experts()
        copied(experts, "w1")
        runtime, old = experts.layer._runtime, experts.weights()
        copied(experts, "w3")
        runtime.cache.transposed(runtime.problem, old)
        y.float().sum().backward()
        experts()
    assert seen["stale"] == 0


def test_inference_mode():
    with torch.inference_mode():
        made = Experts("apart").requires_grad_(False)
    for experts, due in (
        # the first call's copy of w1 and w3 is used twice, by prepare(), too
        (Experts("apart"), 3),
        (made, 6),  # torch counts no writes: at every use
    ):
        with watched() as seen, torch.inference_mode():
            experts()
            experts()
        assert seen == {"stale": 0, "q": due}


@pytest.mark.parametrize("grad", [True, False])
def test_captured_graphs_quantize(experts, monkeypatch, grad):
    with watched() as seen, torch.set_grad_enabled(grad):
        experts()
        with monkeypatch.context() as patch:
            patch.setattr(cache_module, "_capturing", lambda w: True)
            experts()
        assert seen["q"] == 4
        for p in experts.parameters():  # what a replay does
            p.data.mul_(2)
        experts()
    assert seen == {"stale": 0, "q": 6}


def test_a_wrong_origin_is_seen():
    """The planted fault: what is said to be made of one tensor is made of two."""
    experts = Experts("apart")
    right = experts.weights

    def wrong():
        w = right()
        made_of(w.w13, (experts.w1,))
        return w

    experts.weights = wrong
    with watched() as seen, torch.no_grad():
        experts()
        copied(experts, "w3")
        experts()
    assert seen == {"stale": 1, "q": 2}
