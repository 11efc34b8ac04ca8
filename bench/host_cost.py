"""tools/host_cost.py: what the host does in a call of the layer, and what lies between kernels of a captured loop."""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import megamoe
from bench.ranks import Rank
from bench.shapes import problem_of, shapes_from
from bench.tables import header
from bench.timeline import mark_names
from bench.timing import Timer, stopwatch
from megamoe.backends import select
from megamoe.backends.call import Backend, Call
from megamoe.backends.mega.backend import MegaBackend
from megamoe.layer import autograd
from megamoe.layer.inputs import Inputs
from megamoe.layer.runtime import runtime_of
from megamoe.testing import make_inputs, make_weights

START, END = map(mark_names().index, ("start", "end"))  # of a CTA's timestamps

CALLS = 50
WARM_UP = 20
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
}
# Of the least of repeated runs, in us. 2026-11-24, H200, d39b211, BF16 / FP8: module 15.8 / 17.5, with gradients 46.6 /
# 48.1, backend 7.9 / 7.8, between captured launches 2.6, on an H100 3.1. The rest, about a seventh, is for other hosts.
LIMITS = {"module": 20.0, "backend": 9.0}
GRAD_LIMITS = {"module": 55.0}
CHAIN, BETWEEN_LIMIT = 32, 3.5
SPIN_CYCLES = 2_000_000  # 1 ms, in which the host queues a replay of the chain


class Nothing(Backend):
    """A backend that computes nothing, and keeps as little for its backward pass."""

    state_bytes = 64

    def __init__(self, problem: megamoe.Problem, group: Any = None) -> None:
        self.problem = problem

    def forward(self, call: Call, keep: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, _ = call.rows
        state = x.new_empty(self.state_bytes, dtype=torch.uint8) if keep else None
        return torch.empty_like(x), state


def kernel_span_ns(profile: torch.Tensor) -> tuple[int, int]:
    """profile: [grid, PROFILE_SLOTS] of a launch -> when its first CTA began and its last one ended, in ns. Waits."""
    stamps = profile.cpu()
    return int(stamps[:, START].min()), int(stamps[:, END].max())


def measure(
    args: argparse.Namespace, precision: str, device: torch.device
) -> dict[tuple[str, str], list[float]]:
    """Return (way, mode) -> means in us."""
    shape = shapes_from(args)[0]
    layer = megamoe.MegaMoE(
        *(shape.hidden, shape.intermediate, shape.num_experts, shape.top_k),
        precision=precision,
        max_tokens=max(args.tokens, 64),
        backend=args.backend,
        device=device,
    )
    timer = Timer(device, args.repeats)
    inputs = make_inputs(layer.problem, args.tokens, device=device)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    layer.prepare()
    inner = layer._layer
    weights = layer.expert_weights()
    backend = runtime_of(inner.handle).backend
    given = runtime_of(inner.handle).weights(weights)
    # As a layer gives it, which has looked at all that is alike in its calls.
    of_layer = Call(*call, given, known=object())
    copy = torch.empty_like(inputs.x)
    ways = {
        "module": lambda: layer(*call),
        "Layer": lambda: inner(*call, weights),
        "operator": lambda: autograd.apply(Inputs.of(*call, weights), inner.handle),
        "backend": lambda: backend.forward(of_layer),
        "torch": lambda: copy.copy_(inputs.x),
    }
    found = {}
    for mode, context in MODES.items():
        with context():
            for way, function in ways.items():
                if mode == "grad" and way == "backend":
                    continue  # it records none
                found[way, mode] = timer.host(function, CALLS, args.repeats, WARM_UP)
    layer.check()
    layer.close()
    return found


def captured(args: argparse.Namespace, precision: str, pdl: bool) -> tuple[float, float, float]:
    """Return (us a launch, us of the last one's kernel, us before it) of a captured chain of launches."""
    device = torch.device("cuda", torch.cuda.current_device())
    me = Rank(0, 1, device)
    problem = problem_of(shapes_from(args)[0], max(args.tokens, 64), me, precision)
    backends = [MegaBackend(problem, pdl=pdl, profile=True) for _ in range(2)]
    inputs = make_inputs(problem, args.tokens, device=device, ids_dtype=torch.int32)
    weights = make_weights(problem, device=device)
    for backend in backends:
        backend.prepare(weights)
    graph, y = torch.cuda.CUDAGraph(), inputs.x
    with torch.cuda.graph(graph):
        for i in range(CHAIN):
            call = Call(y, inputs.topk_ids, inputs.topk_weights, weights)
            y, _ = backends[i % 2].forward(call)
    periods, kernels, between = [], [], []
    profiles = [p for p in (backend.profile for backend in backends) if p is not None]
    for _ in range(args.repeats):
        torch.cuda._sleep(SPIN_CYCLES)
        read = stopwatch(True, graph.replay)
        torch.cuda.synchronize()
        periods.append(read() / CHAIN)
        (_, end_before), (begin, last_end) = map(kernel_span_ns, profiles)
        kernels.append((last_end - begin) / 1e3)
        between.append((begin - end_before) / 1e3)
    for backend in backends:
        backend.check()
        backend.close()
    return statistics.median(periods), statistics.median(kernels), statistics.median(between)


def check_captured(args: argparse.Namespace) -> int:
    """Print what is between captured launches; return 1 if --check finds more than BETWEEN_LIMIT."""
    print(f"{'us a launch':26}{'period':>10}{'kernel':>10}{'between':>10}")
    least = []
    for precision in args.precision:
        between = []
        for pdl in (False, True):
            period, kernel, gap = captured(args, precision, pdl)
            between.append(gap)
            name = f"{precision}, PDL {'on' if pdl else 'off'}"
            print(f"{name:26}{period:10.1f}{kernel:10.1f}{gap:10.1f}")
        least.append(min(between))
    return 1 if args.check and max(least) > BETWEEN_LIMIT else 0


def check_calls(args: argparse.Namespace) -> int:
    """Print what calls cost in every way and mode; return 1 if --check finds a limit exceeded."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    print(f"{'us a call: least / median':26}" + "".join(f"{m:>18}" for m in MODES))
    exceeded = []
    for precision in args.precision:
        found = measure(args, precision, device)
        for way in ("module", "Layer", "operator", "backend", "torch"):
            cells = []
            for mode in MODES:
                means = found.get((way, mode))
                cells.append(f"{min(means):.1f} / {statistics.median(means):.1f}" if means else "-")
                limit = (GRAD_LIMITS if mode == "grad" else LIMITS).get(way, float("inf"))
                if means and min(means) > limit:
                    exceeded.append(f"{precision} {way} {mode}: {min(means):.1f} > {limit}")
            print(
                f"{precision + ', ' + args.backend + ': ' + way:26}"
                + "".join(f"{c:>18}" for c in cells)
            )
    for line in exceeded if args.check else ():
        print("over the limit: " + line)
    return 1 if args.check and exceeded else 0


def run(args: argparse.Namespace) -> int:
    """Print the table that was asked for; return 1 if --check finds a limit exceeded."""
    select.BACKENDS["nothing"] = Nothing
    torch.set_num_threads(1)
    print(header())
    return check_captured(args) if args.captured else check_calls(args)
