#!/usr/bin/env python3
"""Time megamoe.ops against the same made of torch's grouped_mm and elementwise operations. Needs a Hopper GPU.

    python tools/ops_bench.py                                  the family, and GPT-OSS-120B
    python tools/ops_bench.py --only swiglu dswiglu --k 4096
    python tools/ops_bench.py --only gpt-oss --experts 32

Family: --experts-of-family experts of --rows rows each, K, and N columns of the fused GEMM, of which gated ones make
N / 2 of h. swiglu, geglu, srelu: h and saved pre-activations; dswiglu, dgeglu, dsrelu: dy [rows, K] times w2, then the
gradient in the pre-activations, and h. wgrad: a^T b alone. gpt-oss: one MLP of experts (H = I = 2880, top 4) over
--tokens tokens whose rows are sorted already: forward, and forward + backward with all gradients; --no-bias leaves the
biases out, whose gradients are dear in torch. Torch's elementwise operations are one kernel with --compile, else one
each.

Method, as tools/latency_sweep.py: CUDA events around one call, median of --samples; cool: before each the L2 is flushed
(256 MB) and the GPU spins until the host has queued the call; hot: back to back. Contenders take turns. --clock also
prints the SM clock that nvidia-smi reports behind each. Writes a CSV into --out.
"""

import argparse
import csv
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common import header
from torch import Tensor

from megamoe import ops
from megamoe.core.config import ACTIVATIONS

FLUSH_BYTES = 256 << 20
SPIN_CYCLES = 1_500_000
FAMILY = {"swiglu": "swiglu", "geglu": "geglu", "srelu": "relu2"}
DEVICE = "cuda"
aten = torch.ops.aten
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Calls of one problem by contender, and its floating-point operations."""

    name: str
    flops: float
    calls: dict[str, Call]


@dataclass(frozen=True)
class Row:
    """A line of the CSV."""

    case: str
    contender: str
    mode: str
    us: float
    tflops: float
    speedup: float  # over torch
    clock_mhz: int


def grouped(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """x [M, K] times w [E, K, N] by torch."""
    mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return mm(x, w, offs=offs)


def apply(name: str, gu: Tensor) -> Tensor:
    """gu [M, P*I] -> h, in bf16 operations."""
    if name == "srelu":
        return F.relu(gu).square()
    gate, up = gu.chunk(2, 1)
    return (F.silu(gate) if name == "swiglu" else F.gelu(gate)) * up


def gradient(name: str, gu: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """-> dgu [M, P*I], h."""
    if name == "srelu":
        r = F.relu(gu)
        return dh * 2 * r, r.square()
    gate, up = gu.chunk(2, 1)
    back, f = (aten.silu_backward, F.silu) if name == "swiglu" else (aten.gelu_backward, F.gelu)
    value = f(gate)
    return torch.cat((back(dh * up, gate), dh * value), 1), value * up


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_(0, scale)


def family(name: str, args: argparse.Namespace) -> list[Case]:
    """Return forward and backward of an activation."""
    num, rows, k = args.experts_of_family, args.rows, args.k
    activation = FAMILY[name]
    planes = ACTIVATIONS[activation].planes
    width, total = args.n // planes, num * rows
    offs = torch.arange(1, num + 1, device=DEVICE, dtype=torch.int32) * rows
    x, w, w2 = rand(total, k), rand(num, args.n, k, scale=k**-0.5), rand(num, k, width, scale=0.02)
    act, act_gradient = apply, gradient
    if args.compile:
        act, act_gradient = torch.compile(apply), torch.compile(gradient)
    options = {"activation": activation}
    _, gu = ops.grouped_mm_swiglu(x, w, offs, save_pre_activation=True, **options)
    forward = {
        "megamoe": lambda: ops.grouped_mm_swiglu(x, w, offs, save_pre_activation=True, **options),
        "torch": lambda: act(name, grouped(x, w.transpose(1, 2), offs)),
    }
    backward = {
        "megamoe": lambda: ops.grouped_mm_dswiglu(x, w2, gu, offs, **options),
        "torch": lambda: act_gradient(name, gu.flatten(1), grouped(x, w2, offs)),
    }
    flops = 2.0 * total * k
    return [Case(name, flops * args.n, forward), Case(f"d{name}", flops * width, backward)]


def wgrad(args: argparse.Namespace) -> list[Case]:
    """Return the weight gradient of the family."""
    num, rows = args.experts_of_family, args.rows
    offs = torch.arange(1, num + 1, device=DEVICE, dtype=torch.int32) * rows
    a, b = rand(num * rows, args.n), rand(num * rows, args.k)
    calls = {
        "megamoe": lambda: ops.grouped_mm_wgrad(a, b, offs),
        "torch": lambda: grouped(a.T, b, offs),
    }
    return [Case("wgrad", 2.0 * num * rows * args.n * args.k, calls)]


def gpt_oss(args: argparse.Namespace) -> list[Case]:
    """Return forward, and forward + backward, of one MLP of experts."""
    num, size, rows = args.experts, args.size, args.tokens * 4
    ids = torch.randint(num, (rows,), device=DEVICE)
    offs = torch.bincount(ids, minlength=num).cumsum(0).int()
    experts = torch.repeat_interleave(
        torch.arange(num, device=DEVICE), torch.bincount(ids, minlength=num)
    )
    tensors = [
        rand(rows, size),
        rand(num, 2 * size, size, scale=size**-0.5),
        rand(num, size, size, scale=size**-0.5),
        *(() if args.no_bias else (rand(num, 2 * size), rand(num, size))),
    ]
    dy, act = rand(rows, size), ACTIVATIONS["swiglu_oai"]
    leaves = [t.requires_grad_() for t in tensors]

    def clamped(gu: Tensor) -> Tensor:
        gate, up = gu.chunk(2, 1)
        gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)

    middle = torch.compile(clamped) if args.compile else clamped

    def ours() -> Tensor:
        x, w13, w2, *biases = leaves
        return ops.grouped_mlp(x, w13, w2, offs, *biases, activation=act)

    def theirs() -> Tensor:
        x, w13, w2, *biases = leaves
        gu = grouped(x, w13.transpose(1, 2), offs)
        h = middle(gu + biases[0][experts] if biases else gu)
        y = grouped(h, w2.transpose(1, 2), offs)
        return y + biases[1][experts] if biases else y

    def without_gradients(call: Callable[[], Tensor]) -> Call:
        return torch.no_grad()(call)

    def step(call: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(call(), leaves, dy)

    flops = 2.0 * rows * 3 * size * size
    both = {"megamoe": ours, "torch": theirs}
    return [
        Case("gpt-oss forward", flops, {n: without_gradients(c) for n, c in both.items()}),
        Case("gpt-oss step", 3 * flops, {n: step(c) for n, c in both.items()}),
    ]


# names of cases that share tensors -> what makes them
CASES: dict[tuple[str, ...], Callable[[argparse.Namespace], list[Case]]] = {
    **{(n, f"d{n}"): partial(family, n) for n in FAMILY},
    ("wgrad",): wgrad,
    ("gpt-oss",): gpt_oss,
}


def timed(call: Call, mode: str, flush: Tensor) -> float:
    """Return microseconds of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if mode == "cool":
        flush.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def clock() -> int:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])


def measure(case: Case, mode: str, args: argparse.Namespace, flush: Tensor) -> list[Row]:
    """Time a case's contenders in turns."""
    times: dict[str, list[float]] = {name: [] for name in case.calls}
    clocks = dict.fromkeys(case.calls, 0)
    for call in case.calls.values():
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    for _ in range(args.samples):
        for name, call in case.calls.items():
            if mode == "hot":
                call()
            times[name].append(timed(call, mode, flush))
            if args.clock:
                clocks[name] = clock()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        Row(case.name, name, mode, round(us, 1), round(case.flops / us / 1e6, 1),
            round(medians["torch"] / us, 3), clocks[name])
        for name, us in medians.items()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=[n for names in CASES for n in names], metavar="CASE",
        help="some of " + ", ".join(n for names in CASES for n in names))  # fmt: skip
    add("--experts-of-family", type=int, default=8)
    add("--rows", type=int, default=4096, help="of each expert of the family")
    add("--k", type=int, default=8192)
    add("--n", type=int, default=4096)
    add("--experts", type=int, default=128, help="of gpt-oss")
    add("--tokens", type=int, default=24576, help="of gpt-oss")
    add("--size", type=int, default=2880, help="H and I of gpt-oss")
    add("--no-bias", action="store_true", help="gpt-oss without biases")
    add("--compile", action="store_true", help="torch's elementwise operations through inductor")
    add("--mode", default="both", choices=("cool", "hot", "both"))
    add("--samples", type=int, default=20)
    add("--clock", action="store_true")
    add("--out", type=Path, default=Path("out"), help="folder of the CSV")
    add("--name", default="ops", help="its name")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        parser.error("needs a Hopper GPU")
    title = header()
    print(title)
    print(
        f"{'case':<18}{'contender':<11}{'mode':<6}{'us':>10}{'TFLOPS':>9}{'x torch':>9}{'MHz':>6}"
    )
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    found: list[Row] = []
    for names, make in CASES.items():
        wanted = set(names) & set(args.only or names)
        for case in make(args) if wanted else ():
            if case.name.split()[0] not in wanted:
                continue
            for mode in ("cool", "hot") if args.mode == "both" else (args.mode,):
                for row in measure(case, mode, args, flush):
                    found.append(row)
                    print(
                        f"{row.case:<18}{row.contender:<11}{row.mode:<6}{row.us:>10.1f}{row.tflops:>9.1f}"
                        f"{row.speedup:>9.2f}{row.clock_mhz or '-':>6}",
                        flush=True,
                    )
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"{args.name}.csv").open("w", newline="") as file:
        file.write(title + "\n")
        writer = csv.DictWriter(file, list(asdict(found[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in found)
    print(f"wrote {args.out / args.name}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
