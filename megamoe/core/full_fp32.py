"""Matrix products of fp32 operands in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Switch TF32 and autocast off: products with 10 bits of mantissa would make no oracle."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
