"""TMA descriptors. One host call of microseconds; kept by (address, geometry), so weights cost it once."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from cuda.bindings import driver

from megamoe.jit.driver import check

_TYPES = {1: "UINT8", 2: "BFLOAT16"}  # e4m3 is moved as bytes


@lru_cache(maxsize=4096)
def encode(
    base: int,
    dims: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    element_bytes: int,
) -> bytes:
    """Return the 128 bytes of a CUtensorMap: 128-byte swizzle, zeros outside the tensor.

    dims, box: innermost first. strides_bytes: of every dimension but the innermost.
    """
    kind: Any = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[element_bytes]}"
    )
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            kind,
            len(dims),
            base,
            [driver.cuuint64_t(n) for n in dims],
            [driver.cuuint64_t(n) for n in strides_bytes],
            [driver.cuuint32_t(n) for n in box],
            [driver.cuuint32_t(1)] * len(dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(int(tensor_map.getPtr()), 128)
