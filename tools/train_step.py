#!/usr/bin/env python3
"""Demo: train a small byte-level MoE language model with expert parallelism, and check it.

    python tools/train_step.py                       spawns its ranks: every GPU, or 2 on a CPU
    torchrun --nproc-per-node 4 tools/train_step.py  the same, started by torchrun
    python tools/train_step.py --curves curves.png   in BF16, FP8 and by staged: losses to a picture and a CSV

Attention and embeddings are data-parallel; the experts of every MegaMoE layer are distributed over the ranks. A second
model, on one rank or with another backend, must agree, because expert parallelism changes where results are computed,
not what. It is compared twice: along the run it repeats single steps from the run's parameters, which must give the
same loss and gradients; at the end it trains its own first steps, which must give the same losses.
"""

import sys
from pathlib import Path

from command import parser_of

from bench.demo.step import worker
from bench.ranks import add_backend_argument, add_launch_arguments, launch
from bench.shapes import EXPERTS_TRAINED


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add("--precision", default="bf16", choices=EXPERTS_TRAINED)
    add("--steps", type=int, help="training steps; default 400 on GPUs, 300 on a CPU")
    add("--batch", type=int, help="sequences per step over all ranks")
    add("--seed", type=int, default=1)
    add(
        "--target",
        type=float,
        default=2.5,
        help="upper limit of the final loss, in nats per byte",
    )
    add(
        "--curves",
        type=Path,
        metavar="PNG",
        help="draw and compare whole runs instead of single steps",
    )
    add("--seeds", type=int, nargs="+", help="seeds for --curves, which then compares their mean")
    add("--compare", default="auto", choices=("auto", "one-rank", "staged", "none"))
    add(
        "--compare-steps",
        type=int,
        help="steps that the second model trains itself; default: 25 on a CPU, else 1",
    )
    add(
        "--loss-tolerance",
        type=float,
        default=5e-3,
        help="largest allowed difference of losses, in nats",
    )
    add(
        "--norm-tolerance",
        type=float,
        default=0.05,
        help="largest allowed relative difference of gradient norms",
    )
    add(
        "--gradient-tolerance",
        type=float,
        default=0.05,
        help="largest allowed relative error of gradients from equal parameters",
    )
    add_launch_arguments(parser)
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
