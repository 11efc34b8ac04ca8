"""Select where a grouped kernel runs: on a Hopper GPU, on CPU fibers, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from megamoe.backends.emulate.emulation import run_alone
from megamoe.backends.emulate.memory import encode_emulated
from megamoe.backends.mega.launches import why_not
from megamoe.core import env
from megamoe.core.errors import ArgumentError
from megamoe.jit import abi, recording
from megamoe.jit.grouped import GroupedVariant
from megamoe.launch.launches import current_stream_handle, launch_lock, on_device, refuse_capture
from megamoe.launch.meetings import PAIR_CTAS
from megamoe.ops.arguments import Gemm, Outer, addresses_of, write
from megamoe.ops.calls import margins

logger = logging.getLogger("megamoe")
ANYWHERE = 1 << 40  # an address that maps may have


@contextmanager
def sm_margin(num_sms: int) -> Iterator[None]:
    """Leave SMs of the GPU to other kernels, in calls of all threads inside `with`: backward passes run in their own.

    Args:
        num_sms: How many. A launch has at least one pair of CTAs. Outside: MEGAMOE_RESERVE_SMS, read once, or 0.

    Raises:
        ArgumentError: `num_sms` is no number of SMs.
    """
    if type(num_sms) is not int or num_sms < 0:
        raise ArgumentError("num_sms", repr(num_sms), "an int, 0 or more")
    margins.append(num_sms)
    try:
        yield
    finally:
        margins.pop()


def _grid(num_sms: int) -> int:
    """Return the CTAs of a launch on so many SMs."""
    margin = margins[-1] if margins else _reserved() or 0
    return max(num_sms - margin, PAIR_CTAS) // PAIR_CTAS * PAIR_CTAS


_reserved = cache(env.reserve_sms)


class Gpu:
    """Launches on the current stream of one device; the host waits for nothing."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self._device = ordinal, torch.device("cuda", ordinal)
        self._kernels: dict[GroupedVariant, Any] = {}

    def run(self, variant: GroupedVariant, launch: Gemm | Outer) -> None:
        """Launch one kernel. The first launch of a variant loads it and cannot be captured."""
        addresses = addresses_of(launch)
        with launch_lock, on_device(self._device):
            fill = partial(self._fill, variant, launch)
            recording.launch(fill, addresses, current_stream_handle(self._ordinal))

    def _fill(self, variant: GroupedVariant, launch: Gemm | Outer) -> Any:
        from megamoe.jit.driver import device_attribute, use_device
        from megamoe.jit.module import Block, Launcher, load_kernel
        from megamoe.jit.tensormap import encode

        if variant not in self._kernels:
            refuse_capture(f"run {variant} once before CUDA graph capture")
            self._kernels[variant] = load_kernel(variant, self._ordinal)
        use_device(self._ordinal)  # a thread of autograd has no context before its first launch
        args = abi.aligned(abi.LAUNCHES[variant.launch])
        num, places = len(launch.tensors()), launch.fill(args)
        write(places, [ANYWHERE] * num, encode)
        grid = _grid(device_attribute(self._ordinal, "MULTIPROCESSOR_COUNT"))
        return Block(Launcher(self._kernels[variant], grid, args, cooperative=False), places, num)


class Fibers:
    """Emulates the kernel's own source, csrc/fibers. `seed`: of the order in which fibers run; 0: round robin."""

    num_ctas, seed = 4, 0

    def run(self, variant: GroupedVariant, launch: Gemm | Outer) -> None:
        """Run one kernel to its end."""
        args = abi.aligned(abi.LAUNCHES[variant.launch])
        write(launch.fill(args), addresses_of(launch), encode_emulated)
        run_alone(variant, args, _grid(self.num_ctas), self.seed)


fibers = Fibers()


def machine_of(device: torch.device, variant: GroupedVariant) -> Gpu | Fibers | None:
    """Return what runs this kernel for tensors on `device`; None: torch's own operations stand in for it."""
    if device.type == "cuda":
        return _gpu(torch.cuda.current_device() if device.index is None else device.index, variant)
    return fibers if device.type == "cpu" and env.get("MEGAMOE_BACKEND") == "emulate" else None


@cache
def _gpu(ordinal: int, variant: GroupedVariant) -> Gpu | None:
    if (why := why_not(variant, torch.device("cuda", ordinal))) is None:
        return _machine(ordinal)
    _warn(ordinal, why)
    return None


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
