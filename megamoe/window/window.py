"""Hold a group's symmetric memory and everything else that belongs to the group rather than to one layer.

One window serves any number of layers that agree on everything except sizes that only bound it (see `admits`). The
launches of a window follow each other, so its regions, its epoch and its workspaces belong to one launch at a time.
Every rank must call the layers of a window in the same order; another order raises an error.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import (
    ConfigError,
    MegaMoEError,
    PeerFault,
    UnreachablePeer,
    WindowBroken,
    fault_to_error,
)
from megamoe.group.group import Group, RankConfig
from megamoe.group.hosts import host_name, spans_hosts
from megamoe.group.order import mark_of
from megamoe.jit import abi, cache
from megamoe.launch import layout
from megamoe.launch.arguments import Plan
from megamoe.launch.launches import on_device
from megamoe.launch.layout import Regions
from megamoe.window.allocators import Transport, choose

SOURCES = "version of the sources"  # of the kernels, as errors name it


@dataclass(frozen=True)
class WindowSpec:
    """Hold the sizes that determine the window's layout; equal on all ranks."""

    hidden: int
    top_k: int
    ep_size: int
    max_tokens: int
    precision: str

    @classmethod
    def of(cls, problem: Problem) -> WindowSpec:
        """Return the spec that one problem needs."""
        return cls(**{field.name: getattr(problem, field.name) for field in fields(cls)})

    def mismatch(self, problem: Problem) -> str | None:
        """Return why a layer of `problem` cannot use this window, or None.

        Layouts must be equal, because launch n + 1 may write while a peer still reads results of launch n. So
        hidden, top_k, ep_size and precision are equal, and a smaller max_tokens uses the larger strides.
        """
        for name, ours in vars(self).items():
            theirs = getattr(problem, name)
            if theirs > ours if name == "max_tokens" else theirs != ours:
                return f"{name} is {theirs} in the layer, {ours} in its window"
        return None


class Window:
    """Hold the symmetric memory of one group on one device. Creating, resetting and closing it is collective.

    agreed: True if the ranks have already compared what agree() compares.
    """

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
        transport: str | Transport | None = None,
        agreed: bool = False,
    ) -> None:
        self.group = Group.of(group)
        self.device = torch.device("cuda" if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self._capturing():
            raise MegaMoEError(
                "a window cannot be created during CUDA graph capture: call the layer's prepare() before"
            )
        self.spec = WindowSpec.of(problem)
        self.closed = False
        self.timeout_ns = 0  # of the layers' launches; for messages
        self.broken: MegaMoEError | None = None
        self.resets = 0
        # By layout: memory, its regions, and those that a reset zeroes.
        self._workspaces: dict[Any, tuple[Tensor, Regions, Sequence[str]]] = {}
        self._layers = 0
        self.last_launch: tuple[int, str] | None = None  # layer and kernel
        if not agreed:
            self.agree(problem)
        self.regions = layout.window_regions(problem)
        self.closed = True  # until all ranks have allocated and zeroed theirs
        made = transport or env.get("MEGAMOE_TRANSPORT")
        self.group.all_or_none("make its window", lambda: self._allocate(made))
        self.closed = False

    def _allocate(self, transport: str | Transport) -> None:
        allocate = choose(transport, self.group) if isinstance(transport, str) else transport
        with on_device(self.device):
            self._allocation = allocate(self.regions.bytes, self.device, self.group)
            self.memory, self.bases = self._allocation.memory, self._allocation.peers
            self.memory.zero_()
            self._epoch = torch.zeros(64, dtype=torch.int32, device=self.device)
            # Host memory that the device can write at the same address.
            size, on_gpu = ctypes.sizeof(abi.FaultRecord), self.device.type == "cuda"
            self.fault_memory = torch.zeros(
                size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu
            )
            self.fault = abi.FaultRecord.from_address(self.fault_memory.data_ptr())
            self._synchronize()

    @property
    def epoch_cell(self) -> Tensor:
        """The count of completed launches, [1] int32 on the device."""
        return self._epoch[:1]

    def epoch(self) -> int:
        """Return the count of completed launches. Waits for the device."""
        return int(self._epoch[0])

    def agree(self, problem: Problem) -> None:
        """Raise RankMismatch, with rank and field, if ranks are configured differently. Collective."""

        def state() -> RankConfig:
            if (size := self.group.size) != problem.ep_size:
                raise ConfigError("ep_size", problem.ep_size, f"{size}, the group's size")
            return RankConfig(host_name(), {SOURCES: cache.content_key("")}, problem)

        hosts = self.group.agree("make its window", state)
        apart = spans_hosts(list(hosts.values()))
        if apart is not None:
            raise UnreachablePeer(f'{apart}; use backend="staged"')

    def admit(self, problem: Problem) -> None:
        """Raise ConfigError if a layer of `problem` cannot use this window."""
        self._check_open()
        reason = self.spec.mismatch(problem)
        if reason:
            raise ConfigError(f"this window cannot serve this layer: {reason}")

    def add_layer(self) -> int:
        """Return the number of a new layer. It is equal on all ranks, because creating layers is collective."""
        self._layers += 1
        return self._layers - 1

    def workspace(self, plan: Plan) -> Tensor:
        """Return the workspace of a layer, followed by a state, zeroed when new. Layers of equal layout share one."""
        return self._memory_for(plan, plan.workspace, layout.WORKSPACE_RESET, plan.workspace_bytes)

    def backward_workspace(self, plan: Plan) -> Tensor:
        """Return backward's own workspace, zeroed when new. The first training of a layout allocates it."""
        regions = plan.backward
        return self._memory_for(plan, regions, layout.BACKWARD_CONTROL, regions.bytes)

    def _memory_for(
        self, plan: Plan, regions: Regions, reset: Sequence[str], nbytes: int
    ) -> Tensor:
        key = plan.strided, plan.pool_rows, plan.weight_gradients, reset
        if key not in self._workspaces:
            with on_device(self.device):
                raw = torch.zeros(nbytes + layout.ALIGNMENT, dtype=torch.uint8, device=self.device)
                start = -raw.data_ptr() % layout.ALIGNMENT
                self._workspaces[key] = raw[start : start + nbytes], regions, reset
                self._synchronize()  # launches may use any stream
        return self._workspaces[key][0]

    # --- faults ---

    def poll(self) -> None:
        """Raise the fault of a launch if the host can see it without waiting. It takes nanoseconds."""
        if self.fault.edge and self.broken is None:
            record = {"rank": self.group.rank, "waited_ns": self.timeout_ns}
            self.broken = fault_to_error(record | abi.fault_fields(self.fault))
            if isinstance(self.broken, PeerFault):
                self.broken = self._peers_fault()
            raise self.broken
        if self.broken is not None:
            raise WindowBroken(f"call reset() on all ranks first. The fault was: {self.broken}")
        if self.closed:
            self._check_open()

    def check(self) -> None:
        """Wait for the device, then raise the fault of any launch, or of a peer whose fault ended ours."""
        self._synchronize()
        self.poll()
        if int(self._abort_cells[0]):
            self.broken = self._peers_fault()
            raise self.broken

    @property
    def _abort_cells(self) -> Tensor:
        return self.regions["window_abort"].view(self.memory)

    def _peers_fault(self) -> MegaMoEError:
        """Return the error of a launch that another rank has ended. It names the rank that called abort(), if one did.

        Waits for the launch.
        """
        own, capturing = self.group.rank, self._capturing()
        if not capturing and (rank := int(self._abort_cells[1]) - 1) >= 0:
            return PeerFault(
                f"rank {rank} raised an error before its launch, so rank {own} left the launch: see that rank's error"
            )
        return fault_to_error({"edge": "peer_abort", "rank": own, "peer": own, "role": ""})

    def abort(self, error: Exception) -> None:
        """End the current or next launch of the other ranks, because this rank raises an error instead of a launch.

        Their launch stops waiting, and they raise PeerFault. As after every fault, the window is broken until reset().
        abort() waits for this rank's earlier launches, so that they keep their results.
        """
        if self.closed or self.broken is not None:  # then the other ranks know
            return
        from megamoe.jit.driver import write_memory

        self._synchronize()
        self.broken = MegaMoEError(f"rank {self.group.rank} raised {type(error).__name__}: {error}")
        cells = struct.pack("ii", 1, 1 + self.group.rank)
        with on_device(self.device):
            for rank, base in enumerate(self.bases):
                if rank != self.group.rank:
                    write_memory(base + self.regions["window_abort"].offset, cells)

    def reset(self) -> None:
        """Make a broken window usable again. Collective; results of launches in flight are lost.

        Epochs continue, so no two training forwards have states of the same epoch.
        """
        self._check_open()
        self._synchronize()
        epochs = self.group.gather(mark_of("reset()"), self.epoch())  # here no rank's kernel runs
        last = max(epochs.values())
        with on_device(self.device):
            self.regions.zero(self.memory, layout.WINDOW_CONTROL)
            for memory, regions, cells in self._workspaces.values():
                regions.zero(memory, cells)
            self._epoch.fill_(last + 1)
            self.fault_memory.zero_()
            self._synchronize()
        self.broken = None
        self.resets += 1
        self.group.barrier()

    # --- the end ---

    def close(self) -> None:
        """Free the memory when no rank uses it any more. Collective; a second call does nothing."""
        if self.closed:
            return
        self._synchronize()
        self.group.barrier()
        self.closed = True
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._allocation.memory = self.memory
        self._workspaces.clear()
        self._allocation.free()
        self.group.barrier()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self.group.size > 1:
            # Freeing is collective, but a destructor runs at any time. The memory stays allocated.
            _leaked.append(getattr(self, "_allocation", None))
            warnings.warn(
                "a megamoe window was deleted without close(): its memory stays allocated",
                ResourceWarning,
                stacklevel=2,
            )

    def _check_open(self) -> None:
        if self.closed:
            raise WindowBroken("this window is closed")

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_leaked: list[Any] = []
