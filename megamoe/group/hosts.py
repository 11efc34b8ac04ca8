"""Which host a rank is on: GPUs of several hosts share no memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from megamoe.core import env


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
