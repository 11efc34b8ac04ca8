#!/usr/bin/env python3
"""Measure the network between equal ranks of the hosts, before you run a layer over it.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:PORT tools/rail_bench.py        on both hosts
    python tools/rail_bench.py --cpu --ranks 4 --fake-hosts 2 --kb 16 256              on one host, to try the tool

All rails exchange at the same time, as in a layer: each rank sends --kb to its equal rank of each other host, by
all_to_all over its own process group. The table also shows what tools/hosts_plan.py assumes; pass the measured values
to that tool as --gb-s and --latency-us. docs/hosts.md lists the variables of NCCL to try.
"""

import sys

from command import parser_of

from bench.hosts.model import Fabric
from bench.hosts.rail import worker
from bench.ranks import add_launch_arguments, launch


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_launch_arguments(parser)
    add("--kb", type=int, nargs="+", default=[1, 16, 256, 1024, 4096, 16384, 65536])
    add("--repeats", type=int, default=20)
    add(
        "--gb-s",
        type=float,
        default=Fabric.gb_s,
        help="bandwidth of a rank's link in the model, GB/s",
    )
    add(
        "--latency-us",
        type=float,
        default=Fabric.latency_us,
        help="latency of one exchange in the model, us",
    )
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
