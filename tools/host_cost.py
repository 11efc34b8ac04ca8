#!/usr/bin/env python3
"""Time what the host does in one call of the layer: through the module, Layer, the operator and the backend.

    python tools/host_cost.py --check              on one Hopper GPU: the kernel; exit code 1 above the limits
    python tools/host_cost.py --captured --check   on one Hopper GPU: the gap between kernels of a captured loop
    python tools/host_cost.py                      elsewhere: a backend that does nothing, for the front end's share

Method: one rank, few tokens. A sample is the mean of 50 calls back to back; the queue is emptied outside of the timed
region. Reported are the lowest and the median sample. grad: the forward of a call whose gradients are recorded. torch:
a copy of x, to show how fast the host is. --captured: a graph of CHAIN launches of two layers in turn; each takes the
previous y as its x. Measured by the GPU's clock is the time from the end of the second-last launch's last CTA to the
start of the last launch's first: the median of the replays, with and without programmatic dependent launch. The GPU
spins while the host queues a replay.
"""

import sys

import torch
from command import parser_of

from bench.host_cost import GRAD_LIMITS, LIMITS, run
from bench.shapes import add_shape_arguments


def main() -> int:
    parser = parser_of(__doc__)
    on_gpu = torch.cuda.is_available()
    add_shape_arguments(parser, "qwen3-30b" if on_gpu else "tiny")
    parser.add_argument("--precision", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--backend", default="mega" if on_gpu else "nothing")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument(
        "--check", action="store_true", help=f"hold {LIMITS} us, with gradients {GRAD_LIMITS}"
    )
    parser.add_argument("--captured", action="store_true", help="time between launches of a graph")
    args = parser.parse_args()
    if args.captured and args.backend != "mega":
        parser.error("--captured measures the kernel: it needs a Hopper GPU and --backend mega")
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
