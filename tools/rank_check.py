#!/usr/bin/env python3
"""Compare the layer on every rank with the fp32 oracle, stage by stage if the backend exposes its stages.

    python tools/rank_check.py --backend staged --ranks 2                      small, anywhere
    python tools/rank_check.py --backend mega --shape dsv3 --tokens 8 1024 8192 --precision bf16 fp8
    python tools/rank_check.py --backend mega --random 200 --csv random.csv    random configurations, a row for each
    python tools/rank_check.py --backend mega --direction backward --shape dsv3    every gradient; step: both
    MEGAMOE_SHARE_GPUS=1 python tools/rank_check.py --backend mega --ranks 4   more ranks than GPUs, in time slices
    torchrun --nproc-per-node 4 tools/rank_check.py --backend mega             started by torchrun

Inputs and weights are drawn on the device from (seed, rank), so every rank can draw those of the others and computes
its expected results without communication. Large cases check a sample of tokens. There are two oracles. One rounds
where the kernel does and gives the verdict on every stage. The other is fp32 throughout on the bf16 weights, and shows
the rounding error of y or a gradient. Exit code 1 on any failure.

Backward compares gradients of sampled tokens and experts. If the backend has its own backward pass, the oracle starts
from the pre-activations that forward saved; else torch's gradients of the layer are compared with fp32 only.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.check.run import COLUMNS, worker
from bench.ranks import add_backend_argument, add_launch_arguments, launch
from bench.shapes import EXPERTS_TRAINED, add_shape_arguments, refuse_training
from megamoe.core.table import PRECISIONS
from megamoe.launch import panels
from megamoe.testing import OVERLOADED, ROUTINGS, SKEWED


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add(
        "--direction",
        default="forward",
        choices=list(COLUMNS),
        help="direction to check; step: both",
    )
    add_shape_arguments(parser, default="tiny")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens per rank")
    add("--precision", nargs="+", default=EXPERTS_TRAINED, choices=PRECISIONS)
    add("--routing", nargs="+", default=["uniform"], choices=(*ROUTINGS, OVERLOADED, SKEWED))
    add("--int64-ids", action="store_true")
    add("--weight-gradients", default="bf16", choices=("bf16", "e4m3"), help="operands, with FP8")
    add(
        "--least-pool",
        action="store_true",
        help="use the smallest pool, so that a call takes several passes",
    )
    add("--random", type=int, default=0, metavar="N", help="check N random configurations instead")
    add(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="also check that N calls give the same bits",
    )
    add("--fewer-sms", type=int, default=0, metavar="N",
        help="backward: also check that a layer with N reserved SMs gives the same bits")  # fmt: skip
    add("--mean-rows", type=int, default=panels.MEAN_ROWS, metavar="N",
        help="rows per expert above which MXFP4 weights are expanded in memory")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE", help="CSV to write, one row per configuration")
    add("--verbose", "-v", action="store_true", help="also print stages that are correct")
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
