"""Detect whether a call is transformed by torch.func or forward-mode AD, instead of torch.autograd's reverse mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes


def functional() -> bool:
    """Return True if a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def outside() -> Iterator[None]:
    """Leave transforms and modes in this block: messages between ranks must not be traced."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


@contextmanager
def lasting() -> Iterator[None]:
    """Leave inference mode, transforms and modes, but not the grad mode: training reuses tensors of this block."""
    gradients = torch.is_grad_enabled()
    with outside(), torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


def faked() -> bool:
    """Return True if a mode creates tensors without memory, as torch.export does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def forward_mode() -> bool:
    """Return True if tensors may have forward-mode tangents."""
    return forward_ad._current_level >= 0


def has_tangent(tensors: Sequence[Tensor | None]) -> bool:
    """Return True if a tensor has a forward-mode tangent. Custom operators would drop it silently."""
    if not forward_mode():
        return False
    floats = (t for t in tensors if t is not None and t.is_floating_point())
    return any(forward_ad.unpack_dual(t).tangent is not None for t in floats)


def watched() -> bool:
    """Whether a mode or a transform has to see the operators."""
    return torch._C._len_torch_dispatch_stack() > 0 or functional() or forward_mode()


def records(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call's gradients are recorded."""
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # both may be on
        return False
    return any(t is not None and t.requires_grad for t in tensors)
