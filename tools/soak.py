#!/usr/bin/env python3
"""Long runs, and runs in which something goes wrong, of the kernel on the GPUs of this machine.

    python tools/soak.py calls --calls 10000       back to back, changing routings and sizes: always the same bits
    python tools/soak.py graph --replays 1000      one CUDA graph, its inputs changed in place
    python tools/soak.py nccl --calls 1000         beside an NCCL loop, launched in opposite orders on the ranks
    python tools/soak.py kill                      SIGKILL for the last rank, between and during forward, backward
    python tools/soak.py late mismatch             a rank comes too late; ranks that differ; then a reset
    python tools/soak.py busy streams              others hold SMs; two streams, shared window, moving weights
    python tools/soak.py train --steps 2000        training steps, all drawn anew; the run twice: the same bits
    python tools/soak.py train_graph train_nccl    a captured step, replayed; training beside an NCCL loop
    python tools/soak.py train_faults              backward late, of another layer or microbatch, with a foreign state
    torchrun --nproc-per-node 4 tools/soak.py calls    (not kill: torchrun ends all ranks when one dies)

Prints one line a scenario, and the messages that a fault produced. Exit code 1 when a result was wrong, an error was
missing or unnamed, or the time given by --bound was over.
"""

import argparse
import faulthandler
import os
import random
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from common import Rank, header
from soak_backward import train_faults
from soak_faults import kill, killed_rank, late, mismatch
from soak_layer import Layer, Outcome, device_of, gather, group_of, problem_of
from soak_train import hold_host, train, train_graph, train_nccl

import megamoe
from megamoe.core import env
from megamoe.core.table import PRECISIONS, TRAINED
from megamoe.testing import backend_of, launch, make_weights
from megamoe.window.window import Window

BACKENDS = "cpu:gloo,cuda:nccl"
BLOCK = 500  # calls between two looks at the device
BUSY_CYCLES = 3_000_000_000  # about 1.5 s
SPINNERS = 16


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
    """All-gathers on a second stream: half of the ranks launch NCCL first, and may wait for it, half the kernel."""
    total, out = args.calls or 1000, Outcome("")
    layer = Layer(me, problem_of(me), reserve_sms=None).start()  # None: the default, for training
    out.require(layer.backend.share.join_ns > 0, "a launch waits for all SMs beside NCCL")
    side, bad, ctas = torch.cuda.Stream(me.device), [], set()
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
            hold_host(me, n)
        y = layer.call(i)
        if me.rank >= me.size // 2:
            exchange(n)
        layer.note(i, y)
        if n % 50 == 0 or n == total:
            wrong += layer.settle()
            layer.judge(i, y)
            ctas.add(layer.backend.num_ctas())
    torch.cuda.synchronize()
    broken = int(torch.stack(bad).sum())
    out.require(broken == 0, f"{broken} all-gathers gave a wrong result")
    seconds = time.monotonic() - start
    text = layer.verdict(out, wrong)
    taken = f"{min(ctas)}..{max(ctas)} CTAs"
    out.text = f"{total} calls beside {total} all-gathers, {taken}, in {seconds:.1f} s: {text}"
    layer.backend.close()
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
    cases += [
        ("spinners on all, SMs reserved", small, spin, me.size),
        ("GEMMs on all", layer, multiply, me.size),
    ]
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
    out, total, texts, start = Outcome(""), args.calls or 400, [], time.monotonic()
    for precision in args.precision:
        window = Window(problem_of(me, precision), group_of(me), device=me.device)
        shared = [problem_of(me, precision, intermediate=i) for i in (512, 768)]
        layers = [Layer(me, p, window=window).start() for p in shared]
        sides, order = [torch.cuda.Stream(me.device) for _ in range(2)], random.Random(4)
        for n in range(total):
            layer, i = order.choice(layers), order.randrange(16)
            if order.random() < 0.5:
                sides[n % 2].wait_stream(
                    sides[1 - n % 2]
                )  # otherwise the library's own order has to do
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


SCENARIOS = {f.__name__: f for f in (calls, graph, nccl, late, mismatch, busy, streams)}
SCENARIOS |= {f.__name__: f for f in (train, train_graph, train_nccl, train_faults)}
NEED_TWO = ("nccl", "kill", "late", "mismatch", "train_nccl")
NEED_NCCL = ("nccl", "train_nccl")


def run_rank(rank: int, name: str, args: argparse.Namespace) -> Outcome:
    """Run a scenario on this rank; its own watchdog ends it with a traceback."""
    faulthandler.dump_traceback_later(args.bound, exit=True)
    out = SCENARIOS[name](Rank(rank, dist.get_world_size(), device_of(rank)), args)
    faulthandler.cancel_dump_traceback_later()
    return out


def report(name: str, ranks: int, outcomes: list[Outcome]) -> int:
    failures = [
        f"rank {rank}: {text}" for rank, out in enumerate(outcomes) for text in out.failures
    ]
    print(f"{'FAIL' if failures else 'ok'}: {name} x{ranks}: {outcomes[0].text}", flush=True)
    for line in failures + [note for out in outcomes for note in out.notes]:
        print(f"  {line}", flush=True)
    return int(bool(failures))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("scenario", nargs="+", choices=[*SCENARIOS, "kill"])
    add("--ranks", type=int, help="default: all GPUs")
    add("--calls", type=int, help="of calls (10000), nccl (1000), streams (400), train_nccl (300)")
    add("--replays", type=int, default=1000, help="of graph and train_graph")
    add("--steps", type=int, default=2000, help="of train")
    add("--precision", nargs="+", default=TRAINED, choices=PRECISIONS)
    add("--bound", type=float, default=300.0, metavar="S", help="longest a scenario may take")
    for hidden in ("--as-rank", "--port"):
        add(hidden, type=int, help=argparse.SUPPRESS)
    add("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        killed_rank(args)
    if "LOCAL_RANK" in os.environ:
        return under_torchrun(args)
    ranks, gpus = args.ranks or min(8, torch.cuda.device_count()), torch.cuda.device_count()
    if gpus == 0 or not 0 < ranks <= (ranks if env.share_gpus() else gpus):
        raise SystemExit(
            f"soak.py needs a GPU for each rank, or MEGAMOE_SHARE_GPUS=1: {gpus} found"
        )
    print(header(), flush=True)
    first = Rank(0, ranks, torch.device("cuda"))
    for precision in args.precision:
        print(
            f"{precision}: {megamoe.memory_report(problem_of(first, precision))['line']}",
            flush=True,
        )
    code = 0
    for name in args.scenario:
        try:
            refuse(name, ranks)
            if name == "kill":
                outcomes = [kill(args, ranks)]
            else:
                outcomes = launch(
                    run_rank, ranks, name, args, timeout_s=args.bound + 30, backend=BACKENDS
                )
            code |= report(name, ranks, outcomes)
        except Exception as error:  # a rank's, with its traceback; or TimeoutError
            print(f"FAIL: {name} x{ranks}: {error}", flush=True)
            code = 1
    return code


def refuse(name: str, ranks: int) -> None:
    """Raise RuntimeError if the scenario cannot run on so many ranks."""
    if name in NEED_TWO and ranks < 2:
        raise RuntimeError("needs 2 ranks")
    if name in NEED_NCCL and ranks > torch.cuda.device_count():
        raise RuntimeError("needs a GPU for each rank")


def under_torchrun(args: argparse.Namespace) -> int:
    rank, ranks, code = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), 0
    device_of(rank)
    backend = backend_of(ranks, BACKENDS)
    dist.init_process_group(backend, timeout=timedelta(seconds=args.bound))
    for name in args.scenario:
        refuse(name, ranks)
        out = run_rank(rank, name, args)
        outcomes = gather(Rank(rank, dist.get_world_size(), torch.device("cpu")), out)
        code |= (
            report(name, len(outcomes), outcomes)
            if rank == 0
            else any(o.failures for o in outcomes)
        )
    dist.destroy_process_group()
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
