"""Remember validated calls: a Signature contains what the checks of a call read, and is compared with later calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megamoe.backends.call import overwrites
from megamoe.core.planes import SUSPECT_BELOW, is_freed
from megamoe.formats.weights import ExpertWeights
from megamoe.layer.inputs import Inputs

MAX_SHAPES, OF_A_SHAPE = 1024, 4


class Signature:
    """Describe a validated call: shapes, strides, dtypes, devices and flags of all tensors; addresses of weights.

    A call that matches it needs no validation, and no mode of torch has to observe its operators.
    shape: of x. requires_grad: True if a tensor does. trains: True if gradients may be recorded.
    """

    __slots__ = ("shape", "requires_grad", "trains", "_absent", "_alike", "_places")

    def __init__(self, inputs: Inputs, out: Tensor | None, trains: bool) -> None:
        """inputs, out: of the call."""
        out = None if out is inputs.x else out  # see fits()
        self.shape, tensors = inputs.x.shape, (*inputs, out)
        there = [t for t in tensors if t is not None]
        # A call in inference_mode() records nothing, whatever grad mode says; guards tell the modes apart.
        plain = not torch.is_inference_mode_enabled()
        self.trains, self.requires_grad = trains, plain and any(t.requires_grad for t in there)
        absent = [t is None for t in tensors[5:]]
        self._absent = None if all(absent) else absent
        self._alike, self._places = _alike(there), _places(vars(inputs.weights).values())

    def fits(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w: ExpertWeights,
        num_tokens_device: Tensor | None,
        x_scale: Tensor | None,
        out: Tensor | None,
    ) -> bool:
        """Return True if a call matches: the arguments of Inputs.of(), then out. Every call runs each line here.

        It does not detect storage that shrank to a smaller size above zero; nor do torch's own operations.
        """
        w13, w2, b13, b2, s13, s2 = w.w13, w.w2, w.b13, w.b2, w.w13_scale, w.w2_scale
        if out is x:  # counts as none: guards do not match where one tensor occurs twice
            out = None
        # Guards would ask nested tensors for their sizes and end the process. x was asked for its shape before.
        if topk_ids.is_nested or topk_weights.is_nested or w13.is_nested or w2.is_nested:
            return False
        if b13 is b2 is s13 is s2 is num_tokens_device is out is x_scale is None:
            if self._absent is not None or not self._alike(x, topk_ids, topk_weights, w13, w2):
                return False
            if (w13.data_ptr(), w2.data_ptr()) != self._places:
                return False
        else:
            further = b13, b2, s13, s2, num_tokens_device, x_scale, out
            there = [t for t in further if t is not None]
            if [t is None for t in further] != self._absent or any(t.is_nested for t in there):
                return False
            if not self._alike(x, topk_ids, topk_weights, w13, w2, *there):
                return False
            if _places((w13, w2, *further[:4])) != self._places:
                return False
            if any(is_freed(t) for t in there):
                return False
            if out is not None and overwrites(
                out, x, (topk_ids, topk_weights, w13, w2, *further[:-1])
            ):
                return False
        if not (
            x.data_ptr() >= SUSPECT_BELOW
            and topk_ids.data_ptr() >= SUSPECT_BELOW
            and topk_weights.data_ptr() >= SUSPECT_BELOW
        ) and any(is_freed(t) for t in (x, topk_ids, topk_weights)):
            return False
        # Transforms of torch.func, and most modes, have keys that _alike looks at.
        return torch._C._len_torch_dispatch_stack() == 0 and forward_ad._current_level < 0


class Signatures:
    """Cache the last few signatures of one layer for each shape of x."""

    def __init__(self) -> None:
        self._of: dict[Any, list[Signature]] = {}

    def find(self, x: Tensor, *further: Any) -> Signature | None:
        """Return the signature that a call matches; such a call skips validation and operators. None: no match.

        further: arguments of Signature.fits() after x.
        """
        try:
            for found in self._of.get(x.shape, ()):
                if found.fits(x, *further):
                    return found
        except (AttributeError, RuntimeError, TypeError):
            pass  # something is no tensor, or lies nowhere: the checks will name it
        return None

    def add(self, made: Signature) -> Signature:
        """Remember a call that passed all checks."""
        if len(self._of) >= MAX_SHAPES:
            self._of.clear()
        before = self._of.get(made.shape, [])
        self._of[made.shape] = [made, *before[: OF_A_SHAPE - 1]]
        return made


def _places(weights: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple([t.data_ptr() for t in weights if t is not None])


def _alike(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that returns True if tensors have the shapes, strides, dtypes, devices and flags of these.

    It uses the C++ code of dynamo's guards, in a third of the time of Python code. It may also return False for
    differences that do not matter here; without dynamo's guards always, so that every call is validated.
    """
    guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
    if guards is None:
        return lambda *_: False
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    found = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = found.check
    return check
