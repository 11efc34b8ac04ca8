#!/usr/bin/env python3
"""Time one MoE block of another library with its own experts and with megamoe's, and compare what they compute.

    python tools/library_blocks.py --shape qwen3-30b --tokens 8192                      transformers, one GPU
    python tools/library_blocks.py --ranks 2 --precision bf16 fp8                       its experts over two GPUs
    python tools/library_blocks.py --library torchtitan --precision bf16 fp8               --ranks 2, too

A block is the library's own module, router and all, with parameters in bf16; ours are made by its adapter from the same
parameters. Timed are forward without gradients, and a step: forward and backward, gradients of x and all parameters.
Cool, aligned, in turns, as tools/latency_sweep.py does it; the largest of the ranks' medians. On several ranks, each
with --tokens of its own, experts are spread over them, the library's with its own all-to-all. Exit code 1 when y or a
gradient is further from the library's than BF16's or FP8's roundings explain.
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
