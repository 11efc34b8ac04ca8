"""How many Python functions of ours a steady call runs until the driver launches."""

import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import driver_stub
import pytest
import torch
from driver_stub import backend_of, tensors

import megamoe.layer.layer
from megamoe import ops
from megamoe.layer.layer import Layer
from megamoe.ops import machines, operators

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


ROWS, HIDDEN, WIDTH, EXPERTS = 128, 64, 128, 4


@pytest.fixture
def gpu(monkeypatch):
    """Let megamoe.ops launch from CPU memory."""
    driver_stub.on_cpu(monkeypatch)
    made = machines.Gpu(0)
    made._num_sms = 132
    monkeypatch.setattr(operators, "machine_of", lambda device, variant: made)
    monkeypatch.setattr(machines, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(machines, "current_stream_handle", lambda ordinal: 0x5000)
    return made


def operands():
    offs = torch.full((EXPERTS,), ROWS // EXPERTS).cumsum(0).int()
    sizes = (ROWS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return offs, *(torch.zeros(size, dtype=torch.bfloat16) for size in sizes)


def test_a_steady_operator_takes_few_calls(gpu):
    offs, x, up, down = operands()
    calls = {
        "grouped_mm": (51, lambda: ops.grouped_mm(x, up.mT, offs=offs)),
        "grouped_mm_act": (66, lambda: ops.grouped_mm_act(x, up.mT, offs=offs)),
        "grouped_mlp": (95, lambda: ops.grouped_mlp(x, up.mT, down.mT, offs=offs)),
    }
    for name, (most, call) in calls.items():
        gpu._kept.clear()
        before, first = driver_stub.launched(), counted(call)
        launches = driver_stub.launched() - before
        assert launches == (2 if name == "grouped_mlp" else 1)
        # of several, one whose output lies where an earlier one did
        found = min((counted(call) for _ in range(25)), key=lambda found: sum(found.values()))
        assert any("fill" in code for code in first)
        assert not any("fill" in code or "check_" in code for code in found), found
        assert 10 < sum(found.values()) <= most, (name, sum(found.values()), found)


def test_kept_arguments_are_those_of_their_tensors(gpu):
    """Of a call with a tensor elsewhere, of other sizes, with other ends, and of the first one again."""
    offs, x, up, _ = operands()
    found = []
    for given, ends in ((x, offs), (x.clone(), offs), (x[:96], offs), (x, offs.clone()), (x, offs)):
        ops.grouped_mm(given, up.mT, offs=ends)
        args = driver_stub.argument("grouped")
        assert args.own.ends == ends.data_ptr()
        assert args.own.num_rows == len(given)
        found.append(bytes(args.gemm[0].a[0]))
    assert found[0] == found[3] == found[4]
    assert len(set(found)) == 3
