#!/usr/bin/env python3
"""Train a Qwen3-MoE of Hugging Face transformers with megamoe's experts and with transformers' own; compare.

    python tools/train_hf.py                       spawns its ranks: every GPU, or one on a CPU
    torchrun --nproc-per-node 4 tools/train_hf.py  the same, started by torchrun
    python tools/train_hf.py --curves curves.png --generate 400

The model is made from a configuration: 107 M parameters on GPUs, tiny on a CPU. Both runs begin with the same weights
and read the text of tools/train_step.py. Printed are tokens per second, peak memory and losses of both. Whole curves
part by chance, as training amplifies the order of sums; judged are single steps along the run, which both models take
from the run's parameters by the same routes: loss and gradients have to be equal.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from command import parser_of

from bench.ranks import add_launch_arguments, launch


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "staged", "mega", "emulate", "reference"))
    add("--compare", metavar="NAME", help="experts_implementation; grouped_mm on GPUs, or eager")
    add("--steps", type=int, help="training steps; default 300 on GPUs, 60 on a CPU")
    add("--seed", type=int, default=1)
    add("--curves", type=Path, metavar="PNG", help="draw the losses of both runs; a CSV beside it")
    add("--generate", type=int, default=0, metavar="N", help="N bytes of text by the trained model")
    add("--loss-tolerance", type=float, default=5e-3, help="largest difference of losses, nats")
    add("--gradient-tolerance", type=float, default=0.05, help="difference's norm over the norm")
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.generate < 0:
        parser.error(f"--generate {args.generate}, expected a number of bytes")
    if find_spec("transformers") is None:
        parser.error('transformers are missing: pip install "megamoe[hf]"')
    if args.ranks is None and (args.cpu or not torch.cuda.is_available()):
        args.ranks = 1
    from bench.hf.run import worker  # which needs transformers, and takes long to import

    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
