"""The tools that train, without a GPU: the reference backend stands for the kernel; faults are planted."""

from pathlib import Path

import pytest
import torch

from megamoe.backends.reference import ReferenceBackend
from megamoe.config import Problem

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


class Faulty(ReferenceBackend):
    """Does something to the gradients of one of its calls."""

    calls, wrong_call = 0, 5

    def spoil(self, gradients):
        """Plant a fault."""

    def backward(self, *args, **kwargs):
        gradients = super().backward(*args, **kwargs)
        self.calls += 1
        if self.calls == self.wrong_call:
            self.spoil(gradients)
        return gradients


class OtherBits(Faulty):
    wrong_call = 30  # of the repeat

    def spoil(self, gradients):
        gradients[0].view(torch.int16).flatten()[7] ^= 1 << 10


class NotFinite(Faulty):
    def spoil(self, gradients):
        gradients[1].flatten()[3] = float("nan")


class NoGradient(ReferenceBackend):
    def backward(self, *args, into=None, **kwargs):
        return [g if g is None else torch.zeros_like(g) for g in super().backward(*args, **kwargs)]


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        (ReferenceBackend, []),
        (OtherBits, ["a repeat has other bits", "a repeat ends with other weights"]),
        (NotFinite, ["values of gradients are not finite", "a repeat has other bits"]),
        (NoGradient, ["no weight has moved"]),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_soak_train_says_what_differs_in_a_repeat(backend, found, precision):
    from common import Rank
    from soak_layer import Outcome
    from soak_train import Trainer, verdict

    problem = Problem(64, 48, 6, 2, max_tokens=40, precision=precision)
    layers = [ReferenceBackend(problem), backend(problem)]
    if backend is NoGradient:
        layers = [backend(problem), backend(problem)]
    trainer, out = Trainer(Rank(0, 1, torch.device("cpu")), layers, steps=12), Outcome("")
    runs = [trainer.run(12, lambda: None) for _ in range(2)]
    verdict(out, trainer, runs)
    assert bool(out.failures) == bool(found)
    for text in found:
        assert any(text in failure for failure in out.failures), out.failures


def test_soak_train_draws_every_routing_and_odd_numbers_of_tokens():
    from common import Rank
    from soak_train import ROUTES, Trainer

    problem = Problem(64, 48, 6, 2, max_tokens=40)
    trainer = Trainer(Rank(0, 1, torch.device("cpu")), [ReferenceBackend(problem)] * 2, steps=1)
    drawn = [batch for n in range(40) for batch in trainer.draw(n)]
    tokens = {inputs.x.shape[0] for inputs, _ in drawn}
    assert {0, 1, 40} < tokens
    assert any(count is not None and int(count) < inputs.x.shape[0] for inputs, count in drawn)
    assert {inputs.topk_ids.dtype for inputs, _ in drawn} == {torch.int32, torch.int64}
    full = [inputs for inputs, _ in drawn if inputs.x.shape[0] == 40]
    assert any((inputs.topk_ids == 3).all() for inputs in full)  # an overloaded expert
    assert any((inputs.topk_ids == -1).all() for inputs in full)
    assert len(ROUTES) == 7
