"""Track versions of tensors, to know whether a quantized copy still matches its source.

A version is (storage, offset, tensor._version) of each source, the optimizer steps of the process, shape and strides.
torch counts most writes in tensor._version. FSDP2 gathers into one storage without changing _version, and fused
optimizers do not count their writes. Both happen around an optimizer step, so steps are counted, too. A step counts
before and after its writes: an optimizer's own post-step hooks may call a layer, and run before the global ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megamoe.core.uncompiled import uncompiled

# Steps of any optimizer of this process, twice.
steps = [0]
# Calls of invalidate(). FP8 weights without masters follow these, too, since no optimizer writes them.
invalidations = [0]


@uncompiled("traced, the count would be a guard, and every step a recompilation")
def _count_step(*_: Any) -> None:
    steps[0] += 1


register_optimizer_step_pre_hook(_count_step)
register_optimizer_step_post_hook(_count_step)


def invalidate() -> None:
    """Make every FP8 layer of this process quantize its parameters again at its next use.

    Call it after writes that torch does not count: `p.data.copy_()`, a collective into `p.detach()`, raw pointers,
    optimizers outside torch.optim, FSDP2 shards written without load_state_dict(), and replays of a CUDA graph that
    contains an optimizer but no call of the layer. It costs one quantization per layer, as an optimizer step does.
    """
    _count_step()
    invalidations[0] += 1


# Places of the sources: StorageImpl, offset, tensor._version (-1 of inference tensors); counts, shape, strides
Version = tuple[Any, ...]


class _Origin:
    """Record what a tensor was made of: the sources, where they are and, for a copy, their versions at that time."""

    def __init__(self, made: Tensor, sources: Sequence[Tensor], trains: bool) -> None:
        # Kept, since `.data = ...` gives a tensor another one.
        self.storages = [t.untyped_storage() for t in sources]
        self._offsets = [t.storage_offset() for t in sources]
        self._sources, self.trains, self._used = sources, trains, False
        copied = made.untyped_storage()._cdata != self.storages[0]._cdata
        self.then = (self.places(), steps[0]) if copied else None

    def places(self) -> tuple[Any, ...]:
        """Return where the sources were, and their versions now."""
        counts = map(_count, self._sources)
        cells = zip(self.storages, self._offsets, counts, strict=True)
        return tuple((storage._cdata, offset, count) for storage, offset, count in cells)

    def used(self) -> bool:
        """Return True from the second call on."""
        self._used, before = True, self._used
        return before

    def __reduce__(self) -> tuple[Any, ...]:
        """Drop the record when a tensor is saved or copied. torch.load() accepts this type."""
        return OrderedDict, ()


def made_of(made: Tensor, sources: Sequence[Tensor], *, trains: bool = False) -> Tensor:
    """Declare that `made` was just computed from `sources` and nothing else; return `made`.

    A copy that is new in every call then has the version of its sources, and a view has the versions of all of them.
    The caller must always compute it in the same way. trains: True if a source, or what it is a part of, requires a
    gradient.
    """
    same = any(made is t for t in sources)  # nothing to say, and a parameter may get other memory
    if not same and not torch.compiler.is_compiling():  # which keeps no attributes of tensors
        marked: Any = made
        marked._megamoe_origin = _Origin(made, sources, trains)
    return made


def version_of(w: Tensor, steps: Sequence[int] = steps) -> Version:
    """Return the version of w's values."""
    origin = getattr(w, "_megamoe_origin", None)
    if not origin:
        count = -1 if w.is_inference() else w._version
        place = w.untyped_storage()._cdata, w.storage_offset(), count
        return (place,), steps[0], w.shape, w.stride()
    if origin.then is None:
        return origin.places(), steps[0], w.shape, w.stride()
    # A copy may be kept, and written to: such writes count as those of any tensor.
    return *origin.then, w.shape, w.stride(), steps[0], _count(w)


def storages_of(w: Tensor) -> list[StorageWeakRef]:
    """Return weak references that keep w's version unique. They do not keep the memory alive."""
    origin = origin_of(w)
    return [
        StorageWeakRef(s) for s in ([w.untyped_storage()] if origin is None else origin.storages)
    ]


def same_storages(kept: list[StorageWeakRef], w: Tensor) -> bool:
    """Return True if w's sources are in the storages that were kept."""
    return [s.cdata for s in kept] == [s.cdata for s in storages_of(w)]


def trained(w: Tensor) -> bool:
    """Return True if a gradient of w, or of its sources, may be requested."""
    origin = origin_of(w)
    return w.requires_grad or (origin is not None and origin.trains)


def uncounted(version: Version) -> bool:
    """Return True if torch counts no writes to this tensor: inference tensors have no `_version` counter."""
    return -1 in [place[2] for place in version[0]]


def kept_uncounted(w: Tensor) -> bool:
    """Return True if w is an inference-mode copy that was used before: uncounted writes are possible."""
    origin = origin_of(w) if w.is_inference() else None
    return origin is not None and origin.then is not None and origin.used()


def origin_of(w: Tensor) -> _Origin | None:
    """Return what made_of() recorded for w, or None."""
    return getattr(w, "_megamoe_origin", None) or None


def _count(w: Tensor) -> int:
    return -1 if w.is_inference() else w._version
