"""tools/library_blocks.py: blocks of transformers with both experts agree, and a fault in ours is told."""

import pytest
from programs import passes, run_code

pytest.importorskip("transformers", minversion="5.20")
TINY = ("--shape", "tiny", "--tokens", "24", "--samples", "1", "--backend", "staged")


def test_blocks_agree():
    said = passes("library_blocks.py", *TINY, "--precision", "bf16", "fp8")
    rows = [line.split("  ")[0] for line in said.splitlines()[2:]]
    assert rows == ["transformers eager", "megamoe bf16", "megamoe fp8"]


@pytest.mark.slow
def test_blocks_over_two_ranks_agree():
    pytest.importorskip("transformers", minversion="5.23")
    said = passes("library_blocks.py", "--ranks", "2", "--cpu", *TINY, "--precision", "bf16", "fp8")
    rows = [line.split("  ")[0] for line in said.splitlines()[2:]]
    assert rows == ["transformers eager", "megamoe bf16", "megamoe fp8"]


def test_a_fault_in_our_experts_is_told():
    out = run_code(f"""
import sys, library_blocks
from megamoe.layer.layer import Layer
forward = Layer.__call__
Layer.__call__ = lambda self, *args, **options: 1.1 * forward(self, *args, **options)
sys.argv = ["library_blocks.py", *{TINY!r}]
print("exit code", library_blocks.main())
""")
    assert "exit code 1" in out
