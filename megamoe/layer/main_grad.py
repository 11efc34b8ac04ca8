"""Add gradients of w13 and w2 to their `main_grad`, by the convention of Megatron and Transformer Engine.

The owner of a parameter gives it `main_grad`, fp32 or bf16, and the backward pass adds to it. What autograd receives
instead of a gradient depends on the parameter's attribute `grad_added_to_main_grad`:

- If it exists (Megatron's DDP sets it to False), it is set to True, and the gradient is a tensor with undefined values.
  All parameters of one shape and dtype share it, so no step allocates it. It is not None, because the hook of
  overlap_grad_reduce asserts a gradient; the hook then sees the flag and drops it.
- If it does not exist, the gradient is None. p.grad is unchanged, so nobody reads undefined values.

`zero_out_wgrad` and `overwrite_main_grad` have their usual meaning: zeros instead of undefined values, and overwrite
main_grad instead of adding to it. Gradients of biases and routers are returned as usual.

A weight that was joined from several parameters has no main_grad but a Joint, which adds the sums to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import overlaps_itself
from megamoe.formats.joined import Joined
from megamoe.formats.weights import ExpertWeights, check_tensor

NAMES = ("w13", "w2")
_DTYPES = (torch.float32, torch.bfloat16)
_placeholders: dict[Any, Tensor] = {}


class Joint:
    """Say where to add gradients of a tensor joined from parameters: to their main_grad, if these have its layout.

    With another layout, a backward pass adds to an fp32 tensor, and add() adds that to the main_grad of each. The
    function that joined the parameters calls add() when autograd reaches it, after all uses of the joined tensor.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        cut: Callable[[Tensor], Sequence[Tensor]],
        as_one: Callable[[Sequence[Tensor]], Tensor | None],
    ) -> None:
        """cut: returns the parameters' parts of a joined tensor. as_one: returns such parts as one view, or None."""
        self.parameters, self._cut, self._as_one = parameters, cut, as_one
        self._between: Tensor | None = None
        self._nothing: Tensor | None = None
        self.used = False  # by a backward pass that adds, since add()
        self._written: set[int] = set()  # as of targets()

    def target(self, whole: Tensor, written: set[int]) -> Tensor:
        """Return what a backward pass is to add to. written: as of targets()."""
        self.used, self._written = True, written
        if self._between is not None:
            return self._between
        plain = (
            p.requires_grad and not getattr(p, "overwrite_main_grad", False)
            for p in self.parameters
        )
        if all(plain):
            mains = [p.main_grad.detach() for p in self.parameters]
            parts = self._cut(whole.detach())
            mains = [main.view(t.shape) for main, t in zip(mains, parts, strict=True)]
            found = self._as_one(mains)
            if found is not None:
                return found
        self._between = torch.zeros(whole.shape, dtype=torch.float32, device=whole.device)
        return self._between

    def nothing(self, whole: Tensor) -> Tensor:
        """Return a placeholder gradient of the joined tensor, for autograd; add() recognizes it."""
        if self._nothing is None:
            self._nothing = torch.zeros((), dtype=whole.dtype, device=whole.device)
        return self._nothing.expand(whole.shape)

    def add(self, grad: Tensor | None) -> list[Tensor | None]:
        """Add the collected gradients to each main_grad; return what autograd gets for the parameters.

        grad: gradient of the joined tensor from other uses than such a layer. It goes to grad, or to main_grad if grad
            gets a placeholder.
        """
        found: list[Tensor | None] = [None] * len(self.parameters)
        if grad is not None and self._nothing is not None:
            same = grad.untyped_storage()._cdata == self._nothing.untyped_storage()._cdata
            grad = None if same else grad
        parts = None if self._between is None else self._cut(self._between)
        others = None if grad is None else self._cut(grad)
        self._between, self.used = None, False
        for i, p in enumerate(self.parameters):
            if not p.requires_grad:
                continue
            if parts is not None:
                _overwrite(p, self._written)
                p.main_grad.add_(parts[i].view(p.shape))
            found[i] = added(p)
            if others is not None and found[i] is None:
                found[i] = others[i]
            elif others is not None:
                p.main_grad.add_(others[i].reshape(p.shape))
        return found


def joined(
    parts: Sequence[Tensor], as_one: Any, cut: Any, copied: Any, parameters: Sequence[Any] | None
) -> Tensor:
    """Return tensors as one, see Joined; the gradient goes back to each.

    parameters: those whose main_grad a layer adds to; None: no layer does.
    """
    joint = None
    if parameters is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        joint = Joint(parameters, cut, as_one)
    whole: Any = Joined.apply(as_one, cut, copied, joint, *parts)
    if joint is not None and whole.requires_grad:
        whole.joint_main_grad = joint  # for the layer
    return whole


def _overwrite(p: Any, written: set[int]) -> None:
    """Zero main_grad if it is to be overwritten and no other pass of this sum has done so."""
    if getattr(p, "overwrite_main_grad", False) and id(p) not in written:
        p.main_grad.detach().zero_()
    written.add(id(p))


def check(weights: ExpertWeights) -> None:
    """Raise ArgumentError unless all weights that need a gradient have a main_grad to add it to."""
    for name in NAMES:
        w: Any = getattr(weights, name)
        joint = getattr(w, "joint_main_grad", None)
        for p in (w,) if joint is None else joint.parameters:
            if not p.requires_grad:
                continue
            argument, main = f"weights.{name}.main_grad", getattr(p, "main_grad", None)
            if main is None:
                expected = "a tensor like the weight, since accumulate_into_main_grad is True"
                if joint is None and w.grad_fn is not None:
                    expected += " (joined: SharedExperts.join(..., accumulate_into_main_grad=True))"
                raise ArgumentError(argument, None, expected)
            check_tensor(argument, main, tuple(p.shape), _DTYPES, p.device, contiguous=False)
            if not main.is_contiguous() and overlaps_itself(main):
                raise ArgumentError(
                    f"{argument}.stride()", main.stride(), "strides without overlapping elements"
                )


def targets(weights: ExpertWeights, needs: Sequence[bool], written: set[int]) -> dict[str, Tensor]:
    """Return name -> the main_grad to which a backward pass adds. needs: flags of w13 and w2.

    written: ids of parameters whose main_grad already has a pass of this sum; this function adds to it.
    """
    check(weights)
    found = {}
    for name, need in zip(NAMES, needs, strict=True):
        p: Any = getattr(weights, name)
        if need and p.requires_grad:  # not frozen since
            joint = getattr(p, "joint_main_grad", None)
            if joint is not None:
                found[name] = joint.target(p, written)
                continue
            _overwrite(p, written)
            found[name] = p.main_grad.detach()
    return found


def added(p: Any) -> Tensor | None:
    """Mark that p's gradient is in its main_grad; return what autograd gets."""
    # A joined tensor has no such flag: autograd comes by without a gradient, too.
    if not hasattr(p, "grad_added_to_main_grad"):
        return None
    p.grad_added_to_main_grad = True
    key = p.shape, p.stride(), p.dtype, p.device
    if key not in _placeholders:
        _placeholders[key] = torch.empty_like(p, requires_grad=False)
    if getattr(p, "zero_out_wgrad", False):
        _placeholders[key].zero_()
    return _placeholders[key].detach()
