#!/usr/bin/env python3
"""Long runs, and runs in which something goes wrong, of the kernel on the GPUs of this machine.

    python tools/soak.py calls --calls 10000       back to back, changing routings and sizes: always the same bits
    python tools/soak.py graph --replays 1000      one CUDA graph, its inputs changed in place
    python tools/soak.py nccl --calls 1000         beside an NCCL loop, launched in opposite orders on the ranks
    python tools/soak.py kill                      SIGKILL for the last rank, between calls and during one
    python tools/soak.py late mismatch             a rank comes too late; ranks that differ; then a reset
    python tools/soak.py busy streams              others hold SMs; two streams, shared window, moving weights
    torchrun --nproc-per-node 4 tools/soak.py calls    (not kill: torchrun ends all ranks when one dies)

Prints one line a scenario, and the messages that a fault produced. Exit code 1 when a result was wrong, an error was
missing or unnamed, or the time given by --bound was over.
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from common import Rank, header

import megamoe
from megamoe import reference
from megamoe.errors import MegaMoEError, PeerFault, ProtocolTimeout, RankMismatch, WindowBroken
from megamoe.testing import ROUTINGS, compare, launch, make_inputs, make_weights

BACKENDS = "cpu:gloo,cuda:nccl"
LIMIT = {"bf16": 5e-3, "fp8": 1e-2}  # relative error of y; docs/numerics.md
BLOCK = 500  # calls between two looks at the device
TIMEOUT_S = 3.0  # where a fault is wanted
BUSY_CYCLES = 3_000_000_000  # about 1.5 s
SPINNERS = 16


@dataclass
class Outcome:
    """What a scenario found on one rank."""

    text: str
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def require(self, condition: object, message: str) -> None:
        if not condition:
            self.failures.append(message)


def device_of(rank: int) -> torch.device:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def group_of(me: Rank) -> object:
    return dist.group.WORLD if me.size > 1 else None


def gather(me: Rank, value: object) -> list:
    """Return every rank's value."""
    values: list = [None] * me.size
    dist.all_gather_object(values, value)
    return values


def problem_of(me: Rank, precision: str = "bf16", **changes: object) -> megamoe.Problem:
    small = megamoe.Problem(
        hidden=1024,
        intermediate=512,
        num_experts=32,
        top_k=4,
        ep_size=me.size,
        rank=me.rank,
        max_tokens=512,
        precision=precision,
    )
    return replace(small, **changes)


def draw_plans(me: Rank, most: int, count: int) -> list[tuple[str, list[int], torch.dtype]]:
    """Return (routing, tokens of each rank, type of ids) of `count` inputs, the same on all ranks."""
    r = random.Random(5)
    full, alone = [most] * me.size, [0] * (me.size - 1) + [most]
    plans = [("uniform", full), ("hot", full), ("one_rank", full), ("uniform", alone), ("dropped", alone[::-1])]
    plans += [("all_dropped", full), ("uniform", [0] * me.size), ("uniform", [1] * me.size)]
    while len(plans) < count:
        sizes = [0 if r.random() < 0.2 else r.randint(1, most) for _ in range(me.size)]
        plans.append((ROUTINGS[len(plans) % len(ROUTINGS)], sizes))
    return [(*plan, (torch.int32, torch.int64)[i % 2]) for i, plan in enumerate(plans[:count])]


class Layer:
    """A backend, inputs for it, what they should give and what they gave at the first call."""

    def __init__(self, me: Rank, problem: megamoe.Problem, count: int = 16, **options: object) -> None:
        from megamoe.mega import MegaBackend

        self.me, self.problem = me, problem
        options = {"timeout_s": 20.0, "reserve_sms": 0, **options}
        if options["reserve_sms"] is None:
            del options["reserve_sms"]
        ranks = range(me.size)
        everyones = [make_weights(problem, rank=r, device=me.device) for r in ranks]
        self.weights, self.inputs, self.expected = everyones[me.rank], [], []
        for seed, (routing, tokens, dtype) in enumerate(draw_plans(me, problem.max_tokens, count)):
            kind = {"seed": seed, "routing": routing, "device": me.device, "ids_dtype": dtype}
            drawn = [make_inputs(problem, tokens[r], rank=r, **kind) for r in ranks]
            columns = ([getattr(i, name) for i in drawn] for name in ("x", "topk_ids", "topk_weights"))
            self.expected.append(reference.forward(problem, *columns, everyones)["y"][me.rank])
            self.inputs.append(drawn[me.rank])
        del everyones
        torch.cuda.synchronize()
        self.backend = MegaBackend(problem, group_of(me), device=me.device, **options)
        self.backend.prepare(self.weights)
        self.first: list[torch.Tensor] = []
        self.flags: list[torch.Tensor] = []  # on the device: one for each call whose bits were compared
        self.worst = 0.0

    def call(self, i: int) -> torch.Tensor:
        inputs = self.inputs[i]
        return self.backend.forward(inputs.x, inputs.topk_ids, inputs.topk_weights, self.weights)

    def start(self) -> "Layer":
        """Make the first call of every input and compare it with the oracle."""
        self.first = [self.call(i) for i in range(len(self.inputs))]
        self.backend.check()
        for i, y in enumerate(self.first):
            self.judge(i, y)
        self.note(0, self.first[0])  # loads the kernels that note() needs before anything depends on it
        self.settle()
        return self

    def judge(self, i: int, y: torch.Tensor) -> None:
        """Compare with the oracle."""
        self.worst = max(self.worst, compare(y, self.expected[i]).relative)

    def note(self, i: int, y: torch.Tensor) -> None:
        """Compare with the first call's bits, on the current stream; settle() collects the verdict."""
        first = self.first[i][: y.shape[0]]
        self.flags.append((y.view(torch.int16) != first.view(torch.int16)).any())

    def settle(self) -> int:
        """Wait for the device; return how many calls had other bits. Raises the fault if there was one."""
        self.backend.check()
        wrong = int(torch.stack(self.flags).sum()) if self.flags else 0
        self.flags.clear()
        return wrong

    def verdict(self, out: Outcome, wrong: int) -> str:
        """Record what went wrong; return the figures."""
        precision = self.problem.precision
        out.require(wrong == 0, f"{precision}: {wrong} calls gave other bits than the first of their input")
        good = self.worst <= LIMIT[precision]
        out.require(good, f"{precision}: relative error {self.worst:.2e}, limit {LIMIT[precision]:g}")
        return f"{precision} {wrong} differ, worst error {self.worst:.1e}"


def calls(me: Rank, args: argparse.Namespace) -> Outcome:
    """Back-to-back calls in a random order of the inputs, with pauses on single ranks."""
    out, total, texts, start = Outcome(""), args.calls or 10000, [], 0.0
    for precision in args.precision:
        layer = Layer(me, problem_of(me, precision)).start()
        order, own, wrong, begin = random.Random(1), random.Random(me.rank), 0, time.monotonic()
        for n in range(1, total + 1):
            if own.random() < 0.02:
                torch.cuda._sleep(own.randrange(1_000_000))
            i = order.randrange(len(layer.inputs))
            y = layer.call(i)
            layer.note(i, y)
            if n % BLOCK == 0 or n == total:
                wrong += layer.settle()
                layer.judge(i, y)
        start += time.monotonic() - begin
        texts.append(layer.verdict(out, wrong))
        layer.backend.close()
    out.text = f"{total} calls of 16 inputs a precision in {start:.1f} s: {'; '.join(texts)}"
    return out


def graph(me: Rank, args: argparse.Namespace) -> Outcome:
    """Replays of one captured call; tokens, ids, weights and their number change in place."""
    out, texts, start = Outcome(""), [], time.monotonic()
    for precision in args.precision:
        problem = problem_of(me, precision)
        layer = Layer(me, problem).start()
        most = problem.max_tokens
        x = torch.zeros(most, problem.hidden, dtype=torch.bfloat16, device=me.device)
        ids = torch.zeros(most, problem.top_k, dtype=torch.int64, device=me.device)
        scores = torch.zeros(most, problem.top_k, device=me.device)
        count = torch.zeros(1, dtype=torch.int32, device=me.device)
        y = torch.zeros_like(x)
        layer.backend.forward(x, ids, scores, layer.weights, num_tokens_device=count, out=y)
        layer.backend.check()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            layer.backend.forward(x, ids, scores, layer.weights, num_tokens_device=count, out=y)
        order, wrong = random.Random(2), 0
        for n in range(1, args.replays + 1):
            i = order.randrange(len(layer.inputs))
            inputs = layer.inputs[i]
            tokens = inputs.x.shape[0]
            x[:tokens].copy_(inputs.x)  # rows behind keep what earlier replays left there
            ids[:tokens].copy_(inputs.topk_ids)
            scores[:tokens].copy_(inputs.topk_weights)
            count.fill_(tokens)
            captured.replay()
            layer.note(i, y[:tokens])
            if n % 50 == 0:
                layer.note(i, layer.call(i))  # an ordinary call between replays
            if n % BLOCK == 0 or n == args.replays:
                wrong += layer.settle()
                layer.judge(i, y[:tokens])
        texts.append(layer.verdict(out, wrong))
        del captured
        layer.backend.close()
    out.text = f"{args.replays} replays a precision in {time.monotonic() - start:.1f} s: {'; '.join(texts)}"
    return out


def nccl(me: Rank, args: argparse.Namespace) -> Outcome:
    """All-gathers on a second stream: half of the ranks launch NCCL first, half the kernel."""
    total, out = args.calls or 1000, Outcome("")
    layer = Layer(me, problem_of(me), reserve_sms=None).start()  # None: the default, for training
    sms = torch.cuda.get_device_properties(me.device).multi_processor_count
    out.require(layer.backend.grid < sms, "no SMs are reserved although NCCL is in use")
    side, bad = torch.cuda.Stream(me.device), []
    piece = torch.zeros(1 << 20, device=me.device)
    gathered = torch.zeros(me.size, 1 << 20, device=me.device)
    ranks = torch.arange(me.size, device=me.device, dtype=torch.float32)[:, None]

    def exchange(n: int) -> None:
        with torch.cuda.stream(side):
            piece.fill_(n + me.rank)
            dist.all_gather_into_tensor(gathered.view(-1), piece)
            bad.append((gathered - ranks != n).any())

    torch.cuda.synchronize()
    exchange(0)  # makes the communicator
    torch.cuda.synchronize()
    gather(me, None)
    order, wrong, start = random.Random(3), 0, time.monotonic()
    for n in range(1, total + 1):
        i = order.randrange(len(layer.inputs))
        if me.rank < me.size // 2:
            exchange(n)
        y = layer.call(i)
        if me.rank >= me.size // 2:
            exchange(n)
        layer.note(i, y)
        if n % 50 == 0 or n == total:
            wrong += layer.settle()
            layer.judge(i, y)
    torch.cuda.synchronize()
    broken = int(torch.stack(bad).sum())
    out.require(broken == 0, f"{broken} all-gathers gave a wrong result")
    seconds = time.monotonic() - start
    text = layer.verdict(out, wrong)
    out.text = f"{total} calls beside {total} all-gathers, {sms - layer.backend.grid} SMs reserved, in {seconds:.1f} s: {text}"
    layer.backend.close()
    return out


def error_of(function: Callable[[], object]) -> MegaMoEError | None:
    try:
        function()
    except MegaMoEError as error:
        return error
    return None


def faults(me: Rank, out: Outcome, title: str, function: Callable[[], object], kinds: tuple, words: list[str]) -> None:
    """Every rank must raise one of `kinds` or PeerFault, and the message of one rank must hold all words."""
    start, error = time.monotonic(), error_of(function)
    text = f"{title}, rank {me.rank}: {type(error).__name__}: {error} ({time.monotonic() - start:.1f} s)"
    out.notes.append(text)
    out.require(isinstance(error, (*kinds, PeerFault)), f"{text}: expected {[k.__name__ for k in kinds]}")
    named = any(all(word in text for word in words) for text in gather(me, text))
    out.require(named, f"{title}: no rank's message holds {words}")


def late(me: Rank, args: argparse.Namespace) -> Outcome:
    """The last rank comes later than the time-out; after a reset all is well."""
    out, start = Outcome(""), time.monotonic()
    layer = Layer(me, problem_of(me), count=2, timeout_s=TIMEOUT_S).start()
    last = me.size - 1

    def too_late() -> None:
        time.sleep(2 * TIMEOUT_S if me.rank == last else 0)
        layer.call(0)
        layer.backend.check()

    gather(me, None)
    faults(me, out, "late", too_late, (ProtocolTimeout,), ["routes_ready", f"for rank {last}"])
    out.require(isinstance(error_of(lambda: layer.call(0)), WindowBroken), "a broken window took a call")
    layer.backend.reset()
    for _ in range(3):
        layer.note(0, layer.call(0))
    text = layer.verdict(out, layer.settle())
    out.text = f"time-out {TIMEOUT_S:g} s, then reset and 3 calls: {text}; {time.monotonic() - start:.1f} s in all"
    layer.backend.close()
    return out


def mismatch(me: Rank, args: argparse.Namespace) -> Outcome:
    """One rank is built differently; then two layers are called in another order on one rank."""
    from megamoe.mega import MegaBackend
    from megamoe.window import Window

    out, start, last = Outcome(""), time.monotonic(), me.size - 1
    for name, value in (("intermediate", 256), ("activation", megamoe.activation_by_name("geglu"))):
        problem = problem_of(me, **({name: value} if me.rank == last else {}))

        def build(problem: megamoe.Problem = problem) -> None:
            MegaBackend(problem, group_of(me), device=me.device)

        faults(me, out, f"other {name}", build, (RankMismatch,), [name, f"on rank {last}"])
    window = Window(problem_of(me), group_of(me), device=me.device)
    options = {"count": 2, "window": window, "timeout_s": TIMEOUT_S}
    layers = [Layer(me, problem_of(me, intermediate=i), **options).start() for i in (512, 768)]

    def in_another_order() -> None:
        layers[me.rank == last].call(0)
        window.check()

    gather(me, None)
    words = [f"rank {last} runs another configuration"]
    faults(me, out, "other order of layers", in_another_order, (RankMismatch,), words)
    window.reset()
    for layer in layers:
        layer.note(0, layer.call(0))
    text = "; ".join(layer.verdict(out, layer.settle()) for layer in layers)
    window.close()
    out.text = f"2 configurations and 1 order differed, then reset: {text}; {time.monotonic() - start:.1f} s in all"
    return out


def busy(me: Rank, args: argparse.Namespace) -> Outcome:
    """Others hold SMs of rank 0, then of all ranks, while a call is made."""
    out, texts = Outcome(""), []
    layer = Layer(me, problem_of(me), count=2).start()
    small = Layer(me, problem_of(me), count=2, reserve_sms=2 * SPINNERS).start()
    spinners = [torch.cuda.Stream(me.device) for _ in range(SPINNERS)]
    a = torch.zeros(8192, 8192, device=me.device, dtype=torch.bfloat16)
    torch.mm(a, a)
    torch.cuda._sleep(1000)

    def spin() -> None:
        for stream in spinners:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(BUSY_CYCLES)

    def multiply() -> None:
        with torch.cuda.stream(spinners[0]):
            for _ in range(500):
                torch.mm(a, a)

    cases = [("spinners on rank 0", layer, spin, 1), ("spinners on all", layer, spin, me.size)]
    cases += [("spinners on all, SMs reserved", small, spin, me.size), ("GEMMs on all", layer, multiply, me.size)]
    for name, called, occupy, ranks in cases:
        torch.cuda.synchronize()
        gather(me, None)
        start = time.monotonic()
        if me.rank < ranks:
            occupy()
        y = called.call(0)
        called.note(0, y)
        torch.cuda.current_stream().synchronize()
        texts.append(f"{name} {time.monotonic() - start:.2f} s")
        called.verdict(out, called.settle())
    out.text = "; ".join(texts)
    small.backend.close()
    layer.backend.close()
    return out


def streams(me: Rank, args: argparse.Namespace) -> Outcome:
    """Two streams, two layers in one window; then modules: autocast, and parameters whose storage moves."""
    from megamoe.window import Window

    out, total, texts, start = Outcome(""), args.calls or 400, [], time.monotonic()
    for precision in args.precision:
        window = Window(problem_of(me, precision), group_of(me), device=me.device)
        shared = [problem_of(me, precision, intermediate=i) for i in (512, 768)]
        layers = [Layer(me, p, window=window).start() for p in shared]
        sides, order = [torch.cuda.Stream(me.device) for _ in range(2)], random.Random(4)
        for n in range(total):
            layer, i = order.choice(layers), order.randrange(16)
            if order.random() < 0.5:
                sides[n % 2].wait_stream(sides[1 - n % 2])  # otherwise the library's own order has to do
            with torch.cuda.stream(sides[n % 2]):
                layer.note(i, layer.call(i))
        wrong = [layer.settle() for layer in layers]
        modules(me, layers[0], window)
        wrong[0] += layers[0].settle()
        texts += [layer.verdict(out, w) for layer, w in zip(layers, wrong, strict=True)]
        window.close()
    seconds = time.monotonic() - start
    out.text = f"{total} calls on 2 streams and 22 of a module a precision in {seconds:.1f} s: {'; '.join(texts)}"
    return out


@torch.no_grad()
def modules(me: Rank, layer: Layer, window: object) -> None:
    """Compare a module with the layer's bits: under autocast, and with its parameters moved as FSDP does."""
    p = layer.problem
    module = megamoe.MegaMoE(
        p.hidden, p.intermediate, p.num_experts, p.top_k, group_of(me), precision=p.precision, max_tokens=p.max_tokens,
        backend="mega", reserve_sms=0, window=window, init_seed=0, device=me.device,
    )  # fmt: skip
    masters = make_weights(p, device=me.device, quantize=False)
    full = {"w13": masters.w13, "w2": masters.w2}
    for name, w in full.items():
        getattr(module, name).copy_(w)
    for i, inputs in enumerate(layer.inputs):
        rest = (inputs.topk_ids, inputs.topk_weights)
        with torch.autocast("cuda", torch.bfloat16):
            layer.note(i, module(inputs.x.float(), *rest))
    for i, inputs in enumerate(layer.inputs[:6]):
        for name, w in full.items():
            parameter = getattr(module, name)
            if i % 2:  # FSDP1: freed and filled again
                storage = parameter.untyped_storage()
                size = storage.size()
                torch.cuda.synchronize()
                storage.resize_(0)
                storage.resize_(size)
                parameter.copy_(w)
            else:  # FSDP2: another tensor
                parameter.data = w.clone()
        layer.note(i, module(inputs.x, inputs.topk_ids, inputs.topk_weights))
    module.check()
    module.close()


# --- kill: ranks are plain processes, joined by gloo, which neither aborts nor ends the others


def kill(args: argparse.Namespace, ranks: int) -> Outcome:
    """Start the ranks, wait for the survivors' reports within the bound."""
    out, start = Outcome(""), time.monotonic()
    for mode, edge in (("between", "routes_ready"), ("during", "partials_ready")):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        command = [sys.executable, __file__, "kill", "--ranks", str(ranks), "--bound", str(args.bound)]
        command += ["--port", str(store.port), "--mode", mode, "--as-rank"]
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        begin = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        processes = [subprocess.Popen([*command, str(r)], **begin) for r in range(ranks)]
        named, deadline = False, time.monotonic() + args.bound
        for rank, process in enumerate(processes):
            try:
                text = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                out.failures.append(f"{mode}: rank {rank} still ran after {args.bound:g} s")
                process.kill()
                process.communicate()
                continue
            if rank == ranks - 1:
                died = process.returncode == -signal.SIGKILL
                out.require(died, f"{mode}: the victim ended with {process.returncode}: {text}")
                continue
            report = json.loads(text.splitlines()[-1]) if process.returncode == 0 and text else {}
            kind, message = report.get("kind"), report.get("message", "no report")
            note = f"killed {mode} calls, rank {rank}: {kind}: {message} ({report.get('seconds', -1):.1f} s)"
            out.notes.append(note)
            good = kind in ("ProtocolTimeout", "PeerFault") and report["seconds"] < TIMEOUT_S + 3
            out.require(good and report["again"] == "WindowBroken", note)
            named |= edge in message and f"rank {ranks - 1}" in message
        out.require(named, f"{mode}: no survivor named edge {edge} and rank {ranks - 1}")
    out.text = f"time-out {TIMEOUT_S:g} s, killed between and during calls, {time.monotonic() - start:.1f} s in all"
    return out


def killed_rank(args: argparse.Namespace) -> None:
    """Be one of kill's processes. Leaves by os._exit, past all destructors."""
    rank, ranks = args.as_rank, args.ranks
    faulthandler.dump_traceback_later(args.bound, exit=True)
    store = dist.TCPStore("127.0.0.1", args.port, None, False, timedelta(seconds=args.bound))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=args.bound))
    me = Rank(rank, ranks, device_of(rank))
    layer = Layer(me, problem_of(me), count=2, timeout_s=TIMEOUT_S).start()
    gather(me, None)
    if rank == ranks - 1:
        if args.mode == "during":
            layer.call(0)  # publishes its routes, then waits for the others
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.5)
    start = time.monotonic()
    error = error_of(lambda: (layer.call(0), layer.backend.check()))
    report = {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - start}
    report["again"] = type(error_of(lambda: layer.call(0))).__name__
    print(json.dumps(report), flush=True)
    os._exit(0)


SCENARIOS = {f.__name__: f for f in (calls, graph, nccl, late, mismatch, busy, streams)}
NEED_TWO = ("nccl", "kill", "late", "mismatch")


def run_rank(rank: int, name: str, args: argparse.Namespace) -> Outcome:
    """Run a scenario on this rank; its own watchdog ends it with a traceback."""
    faulthandler.dump_traceback_later(args.bound, exit=True)
    out = SCENARIOS[name](Rank(rank, dist.get_world_size(), device_of(rank)), args)
    faulthandler.cancel_dump_traceback_later()
    return out


def report(name: str, ranks: int, outcomes: list[Outcome]) -> int:
    failures = [f"rank {rank}: {text}" for rank, out in enumerate(outcomes) for text in out.failures]
    print(f"{'FAIL' if failures else 'ok'}: {name} x{ranks}: {outcomes[0].text}", flush=True)
    for line in failures + [note for out in outcomes for note in out.notes]:
        print(f"  {line}", flush=True)
    return int(bool(failures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("scenario", nargs="+", choices=[*SCENARIOS, "kill"])
    add("--ranks", type=int, help="default: all GPUs")
    add("--calls", type=int, help="of calls (10000), nccl (1000) or streams (400)")
    add("--replays", type=int, default=1000, help="of graph")
    add("--precision", nargs="+", default=["bf16", "fp8"], choices=("bf16", "fp8"))
    add("--bound", type=float, default=300.0, metavar="S", help="longest a scenario may take")
    for hidden in ("--as-rank", "--port"):
        add(hidden, type=int, help=argparse.SUPPRESS)
    add("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        killed_rank(args)
    if "LOCAL_RANK" in os.environ:
        return under_torchrun(args)
    ranks = args.ranks or min(8, torch.cuda.device_count())
    print(header(), flush=True)
    code = 0
    for name in args.scenario:
        try:
            if name in NEED_TWO and ranks < 2:
                raise RuntimeError("needs 2 ranks")
            if name == "kill":
                outcomes = [kill(args, ranks)]
            else:
                outcomes = launch(run_rank, ranks, name, args, timeout_s=args.bound + 30, backend=BACKENDS)
            code |= report(name, ranks, outcomes)
        except Exception as error:  # a rank's, with its traceback; or TimeoutError
            print(f"FAIL: {name} x{ranks}: {error}", flush=True)
            code = 1
    return code


def under_torchrun(args: argparse.Namespace) -> int:
    rank, code = int(os.environ["LOCAL_RANK"]), 0
    device_of(rank)
    dist.init_process_group(BACKENDS, timeout=timedelta(seconds=args.bound))
    for name in args.scenario:
        out = run_rank(rank, name, args)
        outcomes = gather(Rank(rank, dist.get_world_size(), torch.device("cpu")), out)
        code |= report(name, len(outcomes), outcomes) if rank == 0 else any(o.failures for o in outcomes)
    dist.destroy_process_group()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
