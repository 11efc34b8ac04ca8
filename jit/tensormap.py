"""Encode TMA descriptors. A host call takes microseconds and is cached by (address, geometry)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from cuda.bindings import driver

from megamoe.jit import abi
from megamoe.jit.driver import check, use_device

_TYPES = {1: "UINT8", 2: "BFLOAT16", 4: "FLOAT32"}  # e4m3 is moved as bytes


@lru_cache(maxsize=1)
def _driver() -> Any:
    """Return the driver for ctypes: cuda-python's own functions do not align maps to 64 bytes."""
    found = ctypes.CDLL("libcuda.so.1")
    found.cuTensorMapReplaceAddress.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return found


@lru_cache(maxsize=4096)
def encode(
    base: int,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    element_bytes: int,
) -> bytes:
    """Return the 128 bytes of a CUtensorMap: swizzled as wide as the box (128, 64, 32 bytes), zeros outside the tensor.

    dims, box: innermost first. strides_bytes: of every dimension but the innermost.
    """
    tensor_map = abi.aligned(abi.TensorMap)
    before, behind = _geometry(dims, strides_bytes, box, element_bytes)
    place = ctypes.c_void_p(ctypes.addressof(tensor_map))
    status = _driver().cuTensorMapEncodeTiled(place, *before, ctypes.c_void_p(base), *behind)
    check((driver.CUresult(status),))
    return bytes(tensor_map)


def replace_address(tensor_map: int, base: int, device: int) -> None:
    """Let the map at an address be of memory elsewhere."""
    replace = _driver().cuTensorMapReplaceAddress
    status = replace(tensor_map, base)
    if status and use_device(device):  # a new thread: it had no context
        status = replace(tensor_map, base)
    if status:
        check((driver.CUresult(status),))


@lru_cache(maxsize=4096)
def _geometry(
    dims: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...], element_bytes: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments before and behind the address: outputs are elsewhere in each call, and of few shapes."""
    rank = len(dims)
    element = f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[element_bytes]}"
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{box[0] * element_bytes}B"
    # What L2 asks of memory at least. Boxes 64 bytes wide, packed weights, take 0.2 to 1 % less time with 128 than with
    # 256; wider ones up to 5 % more (docs/tuning.md, 2026-11-23).
    promotion = f"CU_TENSOR_MAP_L2_PROMOTION_L2_{min(256, 2 * box[0] * element_bytes)}B"
    behind = (
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, swizzle)),
        int(getattr(driver.CUtensorMapL2promotion, promotion)),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    return (int(getattr(driver.CUtensorMapDataType, element)), rank), behind
