"""Scenarios of tools/soak.py beside NCCL: half of the ranks launch it first, and may wait for it, half the kernel."""

import argparse
import random
import time

import torch
import torch.distributed as dist

from bench.ranks import Rank
from bench.soak.layer import CheckedBackend, Outcome, problem_of
from bench.soak.training import Trainer, shared_layers, verdict


class AllGathers:
    """All-gathers on a second stream; whether their results are right is noted on the device."""

    def __init__(self, me: Rank) -> None:
        self.me, self.side = me, torch.cuda.Stream(me.device)
        self.bad: list[torch.Tensor] = []
        self.piece = torch.zeros(1 << 20, device=me.device)
        self.gathered = torch.zeros(me.size, 1 << 20, device=me.device)
        self.ranks = torch.arange(me.size, device=me.device, dtype=torch.float32)[:, None]
        torch.cuda.synchronize()
        self.exchange(0)  # makes the communicator
        torch.cuda.synchronize()

    def exchange(self, n: int) -> None:
        """Queue one, whose values n tells from the others'."""
        with torch.cuda.stream(self.side):
            self.piece.fill_(n + self.me.rank)
            dist.all_gather_into_tensor(self.gathered.view(-1), self.piece)
            self.bad.append((self.gathered - self.ranks != n).any())

    def judge(self, out: Outcome) -> None:
        """Wait for the device; note how many were wrong."""
        torch.cuda.synchronize()
        broken = int(torch.stack(self.bad).sum())
        out.require(broken == 0, f"{broken} all-gathers gave a wrong result")


def hold_host(me: Rank, n: int) -> bool:
    """In a few of the steps let the host wait for all that is on the device, by name or as an allocator does."""
    if n % 20 == 5:
        torch.cuda.synchronize(me.device)
    elif n % 20 == 15:
        torch.empty((1 << 25) + (n << 21), dtype=torch.uint8, device=me.device)
        torch.cuda.empty_cache()
    return n % 10 == 5


def nccl(me: Rank, args: argparse.Namespace) -> Outcome:
    """All-gathers on a second stream: half of the ranks launch NCCL first, and may wait for it, half the kernel."""
    total, out = args.calls or 1000, Outcome("")
    # reserve_sms: the default, for training
    layer = CheckedBackend(me, problem_of(me), reserve_sms=None).start()
    out.require(layer.backend.share.join_ns > 0, "a launch waits for all SMs beside NCCL")
    gathers, ctas = AllGathers(me), set()
    me.gather(None)
    order, wrong, start = random.Random(3), 0, time.monotonic()
    for n in range(1, total + 1):
        i = order.randrange(len(layer.inputs))
        if me.rank < me.size // 2:
            gathers.exchange(n)
            hold_host(me, n)
        y = layer.call(i)
        if me.rank >= me.size // 2:
            gathers.exchange(n)
        layer.note(i, y)
        if n % 50 == 0 or n == total:
            wrong += layer.settle()
            layer.judge(i, y)
            ctas.add(layer.backend.num_ctas())
    gathers.judge(out)
    seconds = time.monotonic() - start
    text = layer.verdict(out, wrong)
    taken = f"{min(ctas)}..{max(ctas)} CTAs"
    out.text = f"{total} calls beside {total} all-gathers, {taken}, in {seconds:.1f} s: {text}"
    layer.backend.close()
    return out


def train_nccl(me: Rank, args: argparse.Namespace) -> Outcome:
    """Training beside all-gathers on a second stream, before it on half of the ranks and behind it on the others.

    In a few steps the former's hosts wait for their device in between: so for an all-gather that comes behind launches
    which need theirs.
    """
    out, steps, start = Outcome(""), args.calls or 300, time.monotonic()
    with torch.enable_grad():  # so that launches take the SMs that are free
        window, layers = shared_layers(me, "bf16", reserve_sms=None)
    trainer = Trainer(me, layers, steps)
    gathers, early = AllGathers(me), me.rank < me.size // 2
    # the first step is collective, and all ranks' hosts wait for each other in it
    for batch in trainer.draw(0):
        trainer.backward(*batch, trainer.forward(*batch), add=False)
    torch.cuda.synchronize()
    me.gather(None)
    held = 0

    def step(n: int) -> None:
        nonlocal held
        batches = trainer.draw(n)
        for forwards in (True, False):  # an all-gather beside these and one beside the backwards
            if early:
                gathers.exchange(2 * n + forwards)
                held += hold_host(me, n)
            if forwards:
                passed = [trainer.forward(*batch) for batch in batches]
            else:
                for batch, saved in zip(batches, passed, strict=True):
                    total = trainer.backward(*batch, saved, add=True)
                trainer.update(total, clear=True)
            if not early:
                gathers.exchange(2 * n + forwards)

    runs = [trainer.run(steps, window.check, step) for _ in range(2)]
    gathers.judge(out)
    text = verdict(out, trainer, runs)
    out.require(layers[0].share.join_ns > 0, "a launch waits for all SMs beside NCCL")
    seconds = time.monotonic() - start
    out.require(held > 0 or not early, "no host waited for an all-gather")
    last = f"the last launch with {layers[0].num_ctas()} CTAs"
    told = f"{len(gathers.bad)} all-gathers, {held} of which the host waited for, {last}"
    out.text = f"2 x {steps} steps beside {told}, in {seconds:.1f} s: {text}"
    window.close()
    return out
