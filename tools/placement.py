#!/usr/bin/env python3
"""Time a layer with redundant experts (megamoe.PlacedLayer) next to one without, under even and skewed routing.

    python tools/placement.py --shape qwen3-235b --tokens 4096 --slots 8           on all GPUs

Each rank holds --slots slots more than without a placement, for the experts with the most tokens. Prints a CSV: us of a
forward pass (cool, in turns, the largest of the ranks' medians), and the routes of the fullest rank over the mean.
"""

import sys

from command import parser_of

from bench.placement import worker
from bench.ranks import add_backend_argument, add_launch_arguments, launch
from bench.shapes import add_shape_arguments


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add("--tokens", type=int, default=4096, help="per rank")
    add("--slots", type=int, default=8, help="redundant slots per rank")
    add("--precision", default="bf16", choices=["bf16", "fp8"])
    add("--samples", type=int, default=20)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-235b")
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
