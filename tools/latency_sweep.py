#!/usr/bin/env python3
"""Time one layer over token counts and shapes, interleaved with a baseline, beside the hardware's floors.

    python tools/latency_sweep.py --shape dsv3 flash --tokens 8 128 1024 8192 --precision fp8 --baseline staged
    python tools/latency_sweep.py --shape tiny --backend staged --tokens 8 64          on a CPU, to try the tool

Method: CUDA events around one call; median of 20; then the maximum over ranks. cool: before every sample the L2 is
flushed (a 256 MB memset), the device idles until all ranks are there, spins until every host has queued the call, and
the ranks are aligned on the stream by a one-element all-reduce: so no rank starts late because its host did. hot: calls
back to back for half a second first, then 20 timed ones without flush or gap, as in training. Backends take turns
inside the same run. The staged baseline is BF16 always: FP8 has no grouped matmul there.

TFLOPS = 2 * T * K * 3 * H * I a rank. Utilisation relates it to the tensor cores at the clock that the kernel itself
measured (--clock): SMs * 8192 (FP8) or 4096 (BF16) operations a cycle. Writes a CSV and a PNG into --out.
"""

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from common import Rank, add_launch_arguments, add_shape_arguments, header, launch, shapes_from
from sweep_plot import Measurement, plot

import megamoe
from megamoe.config import PRECISIONS
from megamoe.testing import make_inputs, make_weights
from megamoe.testing.shapes import Shape

# Limits of an H200 as measured (docs/measurements.md): what a perfect implementation could not beat.
GEMM_TFLOPS = {"fp8": 1300.0, "bf16": 745.0}
HBM_BYTES_PER_US = 4.3e6
NVLINK_BYTES_PER_US = 340e3
FLOPS_PER_SM_CLOCK = {"fp8": 8192, "bf16": 4096}
FLUSH_BYTES = 256 << 20
SPIN_CYCLES = 1_500_000  # about 0.8 ms: longer than any rank's host takes to queue what follows
HOT_SECONDS = 0.5


def floors(shape: Shape, precision: str, tokens: int, ranks: int) -> tuple[float, float, float]:
    """Return the least time in us that GEMMs, memory and links need, under uniform routing."""
    h, i, e, k = shape.hidden, shape.intermediate, shape.num_experts, shape.top_k
    stored = PRECISIONS[precision]
    gemm = shape.flops(tokens) / (GEMM_TFLOPS[precision] * 1e6)

    local = e / ranks
    rows = tokens * k
    hit = local * (1 - (1 - 1 / e) ** (tokens * ranks * k))  # experts that get a row at all
    weights = hit * 3 * h * i * stored.w.bytes
    # Written and read once each: the row pool, h and the bf16 rows of the second GEMM.
    memory = weights + 2 * rows * (h * stored.x.bytes + i * stored.h.bytes + h * 2)

    # A token crosses once for each other rank that holds one of its experts, and its partial comes back.
    misses = math.prod((e - local - n) / (e - n) for n in range(k)) if e - local >= k else 0.0
    crossings = tokens * (ranks - 1) * (1 - misses)
    link = crossings * (h * stored.x.bytes + h * 2)
    return gemm, memory / HBM_BYTES_PER_US, link / NVLINK_BYTES_PER_US


class Timer:
    """Times calls on one rank; all methods are collective."""

    def __init__(self, me: Rank, samples: int) -> None:
        self.device, self.samples = me.device, samples
        self.on_gpu = me.device.type == "cuda"
        self.flag = torch.zeros(1, device=me.device)
        self.flush = torch.empty(
            FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=me.device
        )

    def _call(self, call: Callable[[], object]) -> Callable[[], float]:
        """Run once; the result gives the time in us when asked after a synchronisation."""
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            taken = (time.perf_counter() - start) * 1e6
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        return lambda: begin.elapsed_time(end) * 1e3

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def cool(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median of each call in us on this rank; the calls take turns."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.samples):
            for name, call in calls.items():
                self._synchronize()
                dist.barrier()
                self.flush.zero_()
                if self.on_gpu:
                    torch.cuda._sleep(SPIN_CYCLES)
                dist.all_reduce(self.flag)
                read = self._call(call)
                self._synchronize()
                taken[name].append(read())
        return {name: statistics.median(times) for name, times in taken.items()}

    def hot(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the median of each call in us on this rank, back to back."""
        medians = {}
        for name, call in calls.items():
            self._synchronize()
            start = time.perf_counter()
            call()
            self._synchronize()
            # All ranks must make the same number of collective calls: the slowest decides.
            once = torch.tensor([time.perf_counter() - start], device=self.device)
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
            seconds = HOT_SECONDS if self.on_gpu else 0.0
            for _ in range(int(min(seconds / once.item(), 10_000))):
                call()
            dist.all_reduce(self.flag)
            reads = [self._call(call) for _ in range(self.samples)]
            self._synchronize()
            medians[name] = statistics.median(read() for read in reads)
        return medians


class Contender:
    """A backend under test with its own weights."""

    def __init__(
        self, name: str, shape: Shape, precision: str, most: int, me: Rank, profile: bool
    ) -> None:
        self.problem = megamoe.Problem(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            ep_size=me.size,
            rank=me.rank,
            max_tokens=most,
            precision=precision,
            activation=megamoe.activation_by_name(shape.activation),
            bias=shape.bias,
        )
        group = dist.group.WORLD if me.size > 1 else None
        options = {"profile": True} if profile else {}
        self.backend = megamoe.make_backend(name, self.problem, group, device=me.device, **options)
        self.weights = make_weights(self.problem, device=me.device)
        self.backend.prepare(self.weights)

    def call(self, tokens: int, device: torch.device) -> Callable[[], object]:
        """Return the call to time, after one that pays for first-call work."""
        x = make_inputs(self.problem, tokens, device=device, ids_dtype=torch.int32)
        arguments = (x.x, x.topk_ids, x.topk_weights, self.weights)
        self.backend.forward(*arguments)
        return lambda: self.backend.forward(*arguments)

    def clock_ghz(self) -> float | None:
        """Return the SM clock inside the last call, where the backend measures it."""
        if getattr(self.backend, "profile", None) is None:
            return None
        return self.backend.clock_ghz()


def worst(value: float, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def sweep(shape: Shape, precision: str, me: Rank, args: argparse.Namespace) -> list[Measurement]:
    """Measure one shape and precision over all token counts. Collective."""
    most = max(args.tokens)
    names = {args.backend: precision} | ({args.baseline: "bf16"} if args.baseline else {})
    contenders = {n: Contender(n, shape, p, most, me, args.clock) for n, p in names.items()}
    me.print(megamoe.memory_report(contenders[args.backend].problem)["line"])
    timer = Timer(me, args.samples)
    modes = ("cool", "hot") if args.mode == "both" else (args.mode,)
    sms = torch.cuda.get_device_properties(me.device).multi_processor_count if timer.on_gpu else 0
    found = []
    for tokens in args.tokens:
        calls = {name: c.call(tokens, me.device) for name, c in contenders.items()}
        for mode in modes:
            medians = getattr(timer, mode)(calls)
            for name, contender in contenders.items():
                us = worst(medians[name], me.device)
                tflops = shape.flops(tokens) / us / 1e6
                clock, used = contender.clock_ghz(), None
                if clock and sms:
                    peak = sms * FLOPS_PER_SM_CLOCK[contender.problem.precision] * clock / 1e3
                    used = tflops / peak
                limits = floors(shape, contender.problem.precision, tokens, me.size)
                entry = Measurement(
                    shape.name, contender.problem.precision, me.size, tokens, mode, name, us,
                    tflops, clock, used, *limits,
                )  # fmt: skip
                found.append(entry)
                me.print(line(entry))
    for contender in contenders.values():
        contender.backend.close()
    return found


COLUMNS = (
    f"{'shape':<14}{'prec':<6}{'mode':<6}{'backend':<10}{'T':>6}{'us':>10}{'TFLOPS':>9}{'GHz':>7}{'used':>7}"
    f"{'floor us: GEMM':>16}{'HBM':>8}{'NVLink':>8}{'over':>7}"
)


def line(m: Measurement) -> str:
    floor = max(m.gemm_floor_us, m.hbm_floor_us, m.nvlink_floor_us)
    clock = f"{m.clock_ghz:.2f}" if m.clock_ghz else "-"
    used = f"{m.utilisation:.0%}" if m.utilisation else "-"
    return (
        f"{m.shape:<14}{m.precision:<6}{m.mode:<6}{m.backend:<10}{m.tokens:>6}{m.us:>10.1f}{m.tflops:>9.1f}"
        f"{clock:>7}{used:>7}{m.gemm_floor_us:>16.1f}{m.hbm_floor_us:>8.1f}{m.nvlink_floor_us:>8.1f}"
        f"{m.us / floor:>7.2f}"
    )


def worker(me: Rank, args: argparse.Namespace) -> int:
    title = header()
    me.print(title)
    me.print(COLUMNS)
    found: list[Measurement] = []
    with torch.no_grad():
        for shape in shapes_from(args):
            for precision in args.precision:
                found += sweep(shape, precision, me, args)
                if me.device.type == "cuda":
                    torch.cuda.empty_cache()
    if me.is_first:
        args.out.mkdir(parents=True, exist_ok=True)
        table = args.out / f"{args.name}.csv"
        with table.open("w", newline="") as file:
            file.write(title + "\n")
            writer = csv.DictWriter(file, list(asdict(found[0])))
            writer.writeheader()
            writer.writerows(asdict(m) for m in found)
        picture = table.with_suffix(".png")
        drawn = plot(found, title, picture)
        print(
            f"wrote {table}" + (f" and {picture}" if drawn else "; no picture without matplotlib")
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add("--baseline", choices=("staged",), help="measured in turns with the backend")
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    add("--tokens", type=int, nargs="+", default=[8, 64, 128, 256, 1024, 8192], help="per rank")
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--mode", default="cool", choices=("cool", "hot", "both"))
    add("--clock", action="store_true", help="time the variant with timestamps: clock, utilisation")
    add("--samples", type=int, default=20)
    add("--out", type=Path, default=Path("out"), help="folder of the CSV and the PNG")
    add("--name", default="latency", help="name of both files")
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
