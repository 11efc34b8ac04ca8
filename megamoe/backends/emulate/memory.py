"""Provide the memory of one emulated rank, and tensors in the form that the emulated kernel takes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.jit import abi
from megamoe.launch import layout
from megamoe.launch.arguments import Plan

MAP_MARK = 0x70614D54  # EmulatedTensorMap::valid_mark in csrc/fibers/tma.h

# Data that the kernel must write before it reads: filled with NaN patterns when a rank's memory is made.
_POISONED = (
    *("x_pool", "x_pool_scale", "h", "h_scale", "y_rows", "panels"),
    *("window_weights", "window_x", "window_x_scale", "window_partials", "window_d_weights"),
    *("window_few_x", "window_few_x_scale"),
)


def encode_emulated(
    base: int,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_bytes: int,
) -> bytes:
    """Return an EmulatedTensorMap, innermost dimension first; the stand-in for cuTensorMapEncodeTiled."""

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    packed = struct.pack(
        "<QII4Q3Q4II",
        *(base, MAP_MARK, len(dims)),
        *(*padded(dims, 4), *padded(strides_bytes, 3), *padded(box, 4), element_bytes),
    )
    return packed.ljust(128, b"\0")


@dataclass
class Rank:
    """Memory of one emulated rank; what a GPU would hold."""

    plan: Plan
    window: Tensor
    workspace: Tensor
    fault: Any

    @cached_property
    def backward(self) -> Tensor:
        """Backward's part of the workspace; made when a call first needs it."""
        memory = aligned_zeros(self.plan.backward.bytes).fill_(0xFF)
        zeros = *layout.BACKWARD_CONTROL, *layout.TRANSPOSED_SCALES
        self.plan.backward.zero(memory, self.plan.backward.keys() & zeros)
        return memory

    @classmethod
    def make(cls, problem: Problem, pool_rows: int | None, weight_gradients: str = "bf16") -> Rank:
        rows = layout.default_pool_rows(problem) if pool_rows is None else pool_rows
        plan = Plan(problem, rows, weight_gradients=weight_gradients)
        window = aligned_zeros(plan.window.bytes)
        workspace = aligned_zeros(plan.workspace_bytes)
        for regions, memory in ((plan.window, window), (plan.workspace, workspace)):
            for name in _POISONED:
                if name in regions:
                    memory[regions[name].offset : regions[name].end] = 0xFF
        workspace[plan.state_offset :] = 0xFF
        return cls(plan, window, workspace, abi.FaultRecord())

    def reset(self) -> None:
        for regions, names, memory in (
            (self.plan.window, layout.WINDOW_CONTROL, self.window),
            (self.plan.workspace, layout.WORKSPACE_RESET, self.workspace),
        ):
            regions.zero(memory, names)
        if "backward" in vars(self):
            self.plan.backward.zero(self.backward, layout.BACKWARD_CONTROL)
        ctypes.memset(ctypes.addressof(self.fault), 0, ctypes.sizeof(self.fault))


class Kept:
    """Tensors as the kernel takes them, kept alive for a launch."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def flat(self, tensor: Tensor | None) -> Any:
        """Return it contiguous and aligned on the CPU."""
        return None if tensor is None else self.in_place(tensor.detach().cpu().contiguous())

    def in_place(self, tensor: Tensor) -> Tensor:
        """Keep the strides: the maps have them."""
        tensor = tensor.detach().cpu()
        kept = tensor if tensor.data_ptr() % 16 == 0 else tensor.contiguous().clone()
        self._tensors.append(kept)
        return kept

    def weights(self, given: ExpertWeights) -> ExpertWeights:
        """Return the weights, matrices in place."""
        strided = ("w13", "w2")
        kept = {
            n: (self.in_place if n in strided else self.flat)(t) for n, t in given.named().items()
        }
        return ExpertWeights(**kept)

    def transposed(self, given: TransposedWeights) -> TransposedWeights:
        """Return the transposes in place, beside forward's weights as weights() has them."""
        kept = {n: self.in_place(t) for n, t in given.named().items()}
        return TransposedWeights(self.weights(given.forward).with_flat_bias(), **kept)


def nan_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory that the kernel must write, on the CPU: NaN in every format."""
    made = torch.empty_like(tensor, dtype=dtype, device="cpu")
    return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(0xFF)


def aligned_zeros(nbytes: int) -> Tensor:
    raw = torch.zeros(nbytes + layout.ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -raw.data_ptr() % layout.ALIGNMENT
    return raw[start : start + nbytes]
