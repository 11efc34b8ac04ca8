#!/usr/bin/env python3
"""Check the layer on every rank against the fp32 oracle, stage by stage where the backend shows its stages.

    python tools/rank_check.py --backend staged --ranks 2                      small, anywhere
    python tools/rank_check.py --backend mega --shape dsv3 --tokens 8 1024 8192 --precision bf16 fp8
    python tools/rank_check.py --backend mega --random 200 --csv random.csv    random configurations, a row for each
    python tools/rank_check.py --backend mega --direction backward --shape dsv3    every gradient; step: both
    MEGAMOE_SHARE_GPUS=1 python tools/rank_check.py --backend mega --ranks 4   more ranks than GPUs, in time slices
    torchrun --nproc-per-node 4 tools/rank_check.py --backend mega             started by torchrun

Inputs and weights are drawn on the device from (seed, rank), so every rank can draw those of the others and needs no
communication to compute what it should have got. Large cases check a sample of tokens. Two oracles: one rounds where
the kernel does and gives the verdict on every stage; the other is fp32 throughout on the bf16 weights, and shows what
the roundings cost y, or a gradient. Exit code 1 on any failure.

Backward compares gradients of sampled tokens and experts, starting from the pre-activations that forward saved, where
the backend has a backward pass of its own; else torch's gradients of the layer, with fp32 alone.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.check.run import COLUMNS, worker
from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments, refuse_training
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.launch import panels
from megamoe.testing import OVERLOADED, ROUTINGS, SKEWED


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add("--direction", default="forward", choices=list(COLUMNS), help="step: both")
    add_shape_arguments(parser, default="tiny")
    add("--tokens", type=int, nargs="+", default=[64], help="tokens per rank")
    add("--precision", nargs="+", default=TRAINED, choices=PRECISIONS)
    add("--routing", nargs="+", default=["uniform"], choices=(*ROUTINGS, OVERLOADED, SKEWED))
    add("--int64-ids", action="store_true")
    add("--least-pool", action="store_true", help="the fewest pool rows: several passes")
    add("--random", type=int, default=0, metavar="N", help="N random configurations instead")
    add("--repeat", type=int, default=1, metavar="N", help="N calls must give the same bits")
    add("--fewer-sms", type=int, default=0, metavar="N",
        help="backward: a layer with N SMs reserved must give the same bits")  # fmt: skip
    add("--mean-rows", type=int, default=panels.MEAN_ROWS, metavar="N",
        help="rows of an expert above which MXFP4 weights are expanded in memory")  # fmt: skip
    add("--seed", type=int, default=0)
    add("--csv", type=Path, metavar="FILE", help="write a row for each configuration")
    add("--verbose", "-v", action="store_true", help="print good stages too")
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
