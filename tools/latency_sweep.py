#!/usr/bin/env python3
"""Time one layer over token counts and shapes, interleaved with a baseline, and compare with the hardware's limits.

    python tools/latency_sweep.py --shape dsv3 flash --tokens 8 128 1024 8192 --precision fp8 --baseline staged
    python tools/latency_sweep.py --shape tiny --backend staged --tokens 8 64          on a CPU, to try the tool

Method: CUDA events around one call; median of 20; then the maximum over ranks. cool: before every sample the L2 is
flushed (a 256 MB memset), the device idles until all ranks have arrived and spins until every host has queued the call,
and a one-element all-reduce aligns the ranks on the stream, so no rank starts late because of its host. clean: cool,
but the flush leaves no dirty lines. hot: calls back to back for half a second, then 20 timed calls without flush or
gap, as in training. Backends alternate within one run.
Baselines are BF16; gemms, the GEMMs of a layer alone, in FP8 forward by token and channel.

--direction backward times the backend's backward launch with all gradients; the forward that saved its state is not
timed. step times both and, with FP8, the quantization of the weights, which is also timed alone. If a backend has no
backward pass of its own, the layer is differentiated by torch.

TFLOPS = 2 * T * K * 3 * H * I per rank, twice that in backward. Utilization compares forward's TFLOPS with the tensor
cores at the clock that the kernel measured (--clock): SMs * 8192 (FP8) or 4096 (BF16) operations per cycle. Writes a
CSV and a PNG into --out.
"""

import argparse
import sys
from pathlib import Path

from command import parser_of

from bench.dram import CHILD
from bench.layers import DIRECTIONS
from bench.ranks import add_backend_argument, add_launch_arguments, launch
from bench.shapes import add_shape_arguments, refuse_training
from bench.sweep import ITSELF, ROUTINGS, reserve, worker
from bench.timing import MODES
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_backend_argument(parser)
    add("--baseline", nargs="+", default=[], choices=("staged", "autograd", "gemms", ITSELF),
        help="alternate with the backend; autograd: staged without recomputation")  # fmt: skip
    add("--direction", default="forward", choices=DIRECTIONS, help="train: saves its state")
    add("--quantized-x", action="store_true", help="also forward of an x in e4m3")
    add("--main-grad", action="store_true", help="also add gradients to fp32 tensors")
    add("--frozen", action="store_true", help="backward: without gradients of weights")
    add("--passes", nargs="+", type=int, default=[], metavar="G",
        help="also compute weight gradients of G passes in one launch; us are per pass")  # fmt: skip
    add("--weight-gradients", nargs="+", default=[None], choices=("bf16", "e4m3"),
        help="operands of weight gradients in FP8; several alternate")  # fmt: skip
    add("--layer", action="store_true", help="time the layer through autograd, not the launches")
    add("--reserve-sms", nargs="+", default=["default"], type=reserve, metavar="N|default",
        help="SMs left to other kernels; several alternate. default: as in a training layer")  # fmt: skip
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b", local=True)
    add("--tokens", type=int, nargs="+", help="per rank",
        default=[8, 64, 128, 256, 512, 1024, 2048, 8192])  # fmt: skip
    add("--routing", nargs="+", default=["uniform"], choices=ROUTINGS,
        help="distribution of tokens over experts, see megamoe.testing.make_routing")  # fmt: skip
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--mode", default="cool", choices=(*MODES, "both"))
    add("--clock", action="store_true", help="time the variant with timestamps: clock, utilisation")
    add(
        "--dram", action="store_true", help="also measure DRAM reads of a call, by ncu, on one rank"
    )
    add(CHILD, action="store_true", help=argparse.SUPPRESS)
    add("--samples", type=int, default=20)
    add("--out", type=Path, default=Path("out"), help="folder for CSV and PNG")
    add("--name", default="latency", help="name of both files")
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
