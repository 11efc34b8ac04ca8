"""How the demo compares a run with another model: step by step from equal parameters, and as a curve of its own."""

import argparse
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.demo.model import ByteLM
from bench.demo.training import Curves, Setup

# Two runs of one recipe differ by the order of sums alone, which training then amplifies, in every run differently: a
# check on whole curves fails by chance. What is compared:
# - single steps from equal parameters and with equal choices of experts, all along the run: nothing is amplified. When
#   the other model's router chose by itself, experts' gradients were 1.4e-2 to 5.1e-2 apart on 2x H200, over 8 seeds
#   (2026-11-22), and that by tipped choices: with noise of 4e-3 on y, on a CPU, 2.8e-2 to 3.2e-2 with them, 3.2e-3 to
#   4.1e-3 without (3 seeds). A wrong scale by a tenth is 1e-1.
# - the first steps of two runs, before rounding matters. On 2 CPU ranks, several seeds: 5e-7 nats at step 1, up to 5e-4
#   by step 25, of 5e-3; but 2e-2 from step 40 on. On GPUs runs part at once (bf16 products round differently in batches
#   of other shapes, backward sums with atomics: 1.9e-2 nats by step 25, gradient norms 26 %), so one step: that both
#   begin with the same model.
REPLAYED_ON = {"cpu": 6, "cuda": 11}  # by device: steps of the run that the other model repeats
FREE_STEPS = {"cpu": 25, "cuda": 1}


def largest(values: Iterable[float]) -> float:
    """Return the maximum, NaN if there is one: max() would drop it."""
    return float(np.max(list(values)))


def replayed(steps: int, replays: int) -> set[int]:
    """Return the steps that are taken again from equal parameters: the first, the last, others between."""
    return {round(i * (steps - 1) / (replays - 1)) for i in range(replays)}


def distance(mine: Iterable[Any], theirs: Iterable[Any], setup: Setup) -> float:
    """Return the norm of the gradients' difference over the norm of theirs, of all ranks. Collective."""
    squares = torch.zeros(2, device=setup.device)
    for a, b in zip(mine, theirs, strict=True):
        if a is None or b is None:
            raise RuntimeError("a parameter got no gradient")
        squares[0] += (a.float() - b.float()).square().sum()
        squares[1] += b.float().square().sum()
    dist.all_reduce(squares, group=setup.group)
    return (squares[0] / squares[1]).sqrt().item()


class Replay:
    """Another model that repeats steps of a run from the run's parameters.

    Whatever differs is one step's arithmetic; no training amplifies it. Nor does the router: the other model takes the
    experts that the run's chose, since a rounding that tips a choice over moves a token's whole gradient. The other
    model lives on the whole world, or on rank 0 alone, which then holds all experts. `setup`: None on a rank that has
    no part in it.
    """

    def __init__(self, setup: Setup | None, num_steps: int, replays: int) -> None:
        self.setup = setup
        self.steps = replayed(num_steps, replays)
        self.same_experts = setup is not None and setup.size == dist.get_world_size()
        self.apart = {"loss": 0.0, "dense": 0.0, "experts": 0.0}  # the largest differences
        self.model = None if setup is None else setup.model()

    def inspect(self, model: ByteLM, step: int, loss: float) -> None:
        """Repeat a step whose gradients `model` still holds, if it is one of ours. Collective over the world."""
        if step not in self.steps:
            return
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {
            "dense": [(p.detach(), p.grad) for p in model.dense_parameters()],
            "experts": [
                (self._gathered(p.detach(), model), self._gathered(p.grad, model))
                for p in model.expert_parameters()
            ],
        }
        chosen = [self._routes(block.moe.chosen) for block in model.blocks]
        if self.setup is None or self.model is None:
            return
        for block, ids in zip(self.model.blocks, chosen, strict=True):
            block.moe.given = ids
        ours = {"dense": self.model.dense_parameters(), "experts": self.model.expert_parameters()}
        with torch.no_grad():
            for name, values in parts.items():
                for p, (value, _) in zip(ours[name], values, strict=True):
                    p.copy_(value)
                    p.grad = None
        self._note("loss", abs(loss - self.setup.differentiate(self.model, step)))
        for name, values in parts.items():
            given = (gradient for _, gradient in values)
            self._note(name, distance(given, (p.grad for p in ours[name]), self.setup))

    def close(self) -> None:
        """Free what the model shares with other ranks. Collective."""
        if self.model is not None:
            self.model.close()

    def _note(self, name: str, apart: float) -> None:
        self.apart[name] = largest((self.apart[name], apart))

    def _routes(self, ids: Tensor) -> Tensor:
        """Return expert ids [T, K] of this rank's tokens, or of all ranks' in order. Collective over the world."""
        if self.same_experts:
            return ids
        parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, ids.contiguous())
        return torch.cat(parts)

    def _gathered(self, tensor: Tensor, model: ByteLM) -> Tensor:
        """Return a tensor of experts as the other model's ranks hold it. Collective over the world."""
        if self.same_experts:
            return tensor
        problem = model.blocks[0].moe.experts.problem
        parts = []
        for rank in range(dist.get_world_size()):
            part = tensor.new_empty(problem.num_local_experts(rank), *tensor.shape[1:])
            if rank == dist.get_rank():
                part.copy_(tensor)
            dist.broadcast(part.view(torch.uint8), src=rank)
            parts.append(part)
        return torch.cat(parts)


Check = tuple[str, float, float, str]  # what is equal, how far apart it is, tolerance, unit


def report(checks: list[Check], name: str) -> bool:
    """Print how far two runs are apart; return whether that is within the tolerances."""
    good = True
    for what, apart, tolerance, unit in checks:
        good &= apart <= tolerance  # NaN is not good
        verdict = "PASS" if apart <= tolerance else "FAIL"
        print(
            f"{verdict}: {what} equal {name}: {apart:.1e}{unit} apart, tolerance {tolerance:g}",
            flush=True,
        )
    return good


def checks_of_replay(replay: Replay, args: argparse.Namespace) -> list[Check]:
    """Judge single steps from equal parameters."""
    apart, nats, relative = replay.apart, args.loss_tolerance, args.gradient_tolerance
    steps = ", ".join(str(step + 1) for step in sorted(replay.steps))
    return [
        (f"losses of steps {steps}, each from equal parameters,", apart["loss"], nats, " nats"),
        ("dense gradients there", apart["dense"], relative, ""),
        ("experts' gradients there", apart["experts"], relative, ""),
    ]


def checks_of_curves(mine: Curves, other: Curves, args: argparse.Namespace) -> list[Check]:
    """Judge the first steps of two runs. Losses alone would not do: AdamW hides a wrong scale of gradients."""
    steps = min(len(mine.losses), len(other.losses))
    losses = zip(mine.losses, other.losses, strict=False)
    norms = list(zip(mine.norms, other.norms, strict=False))
    apart = [largest(abs(a[part] / b[part] - 1) for a, b in norms) for part in (0, 1)]
    of = f"steps 1..{steps} of a run of its own" if steps > 1 else "step 1 of a run of its own"
    nats = largest(abs(a - b) for a, b in losses)
    return [
        (f"losses of {of}", nats, args.loss_tolerance, " nats"),
        (f"norms of dense gradients, {of},", apart[0], args.norm_tolerance, ""),
        (f"norms of experts' gradients, {of},", apart[1], args.norm_tolerance, ""),
    ]
