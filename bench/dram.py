"""Bytes that calls read from DRAM, by ncu: the sweep's --dram.

The command runs once more below ncu, where each contender is called once, behind a kernel that marks its beginning.
"""

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import repeat

import torch

from bench.timing import Contender

METRIC = "dram__bytes_read.sum"
MARK = "spin_kernel"  # torch.cuda._sleep
CHILD = "--below-ncu"
COMMAND = (
    *("ncu", "--target-processes", "all", "--profile-from-start", "off", "--clock-control", "none"),
    *("--cache-control", "none", "--csv", "--print-units", "base", "--metrics", METRIC),
)


def call_below_ncu(contenders: Sequence[Contender]) -> None:
    """Call each once, where ncu looks."""
    for contender in contenders:
        before = contender.before()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1000)
        contender.timed(before)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def alone() -> dict[str, str]:
    """Return this process's environment without what makes it a rank: the command below ncu spawns its own."""
    of_ranks = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    return {name: value for name, value in os.environ.items() if name not in of_ranks}


def parse(text: str) -> list[float]:
    """ncu's output -> GB of the kernels behind each mark."""
    table = "\n".join(line for line in text.splitlines() if line.startswith('"'))
    found: list[float] = []
    for row in csv.DictReader(io.StringIO(table)):
        if MARK in row["Kernel Name"]:
            found.append(0.0)
        elif found:
            found[-1] += float(row["Metric Value"].replace(",", "")) / 1e9
    return found


def read_gb(ranks: int) -> Iterator[float | None]:
    """Return GB of every contender of this command, in the order of measurement; None for ever without ncu."""
    if shutil.which(COMMAND[0]) is None or not torch.cuda.is_available():
        print("--dram: no ncu, or no GPU: the column is empty", flush=True)
        return repeat(None)
    if ranks != 1:
        raise SystemExit(
            "--dram: ncu replays no launch that waits for another rank; expected --ranks 1"
        )
    done = subprocess.run(
        [*COMMAND, sys.executable, *sys.argv, CHILD], capture_output=True, text=True, env=alone()
    )
    found = parse(done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"--dram: ncu failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return iter(found)
