"""Whether a call is differentiated, or mapped, by other means than torch.autograd's reverse mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def functional() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def outside() -> Iterator[None]:
    """Be outside of transforms and modes: what ranks say to each other is for none of them."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that calls in every mode may use: outside of inference_mode() and of what traces."""
    gradients = torch.is_grad_enabled()
    with outside(), torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def faked() -> bool:
    """Whether a mode makes tensors without memory, as torch.export's does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def forward_mode() -> bool:
    """Whether there may be tangents."""
    return forward_ad._current_level >= 0


def has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Whether one carries a forward-mode derivative, which custom operators drop: the result would be a constant."""
    if not forward_mode():
        return False
    floats = (t for t in tensors if t is not None and t.is_floating_point())
    return any(forward_ad.unpack_dual(t).tangent is not None for t in floats)
