"""Quantize masters, and decide when to quantize them again.

masters  ->  w, scale [a layer's]  ->  transposes: kept [a layer's], once per version,
bf16, fp32   once per version          or made [one buffer per device], in each backward pass
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megamoe.core.config import Problem
from megamoe.core.errors import MegaMoEError
from megamoe.core.table import E4M3_BLOCKS, Format
from megamoe.formats.quantization import (
    codec,
    quantize_blockwise,
    stored_shape,
    transpose_blocks,
)
from megamoe.formats.versions import (
    Version,
    invalidations,
    kept_uncounted,
    origin_of,
    same_storages,
    steps,
    storages_of,
    trained,
    uncounted,
    version_of,
)
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.launch.launches import launch_order
from megamoe.launch.passes import Pair, fused_kernels, on_hopper

log = logging.getLogger("megamoe")


def quantize_weights(
    w: Tensor,
    planes: int,
    stored: Format,
    out: Pair | None,
    transposed: bool,
    transposed_out: Pair | None,
) -> tuple[Pair, Pair | None]:
    """Return (q, scale), and their transposes if `transposed`. out, transposed_out: memory for them.

    The fused kernel makes e4m3 on Hopper, else torch does; with equal bits.
    """
    formulas = codec(stored)  # raises for a format that this cannot make
    if stored != E4M3_BLOCKS and formulas is not None:
        return formulas.quantize(w, planes, out), None
    if on_hopper(w) and w.numel() and (fused := fused_kernels()) is not None:
        return fused.quantize_weights(
            w, planes, out=out, transposed=transposed, transposed_out=transposed_out
        )
    made = quantize_blockwise(w, planes, out=out)
    return made, transpose_blocks(*made, planes, transposed_out) if transposed else None


def transpose_weights(q: Tensor, scale: Tensor, planes: int, out: Pair | None = None) -> Pair:
    """Do as transpose_blocks(), by the fused kernel on Hopper where there is one."""
    if on_hopper(q) and q.numel() and (fused := fused_kernels()) is not None:
        made: Pair = fused.transpose_weights(q, scale, planes, out)
        return made
    return transpose_blocks(q, scale, planes, out)


def _capturing(w: Tensor) -> bool:
    return w.is_cuda and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=1)
def _warn_of_inference_tensors() -> None:
    log.warning(
        "weights made under inference_mode() count no writes, so that they are quantized at every call: make the layer "
        "outside of it"
    )


def _uncounted(w: Tensor, version: Version) -> bool:
    """Return True if an untracked write may have happened: inference tensors have no `_version` counter.

    False while a graph is captured: its replays read the copies, and a call outside of the graph refreshes them.
    """
    always = uncounted(version)
    if not (always or kept_uncounted(w)) or _capturing(w):  # the last costs most
        return False
    if always:
        _warn_of_inference_tensors()
    return True


@dataclass
class _Entry:
    kept: list[StorageWeakRef]  # which then cannot come back as another tensor's
    version: Version | None  # None: quantize again
    q: Tensor
    scale: Tensor
    volatile: bool  # quantized inside a graph whose replays nobody counts
    transposed: Pair | None  # their transposes, once a backward pass needs them


class _Seen(NamedTuple):
    """Cache the copies of masters whose writes torch counts: parameters, or tensors of the caller.

    A Signature says that a call passes the checks, whatever values its tensors have. This record says that the values
    are still those that were quantized.
    """

    w13: Tensor
    w2: Tensor
    counts: tuple[Any, ...]  # where they are, writes to them, optimizers' steps
    asks: bool  # a graph that is captured quantizes them itself
    weights: ExpertWeights
    transposed: TransposedWeights | None  # if their transposes were made

    def holds(self, masters: ExpertWeights, trains: bool) -> bool:
        """Return True if the copies still match these masters."""
        w13, w2 = masters.w13, masters.w2
        return (
            w13 is self.w13
            and w2 is self.w2
            and masters.b13 is self.weights.b13
            and masters.b2 is self.weights.b2
            and _counts(w13, w2) == self.counts
            and (self.transposed is not None or not trains)
            and not (self.asks and _capturing(w13))
        )


def _counts(w13: Tensor, w2: Tensor) -> tuple[Any, ...]:
    # By `p.data = ...` a parameter may come to lie where it lay, in other memory: not even its _version changes.
    storages = w13.untyped_storage()._cdata, w2.untyped_storage()._cdata
    places = w13.data_ptr(), w2.data_ptr(), w13.stride(), w2.stride()
    return storages, places, w13._version, w2._version, steps[0]


class _Buffer:
    """Hold memory for the transposes of one layer at a time. It lives as long as layers refer to it."""

    def __init__(self, device: torch.device, size: int, dtype: torch.dtype) -> None:
        self.memory = torch.empty(size, dtype=dtype, device=device)

    @staticmethod
    def of(device: torch.device, size: int, dtype: torch.dtype) -> _Buffer:
        """Return the buffer of a device if it is large enough, else a new one."""
        found = _buffers.get(device)
        if found is None or found.memory.numel() < size:
            found = _buffers[device] = _Buffer(device, size, dtype)
        return found

    def transposes(self, forward: ExpertWeights, planes: int) -> TransposedWeights:
        """Return views for the transposes of these weights. Scales, 4 bytes per block, have memory of their own."""
        num, hidden, intermediate = forward.w2.shape
        w13 = self.memory[: forward.w13.numel()].view(num, planes, hidden, intermediate)
        w2 = self.memory[w13.numel() :][: forward.w2.numel()].view(num, 1, intermediate, hidden)
        assert forward.w13_scale is not None
        assert forward.w2_scale is not None
        scales = (s.transpose(1, 2).contiguous() for s in (forward.w13_scale, forward.w2_scale))
        return TransposedWeights(forward, w13, w2, *scales)


_buffers: WeakValueDictionary[torch.device, _Buffer] = WeakValueDictionary()
_turn = threading.RLock()  # of threads that use them


class QuantizedCache:
    """Quantized copies of masters, made once per parameter version and refreshed in place.

    A version is that of versions.py: at most one quantization per parameter and optimizer step, plus one per write that
    torch counts. If the layer trains, each quantization also makes the transposes that a backward pass multiplies.
    Writes that are not counted need invalidate(). Parameters made under inference_mode() count none, so they are
    quantized at every use outside graphs. While a CUDA graph is captured, a parameter that requires a gradient is
    quantized at every use, so that replays follow it; from then on it is quantized at every use outside graphs as well,
    since a replay changes no counter.

    makes: transposes are not kept but made for each backward pass, see _made_for().
    """

    def __init__(self, makes: bool = False) -> None:
        self.makes = makes
        # Masters are quantized behind each write, so graphs need not do it at each use.
        self.follows = False
        # Held from transposed() until the launch that reads them is enqueued.
        self.turn: Any = _turn if makes else nullcontext()
        self._made: TransposedWeights | None = None
        self._buffer: _Buffer | None = None  # in which that is
        self._entries: dict[str, _Entry] = {}
        self._seen: _Seen | None = None
        self._kept_transposes: tuple[list[Tensor], list[Version], TransposedWeights] | None = None

    @torch.inference_mode(False)  # a copy made here is written anew outside of that mode, too
    @torch.no_grad()
    def get(
        self,
        name: str,
        w: Tensor,
        planes: int = 1,
        stored: Format = E4M3_BLOCKS,
        trains: bool = False,
    ) -> Pair:
        """Return (q, scale) of w; the same storage on every call with the same name and shape.

        trains: their transposes are needed too, from now on.
        """
        version = version_of(w)
        captured = trained(w) and not self.follows and _capturing(w)
        unseen = _uncounted(w, version)
        entry, volatile = self._entries.get(name), captured
        out = transposed_out = None
        if entry is not None:
            trains |= entry.transposed is not None
            counted = not (captured or entry.volatile or unseen)
            if counted and entry.version == version:
                if trains and entry.transposed is None:
                    _refuse_capture(w)
                    entry.transposed = transpose_weights(entry.q, entry.scale, planes)
                return entry.q, entry.scale
            if (tuple(entry.q.shape), entry.q.device) == (stored_shape(w, stored), w.device):
                out, transposed_out = (entry.q, entry.scale), entry.transposed
                entry.version = None  # until all is written
            volatile |= entry.volatile and same_storages(entry.kept, w)
        (q, scale), transposed = quantize_weights(
            w.detach(), planes, stored, out, trains, transposed_out
        )
        self._entries[name] = _Entry(storages_of(w), version, q, scale, volatile, transposed)
        return q, scale

    def weights(
        self, problem: Problem, masters: ExpertWeights, trains: bool = False
    ) -> ExpertWeights:
        """Return quantized weights of masters, with the same biases.

        trains: True: transposed() will need their transposes.
        """
        seen, trains = self._seen, trains and not self.makes
        if seen is not None and seen.holds(masters, trains):
            return seen.weights
        if (gathered := _gathered(masters)) is not None:
            return gathered
        self._seen = None  # an error may come between the two
        w13, w2, stored = masters.w13, masters.w2, problem.formats.w
        q13, s13 = self.get("w13", w13, problem.activation.planes, stored, trains)
        q2, s2 = self.get("w2", w2, 1, stored, trains)
        made = ExpertWeights(q13, q2, masters.b13, masters.b2, s13, s2)
        counted = not any(entry.volatile for entry in self._entries.values()) and all(
            not t.is_inference() and origin_of(t) is None for t in (w13, w2)
        )
        if counted:
            asks = (trained(w13) or trained(w2)) and not self.follows
            transposed = self._copies(masters)
            self._seen = _Seen(w13, w2, _counts(w13, w2), asks, made, transposed)
        return made

    def transposed(self, problem: Problem, given: ExpertWeights) -> TransposedWeights:
        """Return the transposes that a backward pass multiplies, with the given biases.

        Transposes of masters are those of the forward pass, unless the masters have changed since; then they are
        quantized again. e4m3 weights are transposed once per version, whatever optimizers step.
        Raises MegaMoEError if a graph is captured that would have to create transposes: a capture runs nothing, so
        later calls would read garbage.
        """
        seen = self._seen
        if seen is not None and seen.holds(given, not self.makes):
            return seen.transposed or self._made_for(problem, seen.weights)
        given = _gathered(given) or given
        if given.w13_scale is not None:
            make = self._made_for if self.makes else self._kept_for
            return make(problem, given)
        for name, w in (("w13", given.w13), ("w2", given.w2)):
            entry = self._entries.get(name)
            lacks = entry is None or (entry.transposed is None and not self.makes)
            if lacks or entry is None or entry.version != version_of(w):
                self.weights(problem, given, trains=True)
        if self.makes:
            return self._made_for(problem, self._forward(given))
        made = self._copies(given)
        assert made is not None
        return made

    @torch.inference_mode(False)
    @torch.no_grad()
    def _made_for(self, problem: Problem, forward: ExpertWeights) -> TransposedWeights:
        """Write transposes to the buffer that the layers of a device share, for the next launch only.

        A layer keeps its place in one buffer, even if a larger layer has allocated another: graphs read that place.
        """
        w13, w2, planes, made = forward.w13, forward.w2, problem.activation.planes, self._made
        assert forward.w13_scale is not None
        assert forward.w2_scale is not None
        if made is None or not (_alike(made.forward.w13, w13) and _alike(made.forward.w2, w2)):
            _refuse_capture(w13)
            self._buffer = _Buffer.of(w13.device, w13.numel() + w2.numel(), w13.dtype)
            made = self._buffer.transposes(forward, planes)
        elif made.forward is not forward:
            made = replace(made, forward=forward)
        if w13.is_cuda:  # the last launch may read the buffer, on another stream
            launch_order(w13.device.index or 0).before_launch()
        transpose_weights(w13, forward.w13_scale, planes, (made.w13, made.w13_scale))
        transpose_weights(w2, forward.w2_scale, 1, (made.w2, made.w2_scale))
        self._made = made
        return made

    def _copies(self, given: ExpertWeights) -> TransposedWeights | None:
        """Return what was made of these masters, if their transposes were."""
        w13, w2 = self._entries["w13"], self._entries["w2"]
        if w13.transposed is None or w2.transposed is None:
            return None
        (t13, u13), (t2, u2) = w13.transposed, w2.transposed
        return TransposedWeights(self._forward(given), t13, t2, u13, u2)

    def _forward(self, given: ExpertWeights) -> ExpertWeights:
        w13, w2 = self._entries["w13"], self._entries["w2"]
        return ExpertWeights(w13.q, w2.q, given.b13, given.b2, w13.scale, w2.scale)

    def _kept_for(self, problem: Problem, given: ExpertWeights) -> TransposedWeights:
        sources = [
            t for t in (given.w13, given.w2, given.w13_scale, given.w2_scale) if t is not None
        ]
        versions, last = [version_of(t, invalidations) for t in sources], self._kept_transposes
        if last is None or last[1] != versions:
            _refuse_capture(given.w13)
            with torch.inference_mode(False), torch.no_grad():
                made = TransposedWeights.of(problem, given)
                if last is not None and _alike(last[2].w13, made.w13):  # graphs read that storage
                    for name, kept in last[2].named().items():
                        kept.copy_(getattr(made, name))
                    made = last[2]
            self._kept_transposes = last = [t.detach() for t in sources], versions, made
        return replace(last[2], forward=given)

    def invalidate(self) -> None:
        """Forget all versions; the next get() quantizes again, into the same storage."""
        self._seen = None
        if self._kept_transposes is not None:
            self._kept_transposes = [], [], self._kept_transposes[2]
        for entry in self._entries.values():
            entry.version = None


def _gathered(masters: ExpertWeights) -> ExpertWeights | None:
    """Return the e4m3 weights of parameters that FSDP2 gathered, see gathered.py; None for other parameters."""
    of13: Pair | None = getattr(masters.w13, "_megamoe_gathered", None)
    of2: Pair | None = getattr(masters.w2, "_megamoe_gathered", None)
    if of13 is None or of2 is None:
        return None
    return ExpertWeights(of13[0], of2[0], masters.b13, masters.b2, of13[1], of2[1])


def _refuse_capture(w: Tensor) -> None:
    if _capturing(w):
        raise MegaMoEError(
            "the transposes of FP8 weights are missing or old while a CUDA graph is captured: run a backward pass with "
            "these weights before the capture"
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.device) == (b.shape, b.device)
