"""tools/ops_bench.py: megamoe.ops in turns with the same made of torch's grouped_mm and elementwise operations."""

import argparse
import itertools
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from bench.gemms import grouped_mm as grouped
from bench.gemms import scaled_mm
from bench.tables import header, write_table
from bench.timing import Contender, Timer, modes_of
from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.testing.shapes import SHAPES

FAMILY = {"swiglu": "swiglu", "geglu": "geglu", "srelu": "relu2"}
# Weight gradients of a model: its experts by a rank of four, and rows of each: 8192 tokens there, for dsv3 also 4608.
RANKS = 4
MODEL_ROWS = {"dsv3": (576, 1024), "flash": (768,), "qwen3-235b": (2048,), "qwen3-30b": (2048,)}
DEVICE = "cuda"
aten = torch.ops.aten
Call = Callable[[Any], object]  # as a contender has it, with nothing before it


@dataclass(frozen=True)
class Case:
    """Contenders of one problem, and its floating-point operations."""

    name: str
    flops: float
    contenders: list[Contender]


def contenders(ours: Call, theirs: Call) -> list[Contender]:
    return [Contender("megamoe", ours), Contender("torch", theirs)]


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
    _, gu = ops.grouped_mm_act(x, w.mT, activation, offs=offs, return_pre=True)
    forward = contenders(
        lambda _: ops.grouped_mm_act(x, w.mT, activation, offs=offs, return_pre=True),
        lambda _: act(name, grouped(x, w.mT, offs)),
    )
    backward = contenders(
        lambda _: ops.grouped_mm_dact(x, w2, gu, activation, offs=offs),
        lambda _: act_gradient(name, gu, grouped(x, w2, offs)),
    )
    flops = 2.0 * total * k
    return [Case(name, flops * args.n, forward), Case(f"d{name}", flops * width, backward)]


def alone(ours: Callable[[], object], theirs: Callable[[], object]) -> list[Contender]:
    """Return both, of which neither needs anything before it."""
    return contenders(lambda _: ours(), lambda _: theirs())


def wgrad(args: argparse.Namespace) -> list[Case]:
    """Return the weight gradient of the family."""
    num, rows = args.experts_of_family, args.rows
    offs = torch.arange(1, num + 1, device=DEVICE, dtype=torch.int32) * rows
    a, b = rand(num * rows, args.n), rand(num * rows, args.k)
    made, theirs = partial(ops.grouped_mm, a.T, b, offs=offs), partial(grouped, a.T, b, offs)
    return [Case("wgrad", 2.0 * num * rows * args.n * args.k, alone(made, theirs))]


def channel(args: argparse.Namespace) -> list[Case]:
    """Return the product of the family in e4m3, by token and channel."""
    num, rows = args.experts_of_family, args.rows
    offs = torch.arange(1, num + 1, device=DEVICE, dtype=torch.int32) * rows
    rows_in, recipe = rand(num * rows, args.k), ScalingType.RowWise
    w, of_columns = ops.quantize(rand(num, args.k, args.n), recipe)
    x, by_block = ops.quantize(rows_in, recipe, offs=offs)
    _, of_rows = ops.quantize(rows_in, recipe)
    scales = by_block, recipe, of_columns, recipe
    ours = partial(ops.scaled_grouped_mm, x, w, *scales, offs=offs)
    theirs = partial(scaled_mm, x, w, (of_rows[:, None], of_columns[..., None]), offs)
    return [Case("channel", 2.0 * num * rows * args.n * args.k, alone(ours, theirs))]


def add(out: Tensor, product: Callable[[], Tensor]) -> Tensor:
    return out.add_(product())


def model_wgrad(name: str, args: argparse.Namespace) -> Iterator[Case]:
    """Yield dw13 and dw2 of a model's local experts, in bf16, and added to fp32: torch adds its bf16 product."""
    shape = SHAPES[name]
    num, planes = shape.num_experts // RANKS, ACTIVATIONS[shape.activation].planes
    matrices = {
        "dw13": (planes * shape.intermediate, shape.hidden),
        "dw2": (shape.hidden, shape.intermediate),
    }
    for rows, (matrix, (n1, n2)) in itertools.product(MODEL_ROWS[name], matrices.items()):
        offs = torch.arange(1, num + 1, device=DEVICE, dtype=torch.int32) * rows
        a, b = rand(num * rows, n1), rand(num * rows, n2)
        out = torch.zeros(num, n1, n2, device=DEVICE)
        case, flops = f"wgrad-{name} {rows} {matrix}", 2.0 * num * rows * n1 * n2
        made = partial(ops.grouped_mm, a.T, b, offs=offs)
        adds = partial(ops.grouped_mm_wgrad, a.T, b, out=out, offs=offs)
        theirs = partial(grouped, a.T, b, offs)
        yield Case(case, flops, alone(made, theirs))
        yield Case(f"{case} +=", flops, alone(adds, partial(add, out, theirs)))


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

    def ours(_: Any) -> Tensor:
        x, w13, w2, *biases = leaves
        given = dict(zip(("b_up", "b_down"), biases, strict=False))
        return ops.grouped_mlp(x, w13.mT, w2.mT, act, offs=offs, **given)

    def theirs(_: Any) -> Tensor:
        x, w13, w2, *biases = leaves
        gu = grouped(x, w13.transpose(1, 2), offs)
        h = middle(gu + biases[0][experts] if biases else gu)
        y = grouped(h, w2.transpose(1, 2), offs)
        return y + biases[1][experts] if biases else y

    def step(call: Callable[[Any], Tensor]) -> Call:
        return lambda _: torch.autograd.grad(call(_), leaves, dy)

    flops, without_gradients = 2.0 * rows * 3 * size * size, torch.no_grad()
    forward = contenders(without_gradients(ours), without_gradients(theirs))
    return [
        Case("gpt-oss forward", flops, forward),
        Case("gpt-oss step", 3 * flops, contenders(step(ours), step(theirs))),
    ]


# names of cases that share tensors -> what makes them
CASES: dict[tuple[str, ...], Callable[[argparse.Namespace], Iterable[Case]]] = {
    **{(n, f"d{n}"): partial(family, n) for n in FAMILY},
    ("wgrad",): wgrad,
    ("channel",): channel,
    **{(f"wgrad-{n}",): partial(model_wgrad, n) for n in MODEL_ROWS},
    ("gpt-oss",): gpt_oss,
}


def clock() -> int:
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0])


def measure(case: Case, mode: str, timer: Timer, clocks: dict[str, int]) -> list[Row]:
    """Time a case's contenders in turns. clocks: in MHz behind each, where the timer was told to look at them."""
    for contender in case.contenders:
        for _ in range(3):
            contender.timed(None)
    timer.synchronize()
    medians = timer.medians(case.contenders, mode)
    ours_and_torch = zip(case.contenders, medians, strict=True)
    return [
        Row(case.name, c.name, mode, round(us, 1), round(case.flops / us / 1e6, 1),
            round(medians[1] / us, 3), clocks.get(c.name, 0))
        for c, us in ours_and_torch
    ]  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Time the cases that were asked for; print a line each, write the CSV."""
    title = header()
    print(title)
    print(
        f"{'case':<28}{'contender':<11}{'mode':<6}{'us':>10}{'TFLOPS':>9}{'x torch':>9}{'MHz':>6}"
    )
    clocks: dict[str, int] = {}

    def watch(contender: Contender) -> None:
        if args.clock:
            clocks[contender.name] = clock()

    timer, found = Timer(torch.device(DEVICE), args.samples, watch), []
    for names, make in CASES.items():
        wanted = set(names) & set(args.only or names)
        for case in make(args) if wanted else ():
            if case.name.split()[0] not in wanted:
                continue
            for mode in modes_of(args.mode):
                for row in measure(case, mode, timer, clocks):
                    found.append(row)
                    print(
                        f"{row.case:<28}{row.contender:<11}{row.mode:<6}{row.us:>10.1f}{row.tflops:>9.1f}"
                        f"{row.speedup:>9.2f}{row.clock_mhz or '-':>6}",
                        flush=True,
                    )
        torch.cuda.empty_cache()
    write_table(args.out / f"{args.name}.csv", title, found)
    print(f"wrote {args.out / args.name}.csv")
    return 0
