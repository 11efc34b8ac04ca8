#!/usr/bin/env python3
"""Time one MoE block of another library with its own experts and with megamoe's, and compare their results.

    python tools/library_blocks.py --shape qwen3-30b --tokens 8192                      transformers, one GPU
    python tools/library_blocks.py --ranks 2 --precision bf16 fp8                       its experts over two GPUs
    python tools/library_blocks.py --library torchtitan --precision bf16 fp8               --ranks 2, too

A block is the library's own module including its router, with bf16 parameters. The adapter builds ours from the same
parameters. Timed are forward without gradients, and a step: forward and backward with gradients of x and all
parameters. Samples are cool, aligned and alternate, as in tools/latency_sweep.py; reported is the largest of the ranks'
medians. On several ranks, each with its own --tokens, experts are distributed, the library's with its own all-to-all.
Exit code 1 if y or a gradient differs from the library's by more than the roundings of BF16 or FP8 explain.
"""

import sys

from command import parser_of

from bench.library_blocks import LIBRARIES, worker
from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--library", default="transformers", choices=LIBRARIES)
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate"))
    add("--tokens", type=int, default=8192)
    add("--precision", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    add("--samples", type=int, default=10)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    args = parser.parse_args()
    args.ranks = args.ranks or 1
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
