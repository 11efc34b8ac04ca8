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
from megamoe.launch import launches
from megamoe.layer.layer import Layer
from megamoe.ops import calls, machines, operators

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
        megamoe.layer.layer, "open_backend", lambda opening: backend_of(opening.problem)
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
    for name, ran in found.items():
        assert 10 < sum(ran.values()) <= most[name], (name, sum(ran.values()), ran)


ROWS, HIDDEN, WIDTH, EXPERTS = 128, 64, 128, 4


@pytest.fixture
def gpu(monkeypatch):
    """Let megamoe.ops launch from CPU memory."""
    driver_stub.on_cpu(monkeypatch)
    made = machines.Gpu(0)
    monkeypatch.setattr(operators, "machine_of", lambda device, variant: made)
    for module in (machines, calls):
        monkeypatch.setattr(module, "on_device", lambda device: nullcontext())
        monkeypatch.setattr(module, "current_stream_handle", lambda ordinal: 0x5000)
    monkeypatch.setattr(calls, "allocator", lambda on_gpu: launches.allocator(False))
    return made


def operands():
    offs = torch.full((EXPERTS,), ROWS // EXPERTS).cumsum(0).int()
    sizes = (ROWS, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return offs, *(torch.zeros(size, dtype=torch.bfloat16) for size in sizes)


def test_a_steady_operator_takes_few_calls(gpu):
    """Also with tensors elsewhere than those of the call before."""
    offs, x, up, down = operands()
    budgets = {
        "grouped_mm": (22, lambda x: ops.grouped_mm(x, up.mT, offs=offs)),
        "grouped_mm_act": (22, lambda x: ops.grouped_mm_act(x, up.mT, offs=offs)),
        "grouped_mlp": (25, lambda x: ops.grouped_mlp(x, up.mT, down.mT, offs=offs)),
    }
    held = []
    for name, (most, call) in budgets.items():
        calls._plans.clear()
        before, first = driver_stub.launched(), counted(lambda call=call: call(x))
        launches = driver_stub.launched() - before
        assert launches == (2 if name == "grouped_mlp" else 1)
        assert any("fill" in code for code in first)
        for given in (x, x.clone(), x):
            found = counted(lambda call=call, given=given: held.append(call(given)))
            assert not any("fill" in code or "check_" in code for code in found), found
            ran = sum(count for code, count in found.items() if "replace_address" not in code)
            assert 10 < ran <= most, (name, ran, found)
        assert driver_stub.launched() == before + 4 * launches


def test_a_step_fills_no_argument_twice(gpu):
    """Its tensors are elsewhere than those of the step before."""
    offs, x, up, down = operands()
    leaves, held = [t.requires_grad_() for t in (x, up, down)], []

    def step():
        held.extend(t.grad for t in leaves)
        for t in leaves:
            t.grad = None
        ops.grouped_mlp(x, up.mT, down.mT, offs=offs).sum().backward()

    with torch.autograd.set_multithreading_enabled(False):
        assert sum(n for code, n in counted(step).items() if code.endswith(":fill")) == 6
        found = counted(step)
    assert not any("fill" in code for code in found), found
    assert 10 < sum(found.values()) <= 240, (sum(found.values()), found)


def test_kept_arguments_are_those_of_their_tensors(gpu):
    """Of a call with a tensor elsewhere, of other sizes, with other ends, and of the first one again."""
    offs, x, up, _ = operands()
    found, outs = [], []
    for given, ends in ((x, offs), (x.clone(), offs), (x[:96], offs), (x, offs.clone()), (x, offs)):
        outs.append(ops.grouped_mm(given, up.mT, offs=ends))
        args = driver_stub.argument("grouped")
        gemm = args.gemm[0]
        assert args.own.ends == ends.data_ptr()
        assert args.own.num_rows == len(given)
        assert args.own.cleared[0] == outs[-1].data_ptr()
        assert gemm.bias is gemm.a_scale is args.own.row_weight is args.own.cleared[1] is None
        row = 2 * outs[-1].shape[1]
        for maps, base in ((gemm.a, given.data_ptr()), (gemm.out, outs[-1].data_ptr() - 64 * row)):
            assert maps[0].words[0] == base
        found.append(bytes(gemm.a[0]))
    assert found[0] == found[3] == found[4]
    assert len(set(found)) == 3


def test_a_call_is_repeated_only_where_it_is_the_same(gpu):
    """Not where a tensor is two arguments, nor where torch's operations took part, nor with gradients."""
    offs, x, up, _ = operands()
    w = torch.zeros(1, ROWS, ROWS, dtype=torch.bfloat16)
    bias = torch.zeros(EXPERTS, 2 * WIDTH)

    def plans():
        of = ops.grouped_mm.__wrapped__, ops.grouped_mm_dact.__wrapped__
        return [plan.complete for key, plan in calls._plans.items() if plan and key[0] in of]

    calls._plans.clear()
    for b, grad in ((bias, False), (bias.bfloat16(), False), (None, True)):
        for _ in range(2):
            ops.grouped_mm(x.clone().requires_grad_(grad), up.mT, offs=offs, bias=b)
    assert plans() == [True, False]
    ops.grouped_mm(x, up.mT, offs=offs)
    assert plans() == [True, False, True]
    square = w[0]
    for pre in (square, square.clone()):
        ops.grouped_mm_dact(square, w, pre, "relu2")
        assert driver_stub.argument("grouped").gu[0].words[0] == pre.data_ptr()
        assert plans()[-1] is False
    with ops.sm_margin(100):
        ops.grouped_mm(x, up.mT, offs=offs)
    assert driver_stub.config()["grid"][0] == 32
    ops.grouped_mm(x, up.mT, offs=offs)
    assert driver_stub.config()["grid"][0] == 132


def test_a_new_thread_has_a_context(gpu):
    """Where it only changes addresses: the driver refuses without."""
    offs, x, up, _ = operands()
    ops.grouped_mm(x, up.mT, offs=offs)
    driver_stub.number("no_context").value = 1
    moved = x.clone()
    ops.grouped_mm(moved, up.mT, offs=offs)
    assert driver_stub.argument("grouped").gemm[0].a[0].words[0] == moved.data_ptr()
