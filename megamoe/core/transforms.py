"""Whether a call is differentiated, or mapped, by other means than torch.autograd's reverse mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def functional() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """Whether there may be tangents."""
    return forward_ad._current_level >= 0


def has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one carries a forward-mode derivative, which custom operators drop: the result would be a constant."""
    if not forward_mode():
        return False
    floats = (t for t in tensors if t is not None and t.is_floating_point())
    return any(forward_ad.unpack_dual(t).tangent is not None for t in floats)
