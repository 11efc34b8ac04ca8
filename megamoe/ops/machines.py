"""Where a grouped kernel runs: on a Hopper GPU, on CPU fibers, or not at all."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from megamoe import env
from megamoe.backends.emulated_rank import encode_emulated
from megamoe.backends.emulation import REPORT_BYTES, EmulationError, load_kernel
from megamoe.jit import abi, compiler
from megamoe.jit.grouped import GroupedVariant
from megamoe.memory.arguments import Encoder
from megamoe.memory.launches import (
    current_stream_handle,
    launch_lock,
    on_device,
    refuse_capture,
)

logger = logging.getLogger("megamoe")
PAIR_CTAS = 2  # pair_ctas of csrc/megamoe/schedule/order.h
Fill = Callable[[Any, Encoder], None]  # (zeroed abi.Args, encoder of maps)


class Gpu:
    """Launches on the current stream of one device; the host waits for nothing."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._launchers: dict[GroupedVariant, Any] = {}

    def run(self, variant: GroupedVariant, fill: Fill) -> None:
        """Launch one kernel. The first launch of a variant loads it, and cannot be captured."""
        from megamoe.jit.driver import use_device
        from megamoe.jit.tensormap import encode

        with launch_lock, on_device(torch.device("cuda", self._ordinal)):
            use_device(self._ordinal)  # a thread of autograd has no context before its first launch
            launcher = self._launchers.get(variant)
            if launcher is None:
                launcher = self._launchers[variant] = self._load(variant)
            args = launcher.argument
            ctypes.memset(ctypes.addressof(args), 0, ctypes.sizeof(args))
            fill(args, encode)
            launcher.launch(current_stream_handle(self._ordinal))

    def _load(self, variant: GroupedVariant) -> Any:
        from megamoe.jit.driver import device_attribute
        from megamoe.jit.module import Launcher, load_kernel

        refuse_capture(f"run {variant} once before CUDA graph capture")
        sms = device_attribute(self._ordinal, "MULTIPROCESSOR_COUNT")
        grid = sms // PAIR_CTAS * PAIR_CTAS
        kernel = load_kernel(variant, self._ordinal)
        return Launcher(kernel, grid, abi.aligned(abi.Args), cooperative=False)


class Fibers:
    """Emulates the kernel's own source, csrc/fibers. `seed`: of the order in which fibers run; 0: round robin."""

    num_ctas, seed = 4, 0

    def run(self, variant: GroupedVariant, fill: Fill) -> None:
        """Run one kernel to its end."""
        args = abi.aligned(abi.Args)
        fill(args, encode_emulated)
        report = ctypes.create_string_buffer(REPORT_BYTES)
        place = ctypes.addressof(args), 1, self.num_ctas, self.seed, report, REPORT_BYTES
        if load_kernel(variant)(*place):
            raise EmulationError(report.value.decode(errors="replace"))


fibers = Fibers()


def machine_of(device: torch.device) -> Gpu | Fibers | None:
    """Return what runs kernels for tensors on `device`; None: torch's own operations stand in for them."""
    if device.type == "cuda":
        return _gpu(torch.cuda.current_device() if device.index is None else device.index)
    return fibers if device.type == "cpu" and env.backend() == "emulate" else None


@cache
def _gpu(ordinal: int) -> Gpu | None:
    name, (major, _) = (
        torch.cuda.get_device_name(ordinal),
        torch.cuda.get_device_capability(ordinal),
    )
    why = f"{name} is not a Hopper GPU" if major != 9 else compiler.why_not()
    if why is None:
        return Gpu(ordinal)
    logger.warning(
        "megamoe.ops on cuda:%d are torch's own operations, which wait: %s", ordinal, why
    )
    return None
