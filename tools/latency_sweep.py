#!/usr/bin/env python3
"""Time one layer over token counts and shapes, interleaved with a baseline, beside the hardware's floors.

    python tools/latency_sweep.py --shape dsv3 flash --tokens 8 128 1024 8192 --precision fp8 --baseline staged
    python tools/latency_sweep.py --shape tiny --backend staged --tokens 8 64          on a CPU, to try the tool

Method: CUDA events around one call; median of 20; then the maximum over ranks. cool: before every sample the L2 is
flushed (a 256 MB memset), the device idles until all ranks are there, spins until every host has queued the call, and
the ranks are aligned on the stream by a one-element all-reduce: so no rank starts late because its host did. hot: calls
back to back for half a second first, then 20 timed ones without flush or gap, as in training. Backends take turns
inside the same run. Baselines are BF16; gemms, a layer's GEMMs alone, in FP8 forward by token and channel.

--direction backward times the backend's backward launch, all gradients, from a state that a forward has left before,
outside of what is timed; step times both, and with FP8 the quantization of the weights, which is also timed by itself.
A backend without a backward pass of its own is differentiated by torch, as a layer.

TFLOPS = 2 * T * K * 3 * H * I a rank, twice that in backward. Utilisation relates forward's to the tensor cores at the
clock that the kernel itself measured (--clock): SMs * 8192 (FP8) or 4096 (BF16) operations a cycle. Writes a CSV and a
PNG into --out.
"""

import argparse
import sys
from pathlib import Path

from command import parser_of

from bench.dram import CHILD
from bench.layers import DIRECTIONS
from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments, refuse_training
from bench.sweep import ROUTINGS, reserve, worker
from bench.timing import MODES
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add("--baseline", nargs="+", default=[], choices=("staged", "autograd", "gemms"),
        help="in turns with the backend; autograd: staged that recomputes nothing")  # fmt: skip
    add("--direction", default="forward", choices=DIRECTIONS, help="train: a forward that saves")
    add("--quantized-x", action="store_true", help="also forward of an x that comes in e4m3")
    add("--main-grad", action="store_true", help="also with gradients added to fp32 tensors")
    add("--passes", nargs="+", type=int, default=[], metavar="G",
        help="backward also with weight gradients of G passes in one launch; us are of one pass")  # fmt: skip
    add("--layer", action="store_true", help="time the layer through autograd, not the launches")
    add("--reserve-sms", nargs="+", default=["default"], type=reserve, metavar="N|default",
        help="SMs left to others; several take turns. default: as a layer that trains has it")  # fmt: skip
    add("--local-experts-of", type=int, metavar="R",
        help="experts of one of R ranks: for fewer GPUs than R")  # fmt: skip
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    add("--tokens", type=int, nargs="+", help="per rank",
        default=[8, 64, 128, 256, 512, 1024, 2048, 8192])  # fmt: skip
    add("--routing", nargs="+", default=["uniform"], choices=ROUTINGS,
        help="what experts tokens take; see megamoe.testing.make_routing")  # fmt: skip
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--mode", default="cool", choices=(*MODES, "both"))
    add("--clock", action="store_true", help="time the variant with timestamps: clock, utilisation")
    add("--dram", action="store_true", help="also what a call reads from DRAM, by ncu, on one rank")
    add(CHILD, action="store_true", help=argparse.SUPPRESS)
    add("--samples", type=int, default=20)
    add("--out", type=Path, default=Path("out"), help="folder of the CSV and the PNG")
    add("--name", default="latency", help="name of both files")
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
