#!/usr/bin/env python3
"""Time megamoe.ops next to the same made of torch's grouped_mm and compiled operations. Needs a Hopper GPU.

    python tools/ops_bench.py                                       all named sizes, and GPT-OSS-120B
    python tools/ops_bench.py --only swiglu fp8 --sizes 32768,8,8192,4096 16384,64,2048,1536
    python tools/ops_bench.py --only gpt-oss layer --experts 32
    python tools/ops_bench.py --only wgrad-dsv3 wgrad-flash wgrad-qwen3-235b wgrad-qwen3-30b --name wgrad
    python tools/ops_bench.py --device cpu --sizes 96,4,64,64 --eager --samples 2        to try the tool

Sizes: M,E,K,N: M rows of E experts, and N columns of the fused product, of which gated activations make N / 2 of h.
Named: family 32768,8,8192,4096; quickstart: 864 ragged rows of 8 experts, 2048,2048; torchao 32768,8,7168,2048.

Cases: product: with dgrad, wgrad. swiglu, geglu, srelu: h and saved pre-activations; d...: the gradient of
pre-activations, and h. fp8: by blocks: quantize; product and dgrad of e4m3; swiglu, which writes e4m3. channel: e4m3 by
token and channel. mlp: SwiGLU's MLP, forward and backward; fp8 mlp quantizes in each call. cute: the calls of
CuTe-MoE-Train's quick start. gpt-oss: the MLP of sorted rows (H = I = 2880, top 4) of --tokens tokens. layer: the same
from unsorted tokens, by the layer and by operators. wgrad-MODEL: dw13 and dw2 of a quarter of a model's experts, made
in bf16 and added (+=) to fp32.

Contenders: torch multiplies by grouped_mm, in FP8 by row and channel, and compiles the other operations (--eager does
not). product is our product alone. deepgemm multiplies by blocks where it is installed and experts have whole 128 rows.
The limit is the larger of the products' time (745 TFLOPS in BF16, 1300 in FP8) and that of operands and results, each
once (4.3 TB/s). A contender that raises is left out.

Method, as tools/latency_sweep.py: CUDA events around one call, median of --samples; cool: before each the L2 is flushed
(256 MB) and the GPU spins until the host has queued the call; hot: back to back. Contenders take turns. --clock also
prints the SM clock that nvidia-smi reports behind each. Writes a CSV and a PNG into --out.
"""

import sys
from pathlib import Path

import torch
from command import parser_of

from bench.ops import run
from bench.ops_cases import KINDS, MODELS
from bench.timing import MODES


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    kinds = [*KINDS, *MODELS]
    add("--only", nargs="+", choices=kinds, metavar="CASE", help="of " + ", ".join(kinds))
    add("--sizes", nargs="+", metavar="M,E,K,N", help="also family, quickstart, torchao")
    add("--experts", type=int, default=128, help="of gpt-oss and layer")
    add("--tokens", type=int, default=24576, help="of gpt-oss and layer")
    add("--size", type=int, default=2880, help="H and I of gpt-oss and layer")
    add("--no-bias", action="store_true", help="run gpt-oss without biases")
    add("--eager", action="store_true", help="do not compile torch's operations")
    add("--backend", default="auto", help="of layer")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--mode", default="both", choices=(*MODES, "both"))
    add("--samples", type=int, default=20)
    add("--seconds", type=float, default=3600, help="start no case after so many")
    add("--clock", action="store_true")
    add("--out", type=Path, default=Path("out"), help="folder for the CSV")
    add("--name", default="ops", help="name of the CSV")
    args = parser.parse_args()
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if args.device == "cuda" and not on_hopper:
        parser.error("needs a Hopper GPU")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
