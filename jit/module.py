"""Load a cubin on a device, check it and launch it. A launch costs the host about a microsecond and never waits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cuda.bindings import driver

from megamoe.core.errors import AbiMismatch, NotCoResident
from megamoe.jit import abi
from megamoe.jit.compiler import compile_variant
from megamoe.jit.cubin import read_u32
from megamoe.jit.driver import check, device_attribute, use_device
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant
from megamoe.jit.tensormap import replace_address

_SUCCESS = driver.CUresult.CUDA_SUCCESS


class Kernel:
    """One entry of a cubin, loaded on one device for good: modules are never unloaded."""

    def __init__(self, cubin: bytes, entry: str, device: int, smem_bytes: int = 0) -> None:
        self.entry, self.device, self.smem_bytes = entry, device, smem_bytes
        use_device(device)
        self._module = check(driver.cuModuleLoadData(cubin))
        self.function = check(driver.cuModuleGetFunction(self._module, entry.encode()))
        # Now and not at the first launch: lazy loading may synchronise with kernels that wait for peers.
        check(driver.cuFuncLoad(self.function))
        self.threads = self._attribute("MAX_THREADS_PER_BLOCK")
        if smem_bytes:
            limit = device_attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            if smem_bytes > limit:
                raise NotCoResident(
                    f"{entry} needs {smem_bytes} bytes of shared memory, this device has {limit}"
                )
            which = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self.function, which, smem_bytes))

    def _attribute(self, name: str) -> int:
        which = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(check(driver.cuFuncGetAttribute(which, self.function)))

    def check_resident(self, grid: int) -> None:
        """Raise NotCoResident unless `grid` CTAs, in the kernel's clusters, fit an otherwise idle device at once."""
        cluster = max(1, self._attribute("REQUIRED_CLUSTER_WIDTH"))
        attribute = _attribute("CLUSTER_DIMENSION")
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = cluster, 1, 1
        config = self.launch_config(grid, [attribute])
        available = cluster * int(check(driver.cuOccupancyMaxActiveClusters(self.function, config)))
        if not 0 < grid <= available:
            raise NotCoResident(
                f"{self.entry} wants {grid} CTAs, {available} fit this device at once, in clusters of "
                f"{cluster} with {self.threads} threads and {self.smem_bytes} bytes each"
            )

    def launch_config(self, grid: int | tuple[int, int, int], attributes: list[Any]) -> Any:
        """Return the CUlaunchConfig of a grid, without a stream."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (
            (grid, 1, 1) if isinstance(grid, int) else grid
        )
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.smem_bytes
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


def _attribute(name: str) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute


class Launcher:
    """Launches a kernel that takes one structure, with everything but the stream prepared.

    The driver copies `argument` at the launch, so it may be changed right afterwards.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int | tuple[int, int, int],
        argument: Any,
        *,
        cooperative: bool = True,
        pdl: bool = False,
    ) -> None:
        self.kernel, self.grid, self.argument = kernel, grid, argument
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        self._pointer_block = ctypes.addressof(self._pointers)
        attributes = []
        if cooperative:
            attributes.append(_attribute("COOPERATIVE"))
            attributes[-1].value.cooperative = 1
        if pdl:
            attributes.append(_attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        self._config = kernel.launch_config(grid, attributes)
        self._stream = -1
        launch = driver.cuLaunchKernelEx
        self._launch = partial(launch, self._config, kernel.function, self._pointer_block, 0)

    def launch(self, stream: int) -> None:
        """Launch on a CUDA stream, given as its handle."""
        if stream != self._stream:
            self._config.hStream = driver.CUstream(stream)
            self._stream = stream
        result = self._launch()
        if result[0] is not _SUCCESS:
            if use_device(self.kernel.device):  # a new thread: the launch had no context
                result = self._launch()
            check(result)


class Block:
    """A launcher with an argument of its own; a launch writes the addresses that changed, and nothing else.

    places: (which address, field, None) of pointers; of tensor maps not None, but what has its base as `base`.
    """

    def __init__(self, launcher: Launcher, places: Sequence[Any], num: int) -> None:
        self.launcher, self._addresses = launcher, [-1] * num
        self._none = self._addresses
        of = [[p for p in places if p[0] == i] for i in range(num)]
        self._pointers = [[field for _, field, map_ in here if map_ is None] for here in of]
        self._maps = [
            [(ctypes.addressof(field), map_.base) for _, field, map_ in here if map_] for here in of
        ]

    def launch(self, addresses: list[int], stream: int) -> None:
        """Launch with these addresses."""
        before, self._addresses = self._addresses, self._none  # until all are there
        for i, base in enumerate(addresses):
            if base != before[i]:
                for pointer in self._pointers[i]:
                    pointer.value = base
                for place, offset in self._maps[i]:
                    replace_address(place, base + offset, self.launcher.kernel.device)
        self._addresses = addresses
        self.launcher.launch(stream)


_loaded: dict[tuple[Variant | GroupedVariant, int], Kernel] = {}
_loading = threading.Lock()


def check_abi(cubin: bytes, what: str, launch: str) -> int:
    """Return the dynamic shared memory that a kernel asks for; raise when its argument is not ours.

    launch: which of abi.LAUNCHES it takes.
    """
    args_bytes = read_u32(cubin, "megamoe_args_bytes")
    smem_bytes = read_u32(cubin, "megamoe_smem_bytes")
    ours = ctypes.sizeof(abi.LAUNCHES[launch])
    if args_bytes != ours or smem_bytes is None:
        raise AbiMismatch(
            f"{what}: its argument has {args_bytes} bytes in the kernel, {ours} in layout/args.h as Python "
            f"reads it; shared memory {smem_bytes}. Clear the cache (MEGAMOE_CACHE_DIR) or reinstall"
        )
    return smem_bytes


def build_kernels(variants: Sequence[Variant | GroupedVariant], device: int) -> None:
    """Compile those that load_kernel() would, side by side, so that a call waits for the slowest alone."""
    missing = [variant for variant in variants if (variant, device) not in _loaded]
    if len(missing) > 1:
        with ThreadPoolExecutor(len(missing)) as pool:  # NVRTC runs without the interpreter's lock
            list(pool.map(compile_variant, missing))


def load_kernel(variant: Variant | GroupedVariant, device: int) -> Kernel:
    """Return the kernel of a variant on a device, prebuilt, from the cache or compiled."""
    with _loading:
        kernel = _loaded.get((variant, device))
        if kernel is None:
            cubin = compile_variant(variant).cubin
            kernel = Kernel(
                cubin, variant.entry, device, check_abi(cubin, str(variant), variant.launch)
            )
            _loaded[variant, device] = kernel
        return kernel
