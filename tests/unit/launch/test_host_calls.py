"""How many Python functions of ours a steady call runs until the driver launches."""

import sys
from collections import Counter
from dataclasses import replace

import driver_stub
import pytest
import torch
from driver_stub import backend_of, tensors

import megamoe.layer.layer
from megamoe.layer.layer import Layer

pytestmark = pytest.mark.stub


def counted(call):
    found = Counter()

    def seen(frame, event, argument):
        code = frame.f_code
        if event == "call" and ("/megamoe/" in code.co_filename or "/jit/" in code.co_filename):
            found[code.co_filename.rsplit("/", 1)[-1] + ":" + code.co_name] += 1

    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize(
    ("precision", "most"),
    [
        ("bf16", {"forward": 15, "recorded": 41, "backward": 60}),
        ("fp8", {"forward": 18, "recorded": 45, "backward": 64}),
    ],
)
def test_a_steady_call_takes_few_calls(monkeypatch, precision, most):
    """With a state elsewhere than that of the call before. A module takes one call more than a layer."""
    monkeypatch.setattr(
        megamoe.layer.layer, "open_backend", lambda name, problem, *_: backend_of(problem)
    )
    problem = replace(driver_stub.PROBLEM, precision=precision)
    weights = driver_stub.weights_of(replace(problem, precision="bf16"))
    layer, (x, ids, scores), found = Layer(problem, "alone"), tensors(), {}
    for _ in range(3):
        found["forward"] = counted(lambda: layer(x, ids, scores, weights))
    for t in (x, weights.w13, weights.w2):
        t.requires_grad_()
    for _ in range(3):
        ys = []
        found["recorded"] = counted(lambda ys=ys: ys.append(layer(x, ids, scores, weights)))
        dy = torch.ones_like(ys[0])
        found["backward"] = counted(lambda y=ys[0], dy=dy: y.backward(dy))
    for name, calls in found.items():
        assert 10 < sum(calls.values()) <= most[name], (name, sum(calls.values()), calls)
