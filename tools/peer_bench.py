#!/usr/bin/env python3
"""Time the layer and DeepGEMM's mega-MoE kernel for SM90 in turns, with the same e4m3 weights and x, and compare y.

    python tools/peer_bench.py --deepgemm PATH --shape qwen3-30b dsv3 --tokens 8 64 --ranks 1 --local-experts-of 4

PATH is a checkout of github.com/deepseek-ai/DeepGEMM, pull request 383 (bc4f33a), built in place. It compiles its
kernels in their first calls. Printed is a CSV with the experts that tokens touch, rank by rank. DeepGEMM: its two
launches alone; with copies: behind the copies of x, scales, ids and weights into its buffer, which each call needs.
Modes are those of tools/latency_sweep.py. Exit code 1 if the results differ by more than roundings explain.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.peer import worker
from bench.ranks import add_backend_argument, add_launch_arguments, launch
from bench.shapes import add_shape_arguments
from bench.timing import MODES


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--deepgemm", type=Path, required=True, metavar="PATH", help="a checkout, built")
    add_backend_argument(parser)
    add("--tokens", type=int, nargs="+", default=[8, 64], help="per rank")
    add("--mode", nargs="+", default=["cool"], choices=MODES)
    add("--samples", type=int, default=20)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b", local=True)
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
