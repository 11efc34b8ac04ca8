#!/usr/bin/env python3
"""Predict the time of a layer over several hosts with a model of the network around launches of one host.

    python tools/hosts_plan.py --shape dsv3 qwen3-235b --precision fp8 --hosts 2 4 8
    python tools/hosts_plan.py --shape dsv3 --precision fp8 --sweep out/latency.csv --gb-s 40       launches measured
    python tools/hosts_plan.py --spin --shape qwen3-30b --precision bf16 --hosts 2 --tokens 8192     one GPU, measured

--sweep reads launches that tools/latency_sweep.py measured on one GPU with the experts of one rank (--local-experts-of,
--reserve-sms 8). For --gb-s and --latency-us use the results of tools/rail_bench.py between your hosts. --groups 8 4 is
DeepSeek's limit: a token's experts are in 4 of 8 groups.

--spin runs the backend over hosts in this process: the kernel with one rank's experts and, instead of a network, a
kernel that spins on the communication stream as long as the transfer would take, and mirrors rows. It prints the times
of the layer, the network, the launches, the host and the model, with static also of a graph's replay. On a CPU it runs
the reference, to try the tool.
"""

import argparse
import sys
from pathlib import Path

from command import at_least, parser_of

from bench.hosts import plan, spin
from bench.hosts.model import Fabric
from bench.shapes import add_shape_arguments
from megamoe.backends.hosts.plan import EXCHANGES
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_shape_arguments(parser, "dsv3")
    add("--precision", nargs="+", default=["fp8"], choices=PRECISIONS)
    add("--hosts", nargs="+", type=at_least(2), default=[2, 4, 8])
    add("--tokens", nargs="+", type=at_least(1), default=[128, 1024, 8192], help="per rank")
    add("--per-host", type=at_least(1), default=Fabric.per_host, help="GPUs, each with its link")
    add(
        "--gb-s",
        type=at_least(1e-3, float),
        default=Fabric.gb_s,
        help="per rank's link and direction",
    )
    add("--latency-us", type=at_least(0, float), default=Fabric.latency_us, help="per exchange")
    add(
        "--hbm-gb-s",
        type=at_least(1e-3, float),
        default=Fabric.hbm_gb_s,
        help="of the GPUs' memory",
    )
    add("--host-us", type=float, default=Fabric.host_us, help="extra time of exact")
    add(
        "--groups",
        nargs=2,
        type=at_least(1),
        metavar=("OF", "TAKEN"),
        help="limit of routing",
    )
    add("--sweep", type=Path, help="CSV with measured launches")
    add("--plot", type=Path, metavar="PNG", help="picture to write")
    add("--spin", action="store_true", help="measure here, with a simulated network")
    add("--chunks", type=int, help="--spin: parts of a call; default: by the layer's sizes")
    add("--exchange", nargs="+", default=["exact"], choices=EXCHANGES, help="--spin: how rows go")
    add("--reserve-sms", type=int, help="--spin: SMs left to the network; default: 8")
    add("--out", type=Path, help="--spin: CSV to write")
    add("--cpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sweep is not None and not args.sweep.exists():
        parser.error(f"--sweep {args.sweep}: no such file")
    return spin.run(args) if args.spin else plan.run(args)


if __name__ == "__main__":
    sys.exit(main())
