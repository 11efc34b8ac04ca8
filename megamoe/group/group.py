"""The few collective operations that set-up needs, over torch.distributed, threads of a process, or nobody."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megamoe.core import env
from megamoe.core.errors import ConfigError, MegaMoEError

T = TypeVar("T")


class Group(Protocol):
    """Ranks that share windows. All operations are collective and wait on the host."""

    rank: int
    size: int
    in_process: bool  # all ranks live in this process

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank."""

    def barrier(self) -> None:
        """Wait until all ranks are here."""


class Alone:
    """A group of one."""

    rank, size, in_process = 0, 1, True

    def all_gather(self, value: Any) -> list[Any]:
        """Return [value]."""
        return [value]

    def barrier(self) -> None:
        """Return at once."""


class TorchGroup:
    """A process group of torch.distributed, of any backend."""

    in_process = False

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def all_gather(self, value: Any) -> list[Any]:
        """Pickle, exchange, unpickle."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.process_group)
        return gathered

    def barrier(self) -> None:
        """Exchange nothing: unlike NCCL's barrier, this holds the host on every backend."""
        self.all_gather(None)


class _Meeting:
    """What the threads of one ThreadGroup share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class ThreadGroup:
    """Ranks that are threads of one process; for tests, and for one process that drives several GPUs."""

    in_process = True

    def __init__(self, meeting: _Meeting, rank: int, timeout_s: float) -> None:
        self._meeting, self._timeout_s = meeting, timeout_s
        self.rank, self.size = rank, meeting.size

    @classmethod
    def create(cls, size: int, timeout_s: float = 60.0) -> list[ThreadGroup]:
        """Return one member for each thread."""
        meeting = _Meeting(size)
        return [cls(meeting, rank, timeout_s) for rank in range(size)]

    def all_gather(self, value: Any) -> list[Any]:
        """Exchange references."""
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait(self._timeout_s)
        gathered = list(self._meeting.values)
        self._meeting.barrier.wait(self._timeout_s)
        return gathered

    def barrier(self) -> None:
        """Wait for the other threads."""
        self._meeting.barrier.wait(self._timeout_s)


@lru_cache(maxsize=1)
def _this_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot[:8]}".strip()


def host_name() -> str:
    """Return what tells this rank's host from others: its name and this boot of it, or MEGAMOE_HOST."""
    return env.host() or _this_host()


def spans_hosts(hosts: Sequence[str]) -> str | None:
    """hosts: host_name() of each rank. Return why the ranks cannot share a window, or None when they can."""
    if len(set(hosts)) == 1:
        return None
    ranks = {host: [r for r, h in enumerate(hosts) if h == host] for host in hosts}
    where = "; ".join(f"{_ranges(there)} on {host}" for host, there in ranks.items())
    return f"the group spans {len(ranks)} hosts, whose GPUs share no memory (ranks {where})"


def _ranges(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"{first}..{last}"
    return ", ".join(map(str, ranks))


def mesh_group(group: Any) -> Any:
    """Return the process group of a one-dimensional DeviceMesh; anything else is handed through."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = f" {group.mesh_dim_names}" if group.mesh_dim_names else ""
        given = f"a mesh of {group.ndim} dimensions{names}"
        raise ConfigError("group", given, 'a DeviceMesh of one dimension: mesh["ep"], say')
    return group.get_group()


def as_group(group: Any) -> Group:
    """Wrap what users pass: None, a torch process group, a one-dimensional DeviceMesh, or a Group."""
    group = mesh_group(group)
    if group is None:
        return Alone()
    if hasattr(group, "in_process"):
        wrapped: Group = group
        return wrapped
    if dist.get_world_size(group) == 1:
        return Alone()
    return TorchGroup(group)


def all_or_none(group: Group, attempt: Callable[[], T], what: str) -> T:
    """Return attempt(); raise its error, or name the first other rank that could not do `what`. Collective."""
    made: list[T] = []
    failure: Exception | None = None
    try:
        made.append(attempt())
    except Exception as error:
        failure = error
    texts = group.all_gather(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text is not None:
            raise MegaMoEError(f"rank {rank} could not {what}: {text}")
    return made[0]
