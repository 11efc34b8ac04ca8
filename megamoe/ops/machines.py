"""Select where a grouped kernel runs: on a Hopper GPU, on CPU fibers, or not at all."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import torch

from megamoe.backends.emulate.emulation import run_alone
from megamoe.backends.emulate.memory import encode_emulated
from megamoe.backends.mega.launches import PAIR_CTAS, why_not
from megamoe.core import env
from megamoe.core.errors import ArgumentError
from megamoe.jit import abi
from megamoe.jit.grouped import GroupedVariant
from megamoe.launch.launches import (
    current_stream_handle,
    launch_lock,
    on_device,
    refuse_capture,
)
from megamoe.ops.arguments import Gemm, Outer

logger = logging.getLogger("megamoe")
MAX_KEPT = 4096  # arguments, of 2 KB
_margins: list[int] = []


@contextmanager
def sm_margin(num_sms: int) -> Iterator[None]:
    """Leave SMs of the GPU to other kernels, in calls of all threads inside `with`: backward passes run in their own.

    Args:
        num_sms: How many. A launch has at least one pair of CTAs. Outside: MEGAMOE_RESERVE_SMS, or 0.

    Raises:
        ArgumentError: `num_sms` is no number of SMs.
    """
    if type(num_sms) is not int or num_sms < 0:
        raise ArgumentError("num_sms", repr(num_sms), "an int, 0 or more")
    _margins.append(num_sms)
    try:
        yield
    finally:
        _margins.pop()


def _grid(num_sms: int) -> int:
    """Return the CTAs of a launch on so many SMs."""
    margin = _margins[-1] if _margins else env.reserve_sms() or 0
    return max(num_sms - margin, PAIR_CTAS) // PAIR_CTAS * PAIR_CTAS


class Gpu:
    """Launches on the current stream of one device; the host waits for nothing.

    Launches with equal keys have equal arguments, which are kept: to fill one takes longer than a small kernel.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._launchers: dict[tuple[GroupedVariant, int], Any] = {}
        self._kept: dict[tuple[GroupedVariant, tuple[Any, ...]], Any] = {}

    def run(self, variant: GroupedVariant, launch: Gemm | Outer) -> None:
        """Launch one kernel. The first launch of a variant, or grid, loads it and cannot be captured."""
        from megamoe.jit.driver import use_device
        from megamoe.jit.tensormap import encode

        with launch_lock, on_device(torch.device("cuda", self._ordinal)):
            use_device(self._ordinal)  # a thread of autograd has no context before its first launch
            key = variant, _grid(self._num_sms)
            launcher = self._launchers.get(key)
            if launcher is None:
                launcher = self._launchers[key] = self._load(*key)
            args, of_launch = launcher.argument, (variant, launch.key())
            kept = self._kept.get(of_launch)
            if kept is None:
                kept = type(args)()
                launch.fill(kept, encode)
                if len(self._kept) == MAX_KEPT:
                    self._kept.clear()
                self._kept[of_launch] = kept
            ctypes.memmove(ctypes.addressof(args), ctypes.addressof(kept), ctypes.sizeof(args))
            launcher.launch(current_stream_handle(self._ordinal))

    @cached_property
    def _num_sms(self) -> int:
        from megamoe.jit.driver import device_attribute

        return device_attribute(self._ordinal, "MULTIPROCESSOR_COUNT")

    def _load(self, variant: GroupedVariant, grid: int) -> Any:
        from megamoe.jit.module import Launcher, load_kernel

        refuse_capture(f"run {variant} on {grid} SMs once before CUDA graph capture")
        kernel = load_kernel(variant, self._ordinal)
        return Launcher(kernel, grid, abi.aligned(abi.LAUNCHES[variant.launch]), cooperative=False)


class Fibers:
    """Emulates the kernel's own source, csrc/fibers. `seed`: of the order in which fibers run; 0: round robin."""

    num_ctas, seed = 4, 0

    def run(self, variant: GroupedVariant, launch: Gemm | Outer) -> None:
        """Run one kernel to its end."""
        args = abi.aligned(abi.LAUNCHES[variant.launch])
        launch.fill(args, encode_emulated)
        run_alone(variant, args, _grid(self.num_ctas), self.seed)


fibers = Fibers()


def machine_of(device: torch.device, variant: GroupedVariant) -> Gpu | Fibers | None:
    """Return what runs this kernel for tensors on `device`; None: torch's own operations stand in for it."""
    if device.type == "cuda":
        return _gpu(torch.cuda.current_device() if device.index is None else device.index, variant)
    return fibers if device.type == "cpu" and env.backend() == "emulate" else None


@cache
def _gpu(ordinal: int, variant: GroupedVariant) -> Gpu | None:
    if (why := why_not(variant, torch.device("cuda", ordinal))) is not None:
        _warn(ordinal, why)
        return None
    return _machine(ordinal)


_machine = cache(Gpu)


@cache
def _warn(ordinal: int, why: str) -> None:
    logger.warning(
        "megamoe.ops on cuda:%d runs by torch's grouped_mm, at 1.1 to 1.7 times the kernels' time in BF16, more with "
        "e4m3 operands, which it takes as bf16; products are rounded to bf16 once more, and for weight gradients in "
        "fp32, one expert after the other, the host waits: %s",
        ordinal,
        why,
    )
