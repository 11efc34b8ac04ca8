#!/usr/bin/env python3
"""Train a Qwen3-MoE of Hugging Face transformers with megamoe's experts and with transformers' own, and compare.

    python tools/train_hf.py                       spawns its ranks: every GPU, or one on a CPU
    torchrun --nproc-per-node 4 tools/train_hf.py  the same, started by torchrun
    python tools/train_hf.py --curves curves.png --generate 400
    python tools/train_hf.py --cases bf16 fp8-e4m3 --seeds 1 2 3 --curves cases.csv
    python tools/train_hf.py --wide --curves wide.csv

The model is built from a configuration: 107 M parameters on GPUs, tiny on a CPU. Both runs begin with the same weights
and read the text of tools/train_step.py. It prints tokens per second, peak memory and losses of both. Whole curves
diverge by chance, because training amplifies the order of sums. So the check compares single steps along the run: both
models take the run's parameters and the same routes, and loss and gradients must be equal. Several --seeds show how far
final losses are apart in the mean. --cases trains nothing but whole curves; tools/demo_curves.py joins their CSVs.

--wide trains a model of Qwen3-30B's width with transformers' experts and ours in BF16 and FP8. It prints tokens per
second, peak memory, losses and the parts of a step, and judges nothing.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from command import parser_of

from bench.hf.cases import add_wide_arguments
from bench.ranks import add_backend_argument, add_launch_arguments, launch


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add("--compare", metavar="NAME", help="experts_implementation; grouped_mm on GPUs, or eager")
    add("--steps", type=int, help="training steps; default 300 on GPUs, 60 on a CPU")
    add(
        "--seeds", type=int, nargs="+", default=[1], help="seeds of runs that are compared in pairs"
    )
    add("--curves", type=Path, metavar="PNG", help="picture of the losses of both runs, with a CSV")
    add(
        "--generate",
        type=int,
        default=0,
        metavar="N",
        help="generate N bytes of text with the trained model",
    )
    add(
        "--loss-tolerance",
        type=float,
        default=5e-3,
        help="largest allowed difference in nats between losses of one step, which both models take "
        "from equal parameters; final losses are printed and not judged",
    )
    add(
        "--gradient-tolerance",
        type=float,
        default=0.05,
        help="largest allowed norm of the difference, relative to the norm",
    )
    add_wide_arguments(parser)
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.generate < 0:
        parser.error(f"--generate {args.generate}, expected a number of bytes")
    if find_spec("transformers") is None:
        parser.error('transformers are missing: pip install "megamoe[hf]"')
    if args.ranks is None and (args.cpu or not torch.cuda.is_available()):
        args.ranks = 1
    from bench.hf import run, wide  # which need transformers, and take long to import

    return launch(wide.worker if args.wide else run.worker, args)


if __name__ == "__main__":
    sys.exit(main())
