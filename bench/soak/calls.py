"""Calls of tools/soak.py: back to back, captured, with SMs taken by others, on two streams; always the same bits."""

import argparse
import random
import time

import torch

import megamoe
from bench.ranks import Rank
from bench.soak.layer import BLOCK, CheckedBackend, Outcome, Static, each_precision, problem_of
from megamoe.backends.call import Call
from megamoe.testing import make_weights
from megamoe.window.window import Window

BUSY_CYCLES = 3_000_000_000  # about 1.5 s
SPINNERS = 16


def calls(me: Rank, args: argparse.Namespace) -> Outcome:
    """Back-to-back calls in a random order of the inputs, with pauses on single ranks."""
    out, total, texts, start = Outcome(""), args.calls or 10000, [], 0.0
    for precision in args.precision:
        layer = CheckedBackend(me, problem_of(me, precision)).start()
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
    out = Outcome("")

    def replays(precision: str) -> str:
        layer = CheckedBackend(me, problem_of(me, precision)).start()
        static = Static(layer.problem, me.device)
        (x, ids, scores), y = vars(static.inputs).values(), torch.zeros_like(static.inputs.x)
        call = Call(x, ids, scores, layer.weights, static.count, y)
        layer.backend.forward(call)
        layer.backend.check()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            layer.backend.forward(call)
        order, wrong = random.Random(2), 0
        for n in range(1, args.replays + 1):
            i = order.randrange(len(layer.inputs))
            static.fill(layer.inputs[i])
            captured.replay()
            found = y[: layer.inputs[i].x.shape[0]]
            layer.note(i, found)
            if n % 50 == 0:
                layer.note(i, layer.call(i))  # an ordinary call between replays
            if n % BLOCK == 0 or n == args.replays:
                wrong += layer.settle()
                layer.judge(i, found)
        text = layer.verdict(out, wrong)
        del captured
        layer.backend.close()
        return text

    out.text = f"{args.replays} replays a precision {each_precision(args, replays)}"
    return out


def busy(me: Rank, args: argparse.Namespace) -> Outcome:
    """Others hold SMs of rank 0, then of all ranks, while a call is made."""
    out, texts = Outcome(""), []
    layer = CheckedBackend(me, problem_of(me), count=2).start()
    small = CheckedBackend(me, problem_of(me), count=2, reserve_sms=2 * SPINNERS).start()
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
        me.gather(None)
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
    out, total = Outcome(""), args.calls or 400

    def on_two(precision: str) -> str:
        window = Window(problem_of(me, precision), me.group, device=me.device)
        shared = [problem_of(me, precision, intermediate=i) for i in (512, 768)]
        layers = [CheckedBackend(me, p, window=window).start() for p in shared]
        sides, order = [torch.cuda.Stream(me.device) for _ in range(2)], random.Random(4)
        for n in range(total):
            layer, i = order.choice(layers), order.randrange(16)
            if order.random() < 0.5:  # otherwise the library's own order has to do
                sides[n % 2].wait_stream(sides[1 - n % 2])
            with torch.cuda.stream(sides[n % 2]):
                layer.note(i, layer.call(i))
        wrong = [layer.settle() for layer in layers]
        modules(me, layers[0], window)
        wrong[0] += layers[0].settle()
        texts = [layer.verdict(out, w) for layer, w in zip(layers, wrong, strict=True)]
        window.close()
        return "; ".join(texts)

    told = each_precision(args, on_two)
    out.text = f"{total} calls on 2 streams and 22 of a module a precision {told}"
    return out


@torch.no_grad()
def modules(me: Rank, layer: CheckedBackend, window: object) -> None:
    """Compare a module with the layer's bits: under autocast, and with its parameters moved as FSDP does."""
    p = layer.problem
    module = megamoe.MegaMoE(
        p.hidden, p.intermediate, p.num_experts, p.top_k, me.group, precision=p.precision, max_tokens=p.max_tokens,
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
