"""tools/rail_bench.py: what a fabric gives between equal ranks of the hosts, by the size of a message."""

from __future__ import annotations

import argparse
import time

import torch

from bench.hosts.model import Fabric
from bench.ranks import Rank
from bench.tables import header
from megamoe.backends.rail import all_to_all
from megamoe.group.group import Group
from megamoe.group.hosts import Hosts, host_name
from megamoe.group.links import Links

WARM_UP = 3
HEAD = "     KB        us     GB/s  model us  model GB/s"


def exchanged_us(links: Links, num_bytes: int, device: torch.device, repeats: int) -> float:
    """Return us of an exchange in which a rank sends as many bytes to each other host: the mean of repeats."""
    hosts, exchange = links.rail.size, all_to_all(links.rail.process_group)
    rows = torch.zeros(num_bytes * (hosts - 1), 1, dtype=torch.uint8, device=device)
    sizes = [0 if host == links.rail.rank else num_bytes for host in range(hosts)]

    def run(times: int) -> float:
        links.group.barrier()
        start = time.perf_counter()
        for _ in range(times):
            exchange(rows, sizes, sizes)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / times * 1e6

    run(WARM_UP)
    return run(repeats)


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Measure on one rank; all rails work at the same time, as in a layer. The slowest rank counts."""
    hosts = Hosts.of(me.gather(host_name()))
    if len(hosts.names) < 2:
        me.print(
            f"all ranks are on {hosts.names[0]}: start them on several hosts, or --fake-hosts N"
        )
        return 2
    links, fabric = (
        Links.of(Group.of(me.group), hosts),
        Fabric(gb_s=args.gb_s, latency_us=args.latency_us),
    )
    me.print(header())
    me.print(
        f"# {len(hosts.names)} hosts of {hosts.per_host}; KB from a rank to each other host, GB/s of a rank"
    )
    me.print(HEAD)
    for kb in args.kb:
        sent = kb * 1024 * (len(hosts.names) - 1)
        us = max(me.gather(exchanged_us(links, kb * 1024, me.device, args.repeats)))
        model = fabric.wire_us(sent)
        me.print(f"{kb:7}{us:10.1f}{sent / us / 1e3:9.2f}{model:10.1f}{sent / model / 1e3:12.2f}")
    return 0
