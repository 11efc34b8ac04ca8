#!/usr/bin/env python3
"""Time megamoe.ops against the same made of torch's grouped_mm and elementwise operations. Needs a Hopper GPU.

    python tools/ops_bench.py                                  the family, and GPT-OSS-120B
    python tools/ops_bench.py --only swiglu dswiglu --k 4096
    python tools/ops_bench.py --only gpt-oss --experts 32
    python tools/ops_bench.py --only wgrad-dsv3 wgrad-flash wgrad-qwen3-235b wgrad-qwen3-30b --name wgrad

Family: --experts-of-family experts of --rows rows each, K, and N columns of the fused GEMM, of which gated ones make
N / 2 of h. swiglu, geglu, srelu: h and saved pre-activations; dswiglu, dgeglu, dsrelu: dy [rows, K] times w2, then the
gradient in the pre-activations, and h. wgrad: a^T b alone. channel: x w^T in e4m3 by token and channel, beside torch's
_scaled_grouped_mm. wgrad-MODEL: dw13 and dw2 of a quarter of a model's experts, made in bf16 and added (+=) to fp32.
gpt-oss: one MLP of experts (H = I = 2880, top 4) over --tokens tokens whose rows are sorted already: forward, and
forward + backward with all gradients; --no-bias leaves the biases out, whose gradients are dear in torch. Torch's
elementwise operations are one kernel with --compile, else one each.

Method, as tools/latency_sweep.py: CUDA events around one call, median of --samples; cool: before each the L2 is flushed
(256 MB) and the GPU spins until the host has queued the call; hot: back to back. Contenders take turns. --clock also
prints the SM clock that nvidia-smi reports behind each. Writes a CSV into --out.
"""

import sys
from pathlib import Path

import torch
from command import parser_of

from bench.ops import CASES, run
from bench.timing import MODES


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=[n for names in CASES for n in names], metavar="CASE",
        help="cases to run, of " + ", ".join(n for names in CASES for n in names))  # fmt: skip
    add("--experts-of-family", type=int, default=8)
    add("--rows", type=int, default=4096, help="rows per expert of the family")
    add("--k", type=int, default=8192)
    add("--n", type=int, default=4096)
    add("--experts", type=int, default=128, help="of gpt-oss")
    add("--tokens", type=int, default=24576, help="of gpt-oss")
    add("--size", type=int, default=2880, help="H and I of gpt-oss")
    add("--no-bias", action="store_true", help="run gpt-oss without biases")
    add(
        "--compile",
        action="store_true",
        help="compile torch's elementwise operations with inductor",
    )
    add("--mode", default="both", choices=(*MODES, "both"))
    add("--samples", type=int, default=20)
    add("--clock", action="store_true")
    add("--out", type=Path, default=Path("out"), help="folder for the CSV")
    add("--name", default="ops", help="name of the CSV")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("needs a Hopper GPU")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
