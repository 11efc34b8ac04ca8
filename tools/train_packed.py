#!/usr/bin/env python3
"""Train and run GPT-OSS-120B with frozen MXFP4 experts on one GPU, through transformers and PEFT.

    python tools/train_packed.py --steps 50 --generate 1 8 64 --curves out/packed.csv
    python tools/train_packed.py --steps 20 --experts 8 --checkpointing
    python tools/train_packed.py --layers 4 --cases packed bf16 own --steps 20
    python tools/train_packed.py --cpu                        a tiny model

Weights are drawn at random where they stay: packed ones as bytes and scales, without a dense copy. PEFT's LoRA of
attention and routers is trained, and norms and head; without peft, routers, norms and head. It prints tokens per
second, peak memory and losses, and tokens per second of generation, one CUDA graph for each batch.

Cases: packed, packed-fp8 (x and h in e4m3); bf16, the same shape in dense experts by megamoe, and own, by transformers.
Dense experts of 36 layers take 229 GB, so give these fewer --layers.
"""

import sys
from pathlib import Path

from command import at_least, parser_of

from bench.hf.cases import PACKED
from bench.ranks import add_backend_argument, add_launch_arguments, launch


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add("--cases", nargs="+", choices=PACKED, default=["packed"], help="default: packed")
    add("--layers", type=at_least(1), help="default: 36, on a CPU 2")
    add("--steps", type=at_least(0), default=8, help="training steps, with three to warm up")
    add("--tokens", type=at_least(2), help="of a step; default: 4096, on a CPU 64")
    add("--sequences", type=at_least(1), default=1, help="that the tokens are cut into")
    add("--attention", default="eager", help="attn_implementation: eager or flex_attention")
    add("--experts", type=at_least(1), metavar="RANK", help="LoRA on the experts, too; needs peft")
    add("--checkpointing", action="store_true", help="recompute layers in backward")
    add("--generate", type=at_least(1), nargs="*", default=[], metavar="B", help="batches")
    add("--length", type=at_least(4), default=96, help="tokens of a generated text, at most 128")
    add("--profile", action="store_true", help="on a GPU, also the longest kernels of a step")
    add("--curves", type=Path, metavar="CSV", help="figures, with losses in NAME-steps.csv")
    add_launch_arguments(parser)
    args = parser.parse_args()
    if args.length > 128:
        parser.error(f"--length {args.length}, expected at most 128, the window of GPT-OSS")
    args.ranks = args.ranks or 1
    from bench.hf import packed  # which needs transformers

    return launch(packed.worker, args)


if __name__ == "__main__":
    sys.exit(main())
