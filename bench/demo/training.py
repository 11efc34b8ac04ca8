"""The demo's training: a recipe, its steps on the ranks of a group, and what a run leaves behind."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.demo.model import VOCABULARY, ByteLM, ModelConfig

WINDOW = 20  # steps that a reported loss averages over


@dataclass
class Curves:
    """What a run leaves behind, one entry a step."""

    losses: list[float] = field(default_factory=list)  # means over the global batch
    norms: list[list[float]] = field(default_factory=list)  # gradients: dense part, experts


@dataclass(frozen=True)
class Recipe:
    """One optimisation; equal recipes give equal loss curves on any number of ranks."""

    model: ModelConfig
    batch: int  # sequences of all ranks together
    steps: int
    learning_rate: float = 2e-3
    warmup: int = 40
    weight_decay: float = 0.01
    balance_weight: float = 0.01
    max_grad_norm: float = 1.0
    seed: int = 1

    def rate(self, step: int) -> float:
        """Linear warmup, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Setup:
    """A recipe on the ranks of a group, all of which use it together. `options`: of the MoE layers."""

    recipe: Recipe
    text: Tensor  # uint8
    device: torch.device
    group: dist.ProcessGroup | None
    options: dict[str, Any]

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def model(self) -> ByteLM:
        """Build the model, its parameters undefined. Collective."""
        tokens = self.recipe.batch // self.size * self.recipe.model.context
        with torch.device(self.device):
            return ByteLM(self.recipe.model, self.group, max_tokens=tokens, **self.options)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's slice of the step's global batch: inputs and targets, [batch / size, context]."""
        recipe, context = self.recipe, self.recipe.model.context
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - context - 1, (recipe.batch,), generator=generator)
        starts = starts.chunk(self.size)[self.rank]
        rows = self.text[starts[:, None] + torch.arange(context + 1)].long().to(self.device)
        return rows[:, :-1], rows[:, 1:]

    def differentiate(self, model: ByteLM, step: int) -> float:
        """Return the loss of a step, the mean over the global batch, and leave its gradients in the parameters."""
        inputs, targets = self.batch(step)
        logits, balance = model(inputs)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))

        # Every rank differentiates its share of the global mean. An expert's gradient has then
        # gathered all shares on its way back through the dispatch; the dense one is summed here.
        ((loss + self.recipe.balance_weight * balance) / self.size).backward()
        dense = model.dense_parameters()
        flat = torch.cat([p.grad.flatten() for p in dense] + [loss.detach().view(1) / self.size])
        dist.all_reduce(flat, group=self.group)
        for p, gradient in zip(dense, flat[:-1].split([p.numel() for p in dense]), strict=True):
            p.grad.copy_(gradient.view_as(p))
        return flat[-1].item()


class MasterAdamW:
    """AdamW on fp32 copies of the parameters, since bf16 parameters swallow small updates.

    A parameter of the masters' dtype has no copy.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        weight_decay: float,
        dtype: torch.dtype = torch.float32,
        fused: bool | None = None,
    ) -> None:
        self.parameters: list[Any] = parameters
        self.masters: list[Any] = [
            p if p.dtype == dtype else p.detach().to(dtype) for p in parameters
        ]
        self.adam = torch.optim.AdamW(
            self.masters, betas=(0.9, 0.95), weight_decay=weight_decay, fused=fused
        )

    @torch.no_grad()
    def step(self, rate: float, scale: Tensor | None = None) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            gradient, parameter.grad = parameter.grad.to(master.dtype), None
            master.grad = gradient if scale is None else gradient * scale
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)


class Progress:
    """A tqdm bar where there is a terminal and tqdm, a line now and then elsewhere."""

    def __init__(self, steps: int, label: str, active: bool) -> None:
        self.steps, self.label, self.active = steps, label, active
        self.start, self.bar = time.monotonic(), None
        if active and sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self.bar = tqdm(total=steps, desc=label, unit="step", dynamic_ncols=True)
            except ImportError:
                pass

    def update(self, step: int, tokens: int, loss: float) -> None:
        if not self.active:
            return
        speed = tokens / (time.monotonic() - self.start)
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif step % 25 == 0 or step == self.steps:
            print(
                f"{self.label}: step {step:4d}/{self.steps}  loss {loss:.3f}  {speed:8,.0f} tokens/s  "
                f"{time.monotonic() - self.start:5.1f} s",
                flush=True,
            )

    def close(self) -> None:
        if self.bar:
            self.bar.close()


def global_norms(dense: list[Any], experts: list[Any], group: dist.ProcessGroup | None) -> Tensor:
    """Norms [2] of the dense and of all experts' gradients: dense ones are equal everywhere, experts' are not."""
    squares = [
        torch.stack([g.float().square().sum() for g in part]).sum() for part in (dense, experts)
    ]
    dist.all_reduce(squares[1], group=group)
    return torch.stack(squares).sqrt()


def final_loss(losses: list[float], window: int = WINDOW) -> float:
    """Return the mean of the last steps."""
    last = losses[-window:]
    return sum(last) / len(last)


def train(
    setup: Setup,
    label: str,
    stop_after: int | None = None,
    inspect: Callable[[ByteLM, int, float], None] | None = None,
) -> Curves:
    """Train. Collective. `inspect(model, step, loss)` is called when a step's gradients are there, before they act."""
    recipe, model = setup.recipe, setup.model()
    model.initialise(recipe.seed)
    dense, experts = model.dense_parameters(), model.expert_parameters()
    optimizers = [MasterAdamW(ps, recipe.weight_decay) for ps in (dense, experts)]

    steps = min(recipe.steps, stop_after or recipe.steps)
    progress = Progress(steps, label, active=setup.rank == 0)
    curves = Curves()
    for step in range(steps):
        loss = setup.differentiate(model, step)
        if inspect is not None:
            inspect(model, step, loss)
        norms = global_norms([p.grad for p in dense], [p.grad for p in experts], setup.group)
        scale = (recipe.max_grad_norm / (norms.norm() + 1e-6)).clamp(max=1.0)
        for optimizer in optimizers:
            optimizer.step(recipe.rate(step), scale)

        curves.losses.append(loss)
        curves.norms.append(norms.tolist())
        tokens = (step + 1) * recipe.batch * recipe.model.context
        progress.update(step + 1, tokens, final_loss(curves.losses))
    progress.close()
    model.close()
    return curves
