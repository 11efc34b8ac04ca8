#!/usr/bin/env python3
"""Long runs, and runs in which something goes wrong, of the kernel on the GPUs of this machine.

    python tools/soak.py calls --calls 10000       back to back, changing routings and sizes: always the same bits
    python tools/soak.py graph --replays 1000      one CUDA graph, its inputs changed in place
    python tools/soak.py nccl --calls 1000         beside an NCCL loop, launched in opposite orders on the ranks
    python tools/soak.py kill                      SIGKILL for the last rank, between and during forward, backward
    python tools/soak.py late mismatch             a rank comes too late; ranks that differ; then a reset
    python tools/soak.py busy streams              others hold SMs; two streams, shared window, moving weights
    python tools/soak.py train --steps 2000        training steps, all drawn anew; the run twice: the same bits; in FP8
                                                   also with weight gradients in e4m3, quantized behind each step
    python tools/soak.py train_graph train_nccl    a captured step, replayed; training beside an NCCL loop
    python tools/soak.py train_faults              backward late, of another layer or microbatch, with a foreign state
    torchrun --nproc-per-node 4 tools/soak.py calls    (not kill: torchrun ends all ranks when one dies)

Prints one line a scenario, and the messages that a fault produced. Exit code 1 when a result was wrong, an error was
missing or unnamed, or the time given by --bound was over.
"""

import argparse
import sys

from command import parser_of

from bench.shapes import EXPERTS_TRAINED
from bench.soak.run import SCENARIOS, run
from bench.soak.training import FOLLOWS
from megamoe.core.table import PRECISIONS


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("scenario", nargs="+", choices=[*SCENARIOS, "kill"])
    add("--ranks", type=int, help="default: all GPUs")
    add(
        "--calls",
        type=int,
        help="number of calls: calls (10000), nccl (1000), streams (400), train_nccl (300)",
    )
    add("--replays", type=int, default=1000, help="number of replays: graph, train_graph")
    add("--steps", type=int, default=2000, help="number of steps: train")
    add("--precision", nargs="+", default=EXPERTS_TRAINED, choices=PRECISIONS)
    add(
        "--weight-gradients",
        nargs="+",
        default=[*FOLLOWS],
        choices=FOLLOWS,
        help="train, train_graph: default all",
    )
    add("--bound", type=float, default=300.0, metavar="S", help="longest time per scenario")
    for hidden in ("--as-rank", "--port"):
        add(hidden, type=int, help=argparse.SUPPRESS)
    add("--mode", help=argparse.SUPPRESS)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
