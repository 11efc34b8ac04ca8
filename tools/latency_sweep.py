#!/usr/bin/env python3
"""Time one layer over token counts and shapes, interleaved with a baseline, beside the hardware's floors.

    python tools/latency_sweep.py --shape dsv3 flash --tokens 8 128 1024 8192 --precision fp8 --baseline staged
    python tools/latency_sweep.py --shape tiny --backend staged --tokens 8 64          on a CPU, to try the tool

Method: CUDA events around one call; median of 20; then the maximum over ranks. cool: before every sample the L2 is
flushed (a 256 MB memset), the device idles until all ranks are there, spins until every host has queued the call, and
the ranks are aligned on the stream by a one-element all-reduce: so no rank starts late because its host did. hot: calls
back to back for half a second first, then 20 timed ones without flush or gap, as in training. Backends take turns
inside the same run. Baselines are BF16 always: FP8 has no grouped matmul there.

--direction backward times the backend's backward launch, all gradients, from a state that a forward has left before,
outside of what is timed; step times both, and with FP8 the quantization of the weights, which is also timed by itself.
A backend without a backward pass of its own is differentiated by torch, as a layer.

TFLOPS = 2 * T * K * 3 * H * I a rank, twice that in backward. Utilisation relates forward's to the tensor cores at the
clock that the kernel itself measured (--clock): SMs * 8192 (FP8) or 4096 (BF16) operations a cycle. Writes a CSV and a
PNG into --out.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Rank,
    add_launch_arguments,
    add_shape_arguments,
    header,
    launch,
    refuse_training,
    shapes_from,
)
from sweep_contenders import DIRECTIONS, E4M3_FORWARD, Call, Contender, Entry, problem_of
from sweep_plot import Measurement, plot

import megamoe
from megamoe.core.config import PRECISIONS
from megamoe.testing import make_weights
from megamoe.testing.shapes import Shape

FLOPS_PER_SM_CLOCK = {
    "fp8": 8192,
    "bf16": 4096,
    "fp8xmxfp4": 8192,
    "bf16xmxfp4": 4096,
    "bf16xnvfp4": 4096,
}
FLUSH_BYTES = 256 << 20
SPIN_CYCLES = 1_500_000  # about 0.8 ms: longer than any rank's host takes to queue what follows
HOT_SECONDS = 0.5


class Timer:
    """Times calls on one rank; all methods are collective."""

    def __init__(self, me: Rank, samples: int) -> None:
        self.device, self.samples = me.device, samples
        self.on_gpu = me.device.type == "cuda"
        self.flag = torch.zeros(1, device=me.device)
        self.flush = torch.empty(
            FLUSH_BYTES if self.on_gpu else 0, dtype=torch.uint8, device=me.device
        )

    def _call(self, call: Call, before: Any) -> Callable[[], float]:
        """Run once; the result gives the time in us when asked after a synchronisation."""
        if not self.on_gpu:
            start = time.perf_counter()
            call.timed(before)
            taken = (time.perf_counter() - start) * 1e6
            return lambda: taken
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call.timed(before)
        end.record()
        return lambda: begin.elapsed_time(end) * 1e3

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def cool(self, calls: dict[Entry, Call]) -> dict[Entry, float]:
        """Return the median of each call in us on this rank; the calls take turns."""
        taken: dict[Entry, list[float]] = {entry: [] for entry in calls}
        for _ in range(self.samples):
            for entry, call in calls.items():
                before = call.before()
                self._synchronize()
                dist.barrier()
                self.flush.zero_()
                if self.on_gpu:
                    torch.cuda._sleep(SPIN_CYCLES)
                dist.all_reduce(self.flag)
                read = self._call(call, before)
                del before  # a state, or a graph
                self._synchronize()
                taken[entry].append(read())
        return {entry: statistics.median(times) for entry, times in taken.items()}

    def hot(self, calls: dict[Entry, Call]) -> dict[Entry, float]:
        """Return the median of each call in us on this rank, back to back, with what comes before it in between."""
        medians = {}
        for entry, call in calls.items():
            self._synchronize()
            start = time.perf_counter()
            call.timed(call.before())
            self._synchronize()
            # All ranks must make the same number of collective calls: the slowest decides.
            once = torch.tensor([time.perf_counter() - start], device=self.device)
            dist.all_reduce(once, op=dist.ReduceOp.MAX)
            seconds = HOT_SECONDS if self.on_gpu else 0.0
            for _ in range(int(min(seconds / once.item(), 10_000))):
                call.timed(call.before())
            dist.all_reduce(self.flag)
            reads = [self._call(call, call.before()) for _ in range(self.samples)]
            self._synchronize()
            medians[entry] = statistics.median(read() for read in reads)
        return medians


def worst(value: float, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def entries(precision: str, args: argparse.Namespace) -> list[Entry]:
    """Return what takes turns: the backend in every way asked for, then the baselines."""
    gradients, direction = [None], args.direction
    if direction != "forward":
        gradients = ["bf16", "main_grad"] if args.main_grad else ["bf16"]
    reserves = [None if r == "default" else int(r) for r in args.reserve_sms]
    found = [
        Entry(args.backend, precision, direction, g, reserve, args.layer)
        for g in gradients
        for reserve in reserves
    ]
    if direction == "step" and PRECISIONS[precision].w.scaled:
        found.append(Entry(args.backend, precision, "quantize"))
    if args.quantized_x and direction == "forward" and PRECISIONS[precision].x.scaled:
        found.append(Entry(args.backend, precision, E4M3_FORWARD))
    of_baselines = gradients[0]
    return found + [Entry(name, "bf16", direction, of_baselines) for name in args.baseline]


def sweep(shape: Shape, precision: str, me: Rank, args: argparse.Namespace) -> list[Measurement]:
    """Measure one shape and precision over all token counts. Collective."""
    problem = problem_of(shape, max(args.tokens), me)
    masters = make_weights(problem, device=me.device, quantize=False)
    wanted = entries(precision, args)
    contenders = {e: Contender(e, problem, masters, me, args.clock) for e in wanted}
    del masters
    me.print(megamoe.memory_report(contenders[wanted[0]].problem)["line"])
    timer = Timer(me, args.samples)
    modes = ("cool", "hot") if args.mode == "both" else (args.mode,)
    sms = torch.cuda.get_device_properties(me.device).multi_processor_count if timer.on_gpu else 0
    found = []
    for tokens in args.tokens:
        calls = {entry: c.call(tokens) for entry, c in contenders.items()}
        for mode in modes:
            medians = getattr(timer, mode)(calls)
            for entry, contender in contenders.items():
                us = worst(medians[entry], me.device)
                tflops = entry.flops(shape, tokens) / us / 1e6
                clock, used = contender.clock_ghz(), None
                if clock and sms and entry.direction == "forward":
                    peak = sms * FLOPS_PER_SM_CLOCK[entry.precision] * clock / 1e3
                    used = tflops / peak
                measured = Measurement(
                    shape.name, entry.precision, me.size, tokens, mode, entry.backend, us,
                    tflops, clock, used, *entry.floors(shape, tokens, me.size),
                    entry.direction, entry.gradients, entry.reserve_sms, contender.ctas(),
                )  # fmt: skip
                found.append(measured)
                me.print(line(measured))
        del calls
    for contender in contenders.values():
        contender.close()
    return found


COLUMNS = (
    f"{'shape':<16}{'prec':<11}{'mode':<6}{'direction':<10}{'contender':<30}{'CTAs':>5}{'T':>6}{'us':>10}{'TFLOPS':>9}"
    f"{'GHz':>7}{'used':>7}{'floor us: GEMM':>16}{'HBM':>8}{'NVLink':>8}{'over':>7}"
)


def line(m: Measurement) -> str:
    floor = max(m.gemm_floor_us, m.hbm_floor_us, m.nvlink_floor_us)
    clock = f"{m.clock_ghz:.2f}" if m.clock_ghz else "-"
    used = f"{m.utilisation:.0%}" if m.utilisation else "-"
    return (
        f"{m.shape:<16}{m.precision:<11}{m.mode:<6}{m.direction:<10}{m.contender:<30}{m.ctas or '-':>5}{m.tokens:>6}"
        f"{m.us:>10.1f}{m.tflops:>9.1f}{clock:>7}{used:>7}{m.gemm_floor_us:>16.1f}{m.hbm_floor_us:>8.1f}"
        f"{m.nvlink_floor_us:>8.1f}{m.us / floor:>7.2f}"
    )


def local_shapes(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes, with the experts of one rank of several if that was asked for."""
    shapes, ranks = shapes_from(args), args.local_experts_of
    if ranks is None:
        return shapes
    for shape in shapes:
        if shape.num_experts // ranks < max(shape.top_k, 1):
            raise SystemExit(
                f"--local-experts-of {ranks}: {shape.name} has {shape.num_experts} experts, of which a token takes "
                f"{shape.top_k}"
            )
    return [
        replace(s, name=f"{s.name}/ep{ranks}", num_experts=s.num_experts // ranks) for s in shapes
    ]


def worker(me: Rank, args: argparse.Namespace) -> int:
    title = header()
    me.print(title)
    me.print(COLUMNS)
    found: list[Measurement] = []
    with torch.no_grad():
        for shape in local_shapes(args):
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


def reserve(text: str) -> str:
    if text != "default" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of SMs nor default")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "mega", "staged", "emulate", "reference"))
    add("--baseline", nargs="+", default=[], choices=("staged", "autograd"),
        help="measured in turns with the backend; autograd: staged without its recomputing operator")  # fmt: skip
    add("--direction", default="forward", choices=DIRECTIONS, help="step: forward and backward")
    add("--quantized-x", action="store_true", help="also forward of an x that comes in e4m3")
    add("--main-grad", action="store_true", help="also with gradients added to fp32 tensors")
    add("--layer", action="store_true", help="time the layer through autograd, not the launches")
    add("--reserve-sms", nargs="+", default=["default"], type=reserve, metavar="N|default",
        help="SMs left to others; several take turns. default: as a layer that trains has it")  # fmt: skip
    add(
        "--local-experts-of",
        type=int,
        metavar="R",
        help="experts of one of R ranks: for fewer GPUs than R",
    )
    add_launch_arguments(parser)
    add_shape_arguments(parser, default="qwen3-30b")
    add("--tokens", type=int, nargs="+", help="per rank",
        default=[8, 64, 128, 256, 512, 1024, 2048, 8192])  # fmt: skip
    add("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add("--mode", default="cool", choices=("cool", "hot", "both"))
    add("--clock", action="store_true", help="time the variant with timestamps: clock, utilisation")
    add("--samples", type=int, default=20)
    add("--out", type=Path, default=Path("out"), help="folder of the CSV and the PNG")
    add("--name", default="latency", help="name of both files")
    args = parser.parse_args()
    if args.direction != "forward":
        refuse_training(parser, args.precision)
    return launch(worker, args)


if __name__ == "__main__":
    sys.exit(main())
