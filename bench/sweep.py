"""tools/latency_sweep.py: layers over shapes and token counts, in turns with baselines, beside the floors."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product, repeat

import torch

import megamoe
from bench import dram, gemms
from bench.layers import E4M3_FORWARD, FROZEN, FROZEN_MADE, Entry, TimedLayer, layers_of
from bench.plot import Measurement, plot, wrote
from bench.ranks import Rank
from bench.shapes import local_shapes
from bench.tables import WIDTH, header, write_table
from bench.timing import Timer, modes_of
from megamoe.core.table import PRECISIONS, by_precision
from megamoe.testing import OVERLOADED, SKEWED
from megamoe.testing.shapes import Shape

ITSELF = "itself"  # a baseline: the backend in BF16
ROUTINGS = ("uniform", SKEWED, "hot", "one_rank", OVERLOADED)  # in which every route is computed
FLOPS_PER_SM_CLOCK = by_precision({"fp8": 8192, "bf16": 4096})


def entries(precision: str, args: argparse.Namespace) -> list[Entry]:
    """Return what takes turns: the backend in every way asked for, then the baselines."""
    gradients: list[str | None] = [None]
    direction, of = args.direction, PRECISIONS[precision]
    if direction != "forward":
        gradients = ["bf16", "main_grad"] if args.main_grad else ["bf16"]
    if args.frozen:
        gradients = [FROZEN, *[FROZEN_MADE] * of.transposes]
    reserves = [None if r == "default" else int(r) for r in args.reserve_sms]
    products = [p for p in args.weight_gradients if p in (None, *of.weight_gradients)] or [None]
    found = [
        Entry(args.backend, precision, direction, g, reserve, args.layer, products=p)
        for p, g, reserve in product(products, gradients, reserves)
    ]
    if direction == "backward":
        found += [
            Entry(args.backend, precision, direction, g, passes=n, products=p)
            for p, g, n in product(products, gradients, args.passes)
        ]
    if direction == "step" and of.w.scaled:
        found.append(Entry(args.backend, precision, "quantize"))
    if args.quantized_x and direction == "forward" and of.x.scaled:
        found.append(Entry(args.backend, precision, E4M3_FORWARD))
    for name in args.baseline:
        in_fp8 = name == gemms.NAME and direction == "forward"
        stored = gemms.PRECISION_OF_TORCH.get(precision, "bf16") if in_fp8 else "bf16"
        backend, layer = (args.backend, args.layer) if name == ITSELF else (name, False)
        found.append(Entry(backend, stored, direction, gradients[0], through_layer=layer))
    return found


def sweep(
    shape: Shape,
    precision: str,
    me: Rank,
    args: argparse.Namespace,
    read_gb: Iterator[float | None],
) -> list[Measurement]:
    """Measure one shape and precision over all token counts. Collective. read_gb: of what is measured, in order."""
    found, timer = [], Timer(me.device, args.samples)
    with layers_of(shape, entries(precision, args), max(args.tokens), me, args.clock) as layers:
        me.print(megamoe.memory_report(next(iter(layers.values())).problem)["line"])
        for tokens, routing in product(args.tokens, args.routing):
            contenders = [layer.contender(tokens, routing) for layer in layers.values()]
            if args.below_ncu:
                dram.call_below_ncu(contenders)
                continue
            read = [next(read_gb) for _ in contenders]
            for mode in modes_of(args.mode):
                medians = timer.medians(contenders, mode)
                for layer, us, gb in zip(layers.values(), medians, read, strict=True):
                    made = measurement(layer, shape, tokens, mode, us, gb)
                    found.append(replace(made, routing=routing))
                    me.print(line(found[-1]))
            del contenders
    return found


def measurement(
    layer: TimedLayer, shape: Shape, tokens: int, mode: str, us: float, read_gb: float | None
) -> Measurement:
    """Return a line of the result, of the layer's last call. Collective."""
    entry, ranks = layer.entry, layer.problem.ep_size
    us /= max(entry.passes, 1)
    tflops = entry.flops(shape, tokens) / us / 1e6
    clock, used = layer.clock_ghz(), None
    if clock and layer.device.type == "cuda" and entry.direction == "forward":
        sms = torch.cuda.get_device_properties(layer.device).multi_processor_count
        used = tflops / (sms * FLOPS_PER_SM_CLOCK[entry.precision] * clock / 1e3)
    return Measurement(
        shape.name, entry.precision, ranks, tokens, mode, entry.backend, us,
        tflops, clock, used, *entry.floors(shape, tokens, ranks),
        entry.direction, entry.label, entry.reserve_sms, layer.ctas(), read_gb,
    )  # fmt: skip


COLUMNS = (
    f"{'shape':<16}{'prec':<{WIDTH}}{'mode':<6}{'direction':<10}{'contender':<30}{'CTAs':>5}{'T':>6}{'us':>10}"
    f"{'TFLOPS':>9}{'GHz':>7}{'used':>7}{'floor us: GEMM':>16}{'HBM':>8}{'NVLink':>8}{'over':>8}{'read GB':>9}"
)


def line(m: Measurement) -> str:
    floor = max(m.gemm_floor_us, m.hbm_floor_us, m.nvlink_floor_us)
    clock = f"{m.clock_ghz:.2f}" if m.clock_ghz else "-"
    used = f"{m.utilisation:.0%}" if m.utilisation else "-"
    read = "-" if m.dram_read_gb is None else f"{m.dram_read_gb:.2f}"
    return (
        f"{m.shape:<16}{m.precision:<{WIDTH}}{m.mode:<6}{m.direction:<10}{m.contender:<30}{m.ctas or '-':>5}"
        f"{m.tokens:>6}{m.us:>10.1f}{m.tflops:>9.1f}{clock:>7}{used:>7}{m.gemm_floor_us:>16.1f}{m.hbm_floor_us:>8.1f}"
        f"{m.nvlink_floor_us:>8.1f}{m.us / floor:>8.2f}{read:>9}"
    )


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Sweep each shape in each precision; write the CSV and the picture. Collective."""
    gemms.register()
    wanted = args.dram and not args.below_ncu
    read_gb = dram.read_gb(me.size) if wanted else repeat(None)
    title, found = header(), list[Measurement]()
    me.print(title, COLUMNS, sep="\n")
    with torch.no_grad():
        for shape, precision in product(local_shapes(args), args.precision):
            found += sweep(shape, precision, me, args, read_gb)
            if me.device.type == "cuda":
                torch.cuda.empty_cache()
    if me.is_first and not args.below_ncu:
        table = args.out / f"{args.name}.csv"
        write_table(table, title, found)
        picture = table.with_suffix(".png")
        print(wrote(plot(found, title, picture), picture, table))
    return 0


def reserve(text: str) -> str:
    if text != "default" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of SMs nor default")
    return text
