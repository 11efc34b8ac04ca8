"""Call the CUDA driver through cuda-python, with checked results: the few functions that a launch needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cuda.bindings import driver

from megamoe.core.errors import MegaMoEError


def check(result: tuple[Any, ...]) -> Any:
    """Return the values of a driver call, or raise with the driver's own words."""
    status, *values = result
    if int(status) != 0:
        failed, text = driver.cuGetErrorString(status)
        words = text.decode() if int(failed) == 0 and text else ""
        raise MegaMoEError(f"CUDA driver: {getattr(status, 'name', status)} {words}".strip())
    return values[0] if len(values) == 1 else tuple(values)


@lru_cache(maxsize=16)
def _primary_context(device: int) -> Any:
    check(driver.cuInit(0))
    return check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))


def use_device(device: int) -> bool:
    """Make the context that torch uses current in this thread, if none is; return whether that was needed."""
    status, current = driver.cuCtxGetCurrent()
    if int(status) != 0 or int(current) == 0:  # not initialized, or none in this thread
        check(driver.cuCtxSetCurrent(_primary_context(device)))
        return True
    return False


@lru_cache(maxsize=64)
def device_attribute(device: int, name: str) -> int:
    """Return an attribute such as "MULTIPROCESSOR_COUNT" of a device."""
    check(driver.cuInit(0))
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(driver.cuDeviceGetAttribute(attribute, check(driver.cuDeviceGet(device)))))


def write_memory(address: int, content: bytes) -> None:
    """Write into memory of any device that is mapped here, and wait until it is there."""
    check(driver.cuMemcpyHtoD(address, content, len(content)))
