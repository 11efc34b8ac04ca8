"""Every wrong argument of a call is refused by name before anything runs; what "auto" chooses."""

import logging
from dataclasses import replace

import pytest
import torch

from megamoe import ArgumentError, CompileError, ConfigError, Layer, Problem
from megamoe.backends import select
from megamoe.backends.select import Opening, choose, make_backend, why_not_mega
from megamoe.group.group import Group
from megamoe.jit import paths
from megamoe.testing import make_inputs, make_weights

PROBLEM = Problem(48, 32, 5, 2, max_tokens=16)
INPUTS = make_inputs(PROBLEM, 12)
GOOD = {
    "x": INPUTS.x,
    "topk_ids": INPUTS.topk_ids,
    "topk_weights": INPUTS.topk_weights,
    "weights": make_weights(PROBLEM),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", INPUTS.x.float(), "x.dtype is torch.float32, expected torch.bfloat16"),
        ("x", INPUTS.x[:, :32], r"x.shape is \[12, 32\], expected \[12, 48\]"),
        ("x", None, "x is NoneType"),
        ("x", INPUTS.x.repeat(2, 1), r"topk_ids.shape is \[12, 2\], expected \[24\] \+ \[2\]"),
        ("topk_ids", INPUTS.topk_ids.short(), "topk_ids.dtype is torch.int16"),
        ("topk_ids", INPUTS.topk_ids[:6], r"topk_ids.shape is \[6, 2\], expected \[12\] \+ \[2\]"),
        ("topk_ids", INPUTS.topk_ids.to("meta"), "topk_ids.device is meta, expected cpu"),
        ("topk_weights", INPUTS.topk_ids, "topk_weights.dtype is torch.int64"),
        ("topk_weights", INPUTS.topk_weights[:, :1], r"topk_weights.shape is \[12, 1\]"),
        ("out", torch.zeros(12, 48), "out.dtype is torch.float32"),
        ("out", INPUTS.x[:4].clone(), r"out.shape is \[4, 48\]"),
        ("num_tokens_device", torch.tensor([3]), "num_tokens_device.dtype is torch.int64"),
        ("weights", replace(GOOD["weights"], w2=None), "weights.w2 is None"),
        ("weights", replace(GOOD["weights"], b2=torch.zeros(5, 48)), "weights.b2 is given"),
    ],
)
def test_wrong_argument_is_named(name, value, message):
    with pytest.raises(ArgumentError, match=message):
        Layer(PROBLEM, backend="staged")(**{**GOOD, name: value})


def test_gradients_are_not_lost_silently():
    given = {**GOOD, "x": INPUTS.x.clone().requires_grad_()}
    for backend in ("reference", "staged"):
        layer = Layer(PROBLEM, backend=backend)
        with pytest.raises(ArgumentError, match="out is given, expected None"):
            layer(**given, out=torch.empty_like(INPUTS.x))
        assert layer(**given).requires_grad


def test_backend_names(monkeypatch):
    with pytest.raises(ConfigError, match="backend is 'fast', expected auto, mega, staged"):
        make_backend("fast", PROBLEM, device="cpu")
    with pytest.raises(ConfigError, match="ep_size is 2, expected 1, the size of the group"):
        make_backend("staged", replace(PROBLEM, ep_size=2), device="cpu")
    with pytest.raises(
        ConfigError, match="option is 'reserve', expected one of weight_gradients, window"
    ):
        make_backend("staged", PROBLEM, device="cpu", reserve=3)
    make_backend("staged", PROBLEM, device="cpu", reserve_sms=3)
    with pytest.raises(ConfigError, match="backend is 'mega', expected one that can run here: the"):
        make_backend("mega", PROBLEM, device="cpu")


def test_auto_says_what_is_missing_to_compile(caplog, monkeypatch):
    """A GPU machine without the CUTLASS headers trains through staged, and a line says what to install."""
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = torch.device("cuda", 0)
    assert why_not_mega(PROBLEM, device) is None

    def nothing_there():
        raise CompileError("the CUTLASS headers are missing: pip install nvidia-cutlass==4.2.0.0")

    monkeypatch.setattr(paths, "cutlass_include", nothing_there)
    select._say_why.cache_clear()
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        for _ in range(3):  # three layers, one line
            assert chosen(device) == "staged"
    assert len(caplog.records) == 1
    assert "not mega: kernels cannot be compiled: the CUTLASS headers are missing" in caplog.text


def chosen(device):
    return choose(Opening("auto", PROBLEM, Group(), device)).name


def test_auto_says_why_not(caplog, monkeypatch):
    monkeypatch.delenv("MEGAMOE_BACKEND", raising=False)
    select._say_why.cache_clear()
    with caplog.at_level(logging.WARNING, logger="megamoe"):
        assert chosen(torch.device("cpu")) == "staged"
    assert len(caplog.records) == 1
    assert "not mega: the tensors are on cpu" in caplog.text
    monkeypatch.setenv("MEGAMOE_BACKEND", "reference")
    assert chosen(torch.device("cpu")) == "reference"
    monkeypatch.delenv("MEGAMOE_BACKEND")
    monkeypatch.setattr(select, "why_not_mega", lambda *args: None)
    assert chosen(torch.device("cpu")) == "mega"


def test_why_not_mega_asks_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    reason = why_not_mega(PROBLEM, torch.device("cuda", 0))
    assert reason == "compute capability is 8.0, the kernel needs 9.x (Hopper)"
