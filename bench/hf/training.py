"""Training of a transformers model: what one run leaves behind, and two models' steps from equal parameters."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.demo.checks import Check, distance, largest, replayed
from bench.demo.curves import memory
from bench.demo.training import MasterAdamW, Progress, Setup
from bench.hf.model import (
    OURS,
    load,
    parts,
    restore,
    routes_given,
    routes_kept,
    snapshot,
    whole,
)
from bench.ranks import Rank
from megamoe.adapters.library_parameters import local

COMPARED_STEPS = 5  # steps that both models take from equal parameters
UNTIMED = 3  # steps at the start that no time is taken of


@dataclass
class Run:
    """One training run of this rank."""

    losses: list[float] = field(default_factory=list)  # nats per byte, means over all ranks
    seconds: list[float] = field(default_factory=list)
    snapshots: dict[int, list[Tensor]] = field(default_factory=dict)  # before these steps
    weights: dict[str, Tensor] = field(default_factory=dict)  # all of them, after the last
    peak: str = ""
    called: int = 0  # layers that megamoe computed

    def tokens_per_s(self, setup: Setup) -> float:
        """Return the tokens of all ranks per second, by the median step."""
        late = self.seconds[UNTIMED:] or self.seconds
        return setup.recipe.batch * setup.recipe.model.context / statistics.median(late)


def differentiate(model: Any, setup: Setup, step: int) -> float:
    """Leave the gradients of a step in the parameters; return its loss, the mean over the global batch."""
    return mean(backward(model, *setup.batch(step)), setup)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def backward(
    model: Any,
    inputs: Tensor,
    targets: Tensor,
    loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Tensor:
    """Leave the gradients of this rank's batch in the parameters; return its loss, without a wait for the device."""
    out = model(input_ids=inputs, use_cache=False, output_router_logits=True)
    loss = loss_of(out.logits, targets)
    (loss + model.config.router_aux_loss_coef * out.aux_loss).backward()
    return loss.detach()


def mean(value: Tensor, setup: Setup) -> float:
    value = value.clone()
    dist.all_reduce(value, group=setup.group)
    return value.item() / setup.size


def train(
    folder: Path, experts: str, setup: Setup, me: Rank, called: Callable[[], int] = int
) -> Run:
    """Train the model of a folder with these experts. Collective. called: tells how many layers have been."""
    run, recipe = Run(), setup.recipe
    gc.collect()
    memory(me.device)  # of this run alone, from here on
    model = load(folder, experts, me)
    optimizer = MasterAdamW(list(model.parameters()), recipe.weight_decay)
    progress = Progress(recipe.steps, experts, active=me.is_first)
    for step in range(recipe.steps):
        if experts == OURS and step in replayed(recipe.steps, COMPARED_STEPS):
            run.snapshots[step] = snapshot(model)
        start = time.perf_counter()
        run.losses.append(differentiate(model, setup, step))
        optimizer.step(recipe.rate(step))
        if me.device.type == "cuda":
            torch.cuda.synchronize()
        run.seconds.append(time.perf_counter() - start)
        progress.update(step + 1, (step + 1) * recipe.batch * recipe.model.context, run.losses[-1])
    progress.close()
    run.peak, run.called = memory(me.device), called()
    if experts == OURS:
        run.weights = whole(model)
    return run


def compare(
    folder: Path, other: str, setup: Setup, run: Run, me: Rank, tolerances: tuple[float, float]
) -> list[Check]:
    """Take steps of a run again with both models, from the run's parameters and by the same routes. Collective.

    Nothing is amplified by training, no rounding tips a route over. tolerances: of losses in nats, of gradients.
    """
    mine, theirs = load(folder, OURS, me), load(folder, other, me)
    apart: dict[str, list[float]] = {"again": [], "loss": []}
    for step, values in run.snapshots.items():
        restore(mine, values)
        restore(theirs, values)
        with routes_kept(mine) as ids:
            loss = differentiate(mine, setup, step)
        apart["again"].append(abs(loss - run.losses[step]))
        with routes_given(theirs, ids):
            apart["loss"].append(abs(loss - differentiate(theirs, setup, step)))
        for part, parameters in parts(mine).items():
            pair = gradients(parameters), gradients(parts(theirs)[part])
            apart.setdefault(part, []).append(distance(*pair, setup))
    steps = ", ".join(str(step + 1) for step in sorted(run.snapshots))
    nats, relative = tolerances
    return [
        ("losses of these steps in the run and again", largest(apart["again"]), nats, " nats"),
        (f"losses of steps {steps}, from equal parameters,", largest(apart["loss"]), nats, " nats"),
        ("dense gradients there", largest(apart["dense"]), relative, ""),
        ("routers' gradients there", largest(apart["routers"]), relative, ""),
        ("experts' gradients there", largest(apart["experts"]), relative, ""),
    ]


def gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """Return this rank's parts."""
    return [p.grad if p.grad is None else local(p.grad) for p in parameters]
