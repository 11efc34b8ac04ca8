#!/usr/bin/env python3
"""Loss curves of the demo in several precisions, backends and FP8 recipes; on its own, draws CSVs again.

    python tools/demo_curves.py curves.csv            to curves.png
    python tools/demo_curves.py one.csv --seeds 1 2   trains BF16, FP8 and simulated recipes with these seeds
    python tools/demo_curves.py one.csv two.csv       compares runs of several CSVs: seeds may run side by side

Recipes are compared in pairs of one seed, by the mean of the last --window steps.
"""

import sys
from pathlib import Path

from command import at_least, parser_of

from bench.demo.curves import draw_again
from bench.demo.screen import CASES, worker
from bench.ranks import launch


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("csv", type=Path, nargs="+")
    add("--seeds", type=int, nargs="+", help="train with these seeds; the CSV is written")
    add("--cases", nargs="+", choices=CASES, help="default: all; on a CPU bf16 and simulated ones")
    add("--steps", type=at_least(1), help="default: 400 on a GPU, 300 on a CPU")
    add("--batch", type=at_least(1), help="sequences per step; default: 16 on a GPU, 32 on a CPU")
    add("--window", type=at_least(1), default=50, help="last steps whose mean is compared")
    add("--cpu", action="store_true", help="do not use GPUs")
    parser.set_defaults(ranks=1)
    args = parser.parse_args()
    if args.seeds is None:
        return draw_again(args)
    if len(args.csv) > 1:
        parser.error(f"{len(args.csv)} CSVs with --seeds, expected one to write")
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
