#!/usr/bin/env python3
"""Time a layer with a shared expert beside it and inside it (megamoe.SharedExperts), forward, and compare their y.

    python tools/shared_experts.py --shape dsv3 --precision fp8 --tokens 8 64 512 8192           on all GPUs
    python tools/shared_experts.py --shape qwen3-30b --shared 3072

beside is the routed layer, then the shared expert in one stream: by torch in bf16, and by a layer of its own with one
expert, in the precision given. inside is one launch. Cool, aligned, in turns, as tools/latency_sweep.py does it; the
largest of the ranks' medians. Exit code 1 when the ways disagree by more than roundings explain.
"""

import sys

from command import parser_of

from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments
from bench.shared_experts import worker


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate"))
    add("--tokens", type=int, nargs="+", default=[8, 64, 512, 8192])
    add("--precision", default="bf16", choices=["bf16", "fp8"])
    add("--shared", type=int, help="intermediate of the shared expert; default: one expert's")
    add("--samples", type=int, default=20)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="dsv3")
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
