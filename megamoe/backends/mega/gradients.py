"""Choose where a backward launch writes the experts' gradients: one dtype and one mode per launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.core.planes import STRIDE_BYTES, check_strides
from megamoe.formats.weights import ExpertWeights

NAMES = ("w13", "w2", "b13", "b2")
_MATRICES = ("w13", "w2")
SCRATCH = 64  # columns of a matrix' gradient that nobody wants


@dataclass
class Targets:
    """What training.fill_gradients takes, `tensors` and `accumulate`; `results` is what the caller is given then.

    A launch writes or adds, and dw13 and dw2 have one type: a gradient that is wanted otherwise goes through a
    tensor of its own.
    """

    accumulate: bool
    into: dict[str, Tensor]
    dtype: torch.dtype  # of the matrices' gradients that are returned
    _weights: ExpertWeights
    tensors: dict[str, Tensor] = field(default_factory=dict)  # that the launch writes or adds to
    _scratch: set[str] = field(default_factory=set)  # of those, what nobody wants

    @classmethod
    def make(
        cls,
        weights: ExpertWeights,
        needs: Sequence[bool],
        into: Mapping[str, Tensor] | None = None,
        empty: Callable[..., Tensor] = torch.empty_like,
    ) -> Targets:
        """Return the targets of a call.

        weights: the masters. needs: a flag for each of NAMES. into: name -> tensor [of the master's shape] bf16 or
        fp32 that the gradient is added to. empty: makes tensors that are written, like torch.empty_like.
        """
        masters = {name: getattr(weights, name) for name in NAMES}
        wanted = [
            n for n, need in zip(NAMES, needs, strict=True) if need and masters[n] is not None
        ]
        of_masters = torch.float32 if weights.w13.dtype == torch.float32 else torch.bfloat16
        found = cls(bool(into), dict(into or {}), of_masters, weights)
        given = {found.into[n].dtype for n in _MATRICES if n in found.into}
        dtype = found.dtype if not given else given.pop() if len(given) == 1 else torch.float32
        make = torch.zeros_like if found.accumulate else empty
        # A launch makes a bias' gradient beside its matrix'.
        beside = [n.replace("b", "w") for n in wanted if n not in _MATRICES]
        found._scratch = {n for n in beside if n not in wanted}
        for name in [*wanted, *found._scratch]:
            of = dtype if name in _MATRICES else torch.float32
            direct = found.into.get(name)
            if direct is None or direct.dtype != of or not _is_direct(name, direct):
                # An `into` elsewhere may be strided; masters that TMA reads have gradients that it writes.
                like = masters[name]
                direct = make(like[..., :SCRATCH] if name in found._scratch else like, dtype=of)
                if name not in _MATRICES and not direct.is_contiguous():
                    direct = make(masters[name].flatten(1), dtype=of)
            found.tensors[name] = direct
        return found

    def results(self) -> list[Tensor | None]:
        """Return the gradients of NAMES, None where not needed or added. After the launch, in stream order."""
        results: list[Tensor | None] = []
        for name in NAMES:
            target, into = self.tensors.get(name), self.into.get(name)
            if name in self._scratch:
                target = None
            if into is not None and target is not None:
                if into is not target:
                    into.add_(target.reshape(into.shape))
                target = None
            if target is not None:
                target = target.reshape(getattr(self._weights, name).shape)
                target = target.to(self.dtype) if name in _MATRICES else target
            results.append(target)
        return results


def _is_direct(name: str, into: Tensor) -> bool:
    """Whether the launch can write to it as it lies."""
    if name not in _MATRICES:
        return into.is_contiguous()
    try:
        check_strides(name, into)
    except ArgumentError:
        return False
    return into.data_ptr() % STRIDE_BYTES == 0
