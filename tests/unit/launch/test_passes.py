"""Passes over rows that have a kernel on Hopper: what is done where it cannot be compiled."""

import pytest

from megamoe.core.errors import CompileError
from megamoe.jit import quantize
from megamoe.launch import passes


@pytest.mark.parametrize("error", [CompileError("no compiler"), ImportError("no cuda.bindings")])
def test_without_a_compiler_torch_makes_the_passes(monkeypatch, caplog, error):
    def fails():
        raise error

    passes.fused_kernels.cache_clear()
    monkeypatch.setattr(quantize, "compile_quantize", fails)
    assert passes.fused_kernels() is None
    assert f"by torch operations, not by one kernel: {error}" in caplog.text
    passes.fused_kernels.cache_clear()
