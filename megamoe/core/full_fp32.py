"""Compute matrix products of fp32 operands in full fp32 precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Disable TF32 and autocast in this block. TF32 has only 10 bits of mantissa, too few for an oracle."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
