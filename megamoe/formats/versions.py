"""Versions of tensors: whether what was made of one is still made of its values.

A version is (storage, offset, tensor._version) of each source, optimizer steps of the process, shape and strides.
torch counts most writes in tensor._version. FSDP2 gathers into one storage without touching it, and fused optimizers do
not bump it: a step is the one event that both have. It counts before and after its writes, since an optimizer's own
hooks behind a step, which may call a layer, run before those of all optimizers.
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
    """Make every FP8 layer of this process quantize its parameters again, at its next use each.

    Needed after writes that torch does not count: `p.data.copy_()`, a collective into `p.detach()`,
    raw pointers, optimizers outside torch.optim, FSDP2 shards written without load_state_dict, and
    replays of a graph that holds an optimizer but no call of the layer. Costs what a step costs.
    """
    _count_step()
    invalidations[0] += 1


# StorageImpl, offset, tensor._version (-1 of inference tensors, which have none)
Place = tuple[int, int | torch.SymInt, int]
Version = tuple[Any, ...]  # places of the sources; counts, shape, strides


class _Origin:
    """What a tensor was made of: sources, where they were, and their version then if it is a copy."""

    def __init__(self, made: Tensor, sources: Sequence[Tensor], trains: bool) -> None:
        # Kept, since `.data = ...` gives a tensor another one.
        self.storages = [t.untyped_storage() for t in sources]
        self._offsets = [t.storage_offset() for t in sources]
        self._sources, self.trains, self._used = sources, trains, False
        copied = made.untyped_storage()._cdata != self.storages[0]._cdata
        self.then = (self.places(), steps[0]) if copied else None

    def places(self) -> tuple[Place, ...]:
        """Return where the sources were, and their version now."""
        counts = map(_count, self._sources)
        cells = zip(self.storages, self._offsets, counts, strict=True)
        return tuple((storage._cdata, offset, count) for storage, offset, count in cells)

    def used(self) -> bool:
        """Whether this was asked before."""
        self._used, before = True, self._used
        return before

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing to a saved or copied tensor, which is made of nothing; torch.load() knows this type."""
        return OrderedDict, ()


def made_of(made: Tensor, sources: Sequence[Tensor], *, trains: bool = False) -> Tensor:
    """Say that `made` was computed from `sources` just now, and from nothing else; return it.

    So a copy, new in every call, has the version that its sources had, and a view that of all of them. Whoever says so
    always computes it alike. trains: whether any of the sources, or what they are parts of, requires a gradient.
    """
    same = any(made is t for t in sources)  # nothing to say, and a parameter may get other memory
    if not same and not torch.compiler.is_compiling():  # which keeps no attributes of tensors
        marked: Any = made
        marked._megamoe_origin = _Origin(made, sources, trains)
    return made


def version_of(w: Tensor, steps: Sequence[int] = steps) -> Version:
    """Return what w's values are known by."""
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
    """Return what has to be kept so that no other tensor gets w's version; their memory may be freed."""
    origin = origin_of(w)
    return [
        StorageWeakRef(s) for s in ([w.untyped_storage()] if origin is None else origin.storages)
    ]


def same_storages(kept: list[StorageWeakRef], w: Tensor) -> bool:
    """Whether w's sources lie where those lie that were kept."""
    return [s.cdata for s in kept] == [s.cdata for s in storages_of(w)]


def trained(w: Tensor) -> bool:
    """Whether a gradient of w, or of what it was made of, may be wanted."""
    if w.requires_grad:
        return True
    origin = origin_of(w)
    return origin is not None and origin.trains


def uncounted(version: Version) -> bool:
    """Whether torch counts no writes to what has this version: to an inference tensor, of which nothing is counted."""
    return -1 in [place[2] for place in version[0]]


def kept_uncounted(w: Tensor) -> bool:
    """Whether w is a copy of which torch counts no writes, and was asked about before: it may have been written to."""
    origin = origin_of(w) if w.is_inference() else None
    return origin is not None and origin.then is not None and origin.used()


def origin_of(w: Tensor) -> _Origin | None:
    """Return what made_of() said of w."""
    return getattr(w, "_megamoe_origin", None) or None


def _count(w: Tensor) -> int:
    return -1 if w.is_inference() else w._version
