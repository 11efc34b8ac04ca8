#!/usr/bin/env python3
"""Time a layer with a separate shared expert and with one inside of it (megamoe.SharedExperts), and compare their y.

    python tools/shared_experts.py --shape dsv3 --precision fp8 --tokens 8 64 512 8192           on all GPUs
    python tools/shared_experts.py --shape qwen3-30b --shared 3072

beside: the routed layer, then the shared expert in the same stream, by torch in bf16 and by a layer with one expert in
the given precision. inside: one launch. Samples are cool, aligned and alternate, as in tools/latency_sweep.py; reported
is the largest of the ranks' medians. Exit code 1 if the results differ by more than roundings explain.
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
    add("--shared", type=int, help="width of the shared expert; default: that of one routed expert")
    add("--samples", type=int, default=20)
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="dsv3")
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
