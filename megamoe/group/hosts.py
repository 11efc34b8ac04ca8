"""Determine which host a rank is on. GPUs of different hosts share no memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megamoe.core import env
from megamoe.core.errors import ConfigError


@lru_cache(maxsize=1)
def _this_host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot[:8]}".strip()


def host_name() -> str:
    """Return what tells this rank's host from others: its name and this boot of it, or MEGAMOE_HOST."""
    return env.get("MEGAMOE_HOST") or _this_host()


def spans_hosts(hosts: Sequence[str]) -> str | None:
    """hosts: host_name() of each rank. Return why the ranks cannot share a window, or None when they can."""
    if len(set(hosts)) == 1:
        return None
    num, where = len(set(hosts)), _where(hosts)
    return f"the group spans {num} hosts, whose GPUs share no memory (ranks {where})"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group whose ranks stand host by host: rank h * per_host + g is rank g of host h.

    names: of the hosts. per_host: ranks of each.
    """

    names: tuple[str, ...]
    per_host: int

    @classmethod
    def of(cls, hosts: Sequence[str], stated: int | None = None) -> Hosts:
        """hosts: host_name() of each rank. stated: how many hosts a mesh of two dimensions says there are.

        A mesh may divide a host into several. Raises ConfigError unless each host has as many ranks, one host's beside
        each other.
        """
        names = dict.fromkeys(hosts) if stated is None else range(stated)
        each, rest = divmod(len(hosts), len(names))
        parts = [hosts[i * each : (i + 1) * each] for i in range(len(names))]
        if rest or any(len(set(part)) > 1 for part in parts):
            expected = "as many ranks on each host, host by host"
            if stated is not None:
                expected = f"rows of {each} ranks of one host each, as the mesh says"
            raise ConfigError("group", f"ranks {_where(hosts)}", expected)
        first = [part[0] for part in parts]
        twice = len(set(first)) < len(first)
        return cls(tuple(f"{n} #{i}" if twice else n for i, n in enumerate(first)), each)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the host of a rank, and which of its ranks it is."""
        return divmod(rank, self.per_host)


def _where(hosts: Sequence[str]) -> str:
    ranks = {host: [r for r, h in enumerate(hosts) if h == host] for host in hosts}
    return "; ".join(f"{_ranges(there)} on {host}" for host, there in ranks.items())


def _ranges(ranks: Sequence[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"{first}..{last}"
    return ", ".join(map(str, ranks))
