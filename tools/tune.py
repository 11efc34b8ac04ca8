#!/usr/bin/env python3
"""Measure the length of a step of the tile order that the kernel chooses by formula, next to every other choice.

    python tools/tune.py --shape dsv3 qwen3-30b --ranks 1 --local-experts-of 4 --precision fp8 bf16

Prints us per call for each number of blocks per step (`step_blocks` of MegaBackend, csrc/megamoe/schedule/order.h), the
best one, and how much slower the formula's choice is; writes OUT/NAME.csv. Samples are cool, aligned and alternate, as
in tools/latency_sweep.py.
"""

import sys
from pathlib import Path

import torch
from command import parser_of

from bench.layers import DIRECTIONS
from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments
from bench.tune import STEPS, worker
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    add("--local-experts-of", type=int, metavar="R", help="use the experts of one of R ranks")
    add("--direction", default="forward", choices=DIRECTIONS)
    add("--tokens", type=int, nargs="+", default=[8, 64, 512, 2048, 8192], help="tokens per rank")
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--steps", type=int, nargs="+", default=list(STEPS), help="blocks per step to try")
    add("--samples", type=int, default=10)
    add("--out", type=Path, default=Path("out"))
    add("--name", default="tune")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs Hopper GPUs: there is nothing to tune elsewhere")
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
