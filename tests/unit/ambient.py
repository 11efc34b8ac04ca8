"""What is switched on around a test's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make tensors of this type where none is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
