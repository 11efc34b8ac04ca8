#!/usr/bin/env python3
"""Show one launch over time: what the roles of a CTA do, and the phases of all CTAs, from the kernel's own timestamps.

    python tools/timeline.py --shape dsv3 --tokens 64 --precision fp8                      on GPUs, by the kernel
    python tools/timeline.py --shape dsv3 --tokens 4096 --direction backward --cta 17
    python tools/timeline.py --shape dsv3 --tokens 8 --ranks 1 --local-experts-of 4 --samples 20   medians of 20
    python tools/timeline.py --backend emulate --shape tiny --tokens 64 --ranks 2          anywhere; virtual time
    python tools/timeline.py --marks out/timeline.csv                                      again, from what was recorded

Writes into --out: a CSV with the marks of every CTA of every rank in ns (csrc/megamoe/cta/profile.cuh), a Chrome trace
(JSON, for chrome://tracing or ui.perfetto.dev) and, if matplotlib is installed, a PNG. Prints when each mark is
reached, in us since the rank's first CTA began: the median and the latest CTA; and for a CTA's first tiles of each GEMM
the median of each of their marks. A mark varies by 1 to 3 us between launches. With several samples the CSV has all,
the printed values are medians, and the picture shows the launch with the median time.

The variant with timestamps runs after warm-up calls, with a cold L2. A mark is that of the last warp that makes it, and
of the last pass. Waits are sums over the launch: of load_a for rows and for h (backward: dgu), of one math thread for
filled slots. Clocks of different ranks are not compared.
"""

import sys
from pathlib import Path

import torch
from command import parser_of

from bench.ranks import add_launch_arguments, launch
from bench.shapes import add_shape_arguments, refuse_training
from bench.timeline import show, show_emulated, worker
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--backend", default="mega", choices=("mega", "emulate"))
    add("--direction", default="forward", choices=("forward", "backward"))
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b", local=True)
    add("--tokens", type=int, default=64, help="tokens per rank")
    add("--precision", default="bf16", choices=PRECISIONS)
    add(
        "--samples",
        type=int,
        default=1,
        help="number of launches; the emulator uses another order in each",
    )
    add("--cta", type=int, default=0, help="CTA whose roles are shown")
    add("--marks", type=Path, metavar="CSV", help="CSV to show; nothing is run")
    add("--out", type=Path, default=Path("out"))
    add("--name", default="timeline")
    args = parser.parse_args()
    if len(args.shape) != 1:
        parser.error(f"--shape {' '.join(args.shape)}: one shape at a time")
    if args.samples < 1:
        parser.error(f"--samples {args.samples}, expected at least 1")
    if args.direction == "backward":
        refuse_training(parser, [args.precision])
    if args.marks:
        return show(args.marks, args)
    if args.backend == "emulate":
        return show_emulated(args)
    if not torch.cuda.is_available():
        parser.error("--backend mega needs a GPU; --backend emulate, or --marks CSV, need none")
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
