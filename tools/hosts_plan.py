#!/usr/bin/env python3
"""Predict a layer over several hosts, and whether it is worth it: a model of the wire around launches of one host.

    python tools/hosts_plan.py --shape dsv3 qwen3-235b --precision fp8 --hosts 2 4 8
    python tools/hosts_plan.py --shape dsv3 --precision fp8 --sweep out/latency.csv --gb-s 40       launches measured
    python tools/hosts_plan.py --spin --shape qwen3-30b --precision bf16 --hosts 2 --tokens 8192     one GPU, measured

--sweep takes launches from tools/latency_sweep.py, made on one GPU with the experts of one rank (--local-experts-of,
--reserve-sms 8). --gb-s and --latency-us are what tools/rail_bench.py finds between your hosts. --groups 8 4 is
DeepSeek's limit: a token's experts are in 4 of 8 groups.

--spin runs the backend over hosts in this process: the kernel with one rank's experts, and in place of a network an
engine that spins on the communication stream for as long as bytes would take, and mirrors rows. It prints the layer's
time beside the wire's, the launches', the host's, with static that of a graph's replay, and the model's. On a CPU it
runs the reference, to try the tool.
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
    add("--per-host", type=at_least(1), default=Fabric.per_host, help="GPUs, each with a link")
    add(
        "--gb-s",
        type=at_least(1e-3, float),
        default=Fabric.gb_s,
        help="of a rank's link, in each direction",
    )
    add("--latency-us", type=at_least(0, float), default=Fabric.latency_us, help="of one exchange")
    add(
        "--hbm-gb-s",
        type=at_least(1e-3, float),
        default=Fabric.hbm_gb_s,
        help="of the GPUs' memory",
    )
    add("--host-us", type=float, default=Fabric.host_us, help="by which exact takes longer")
    add(
        "--groups",
        nargs=2,
        type=at_least(1),
        metavar=("OF", "TAKEN"),
        help="that routing is limited to",
    )
    add("--sweep", type=Path, help="a CSV with launches that were measured")
    add("--plot", type=Path, help="a picture to write")
    add("--spin", action="store_true", help="measure on this machine with a wire that spins")
    add("--chunks", type=int, help="--spin: parts of a call; default: by the layer's sizes")
    add("--exchange", nargs="+", default=["exact"], choices=EXCHANGES, help="--spin: rows' way")
    add("--reserve-sms", type=int, help="--spin: SMs left to the wire; default: 8")
    add("--out", type=Path, help="--spin: a CSV to write")
    add("--cpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sweep is not None and not args.sweep.exists():
        parser.error(f"--sweep {args.sweep}: no such file")
    return spin.run(args) if args.spin else plan.run(args)


if __name__ == "__main__":
    sys.exit(main())
