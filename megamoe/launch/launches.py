"""Order launches on a device, and allocate memory for y."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import MegaMoEError


class _LaunchOrder:
    """Order our launches on one device as the host makes them, on any streams.

    Two persistent kernels of different windows must not share a device, because neither would be fully resident.
    A graph capture orders the launches of that capture. The user orders the streams of a replay and of other
    launches, as for any graph.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        # of the last launch: its stream, with the handle (-1: there was none), and the capture (0: none)
        self.stream: Any = None
        self._handle, self._capture = -1, 0

    def before_launch(self) -> int:
        """Return the handle of the current stream, after it waits for our last launch on another stream."""
        handle = current_stream_handle(self._ordinal)
        capture = _capture_id(handle) if handle else 0  # nobody captures the default stream
        if handle == self._handle and capture == self._capture:
            return handle
        stream = torch.cuda.current_stream(self._ordinal)
        if self.stream is not None and capture == self._capture:
            # Recorded now and not at the launch: the common case, one stream, costs nothing.
            event = torch.cuda.Event()
            event.record(self.stream)
            stream.wait_event(event)
        self._handle, self._capture, self.stream = handle, capture, stream
        return handle


# ordinal -> handle of its current stream; a tenth of what torch.cuda.current_stream() costs
current_stream_handle: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


@cache
def allocator(on_gpu: bool) -> Callable[..., Tensor]:
    """Return (shape, strides, dtype) -> uninitialized tensor on the current device.

    By what inductor's code calls, past the dispatcher: half of torch.empty_like's time.
    """
    name = "cuda" if on_gpu else "cpu"
    fast = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{name}", None)
    return fast or (
        lambda s, stride, dtype: torch.empty_strided(s, stride, dtype=dtype, device=name)
    )


def _capture_id(stream: int) -> int:
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    from megamoe.jit.driver import check

    return int(check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)))[1])


launch_lock = threading.RLock()


@cache
def launch_order(device: int) -> _LaunchOrder:
    """Return the order of launches on a device. Use it under launch_lock, until the launch is made."""
    return _LaunchOrder(device)


def on_device(device: torch.device) -> Any:
    """Return a context in which `device` is current."""
    if device.type != "cuda" or device.index == current_device():
        return nullcontext()
    return torch.cuda.device(device)


def refuse_capture(instead: str) -> None:
    """Raise MegaMoEError with advice if a CUDA graph is being captured."""
    if torch.cuda.is_current_stream_capturing():
        raise MegaMoEError(instead)
