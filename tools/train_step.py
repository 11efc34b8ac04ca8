#!/usr/bin/env python3
"""Demo: train a small byte-level MoE language model with expert parallelism, and check it.

    python tools/train_step.py                       spawns its ranks: every GPU, or 2 on a CPU
    torchrun --nproc-per-node 4 tools/train_step.py  the same, started by torchrun

Attention and embeddings are data-parallel, the experts of every MegaMoE layer are spread over the ranks. Another
model, on one rank or with another backend, must agree, because expert parallelism changes where things are computed,
not what. It is compared twice: along the run it repeats single steps from the run's own parameters, which have to give
the same loss and gradients; at the end it repeats the first steps on its own, which has to give the same loss curve.
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Rank, add_launch_arguments, launch
from demo_model import VOCABULARY, ByteLM, ModelConfig, corpus
from torch import Tensor, nn

CPU_MODEL = ModelConfig()
GPU_MODEL = ModelConfig(
    hidden=512, intermediate=512, num_experts=32, top_k=4, num_blocks=4, num_heads=8, context=256
)
WINDOW = 20  # steps that a reported loss averages over
REPLAYS = 6  # steps of the run that the other model repeats
# Two runs of one recipe differ by the order of sums alone, which training then amplifies: measured on 2 CPU ranks over
# several seeds, 5e-7 nats at step 1, up to 5e-4 by step 25, up to 2e-2 from step 40 on.
# On GPUs they part at once, since bf16 products round differently in batches of other shapes and backward sums with
# atomics. On 4x H200, 2026-11-21, staged on 4 ranks and on one were 1.9e-2 nats apart by step 25 and 3.8e-2 by step 60,
# gradient norms up to 26 %; one program run twice was 2.6e-2 apart at step 50 as a mean over 20 steps, and single steps
# of mega and staged up to 1.1e-1. So only means over 20 steps are compared there, beside the replays.
EARLY_STEPS = {"cpu": 25, "cuda": 0}
SMOOTHING = {"cpu": 1, "cuda": WINDOW}


@dataclass
class Curves:
    """What a run leaves behind, one entry a step."""

    losses: list[float] = field(default_factory=list)  # means over the global batch
    norms: list[list[float]] = field(default_factory=list)  # gradients: dense part, experts

    def smoothed(self, window: int) -> list[float]:
        """Return losses averaged over the last `window` steps, from the first full window on."""
        sums = [sum(self.losses[i - window : i]) for i in range(window, len(self.losses) + 1)]
        return [total / window for total in sums]


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


class MasterAdamW:
    """AdamW on fp32 copies of the parameters, since bf16 parameters swallow small updates."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float().clone() for p in parameters]
        self.adam = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, rate: float, scale: Tensor) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad.float() * scale
            parameter.grad = None
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
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


def batch_of(
    text: Tensor, recipe: Recipe, step: int, rank: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's slice of the step's global batch: inputs and targets, [batch / size, context]."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    context = recipe.model.context
    starts = torch.randint(len(text) - context - 1, (recipe.batch,), generator=generator)
    starts = starts.chunk(size)[rank]
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def global_norms(dense: list[Tensor], experts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Norms [2] of the dense and of all experts' gradients: dense ones are equal everywhere, experts' are not."""
    squares = [
        torch.stack([g.float().square().sum() for g in part]).sum() for part in (dense, experts)
    ]
    dist.all_reduce(squares[1], group=group)
    return torch.stack(squares).sqrt()


def differentiate(
    model: ByteLM,
    recipe: Recipe,
    text: Tensor,
    step: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> float:
    """Return the loss of a step, the mean over the global batch, and leave its gradients in the parameters."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    inputs, targets = (t.to(device) for t in batch_of(text, recipe, step, rank, size))
    logits, balance = model(inputs)
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))

    # Every rank differentiates its share of the global mean. An expert's gradient has then
    # gathered all shares on its way back through the dispatch; the dense one is summed here.
    ((loss + recipe.balance_weight * balance) / size).backward()
    dense = model.dense_parameters()
    flat = torch.cat([p.grad.flatten() for p in dense] + [loss.detach().view(1) / size])
    dist.all_reduce(flat, group=group)
    for p, gradient in zip(dense, flat[:-1].split([p.numel() for p in dense]), strict=True):
        p.grad.copy_(gradient.view_as(p))
    return flat[-1].item()


class Replay:
    """Another model that repeats steps of a run from the run's parameters.

    It lives on `group`, the whole world or rank 0 alone, whose ranks then hold other experts. `active`: this rank takes
    part. Whatever differs is one step's arithmetic; no training amplifies it.
    """

    def __init__(
        self,
        recipe: Recipe,
        text: Tensor,
        device: torch.device,
        group: dist.ProcessGroup,
        active: bool,
        **moe_options,
    ) -> None:
        self.recipe, self.text, self.device, self.group = recipe, text, device, group
        self.steps = {round(i * (recipe.steps - 1) / (REPLAYS - 1)) for i in range(REPLAYS)}
        self.same_layout = dist.get_world_size() == (dist.get_world_size(group) if active else 1)
        self.apart = {"loss": 0.0, "dense": 0.0, "experts": 0.0}  # the largest differences
        self.model: ByteLM | None = None
        if active:
            tokens = recipe.batch // dist.get_world_size(group) * recipe.model.context
            with torch.device(device):
                self.model = ByteLM(recipe.model, group, max_tokens=tokens, **moe_options)

    def of_all_ranks(self, tensor: Tensor, model: ByteLM) -> Tensor:
        """Return a tensor of experts as the other model's rank holds it. Collective."""
        if self.same_layout:
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

    def check(self, model: ByteLM, step: int, loss: float) -> None:
        """Repeat a step whose gradients `model` still holds. Collective over the world."""
        theirs = [
            [(p.detach(), p.grad) for p in model.dense_parameters()],
            [
                (self.of_all_ranks(p.detach(), model), self.of_all_ranks(p.grad, model))
                for p in model.expert_parameters()
            ],
        ]
        if self.model is None:
            return
        ours = [self.model.dense_parameters(), self.model.expert_parameters()]
        with torch.no_grad():
            for part, values in zip(ours, theirs, strict=True):
                for p, (value, _) in zip(part, values, strict=True):
                    p.copy_(value)
                    p.grad = None
        other = differentiate(self.model, self.recipe, self.text, step, self.device, self.group)
        errors = {"loss": abs(loss - other)}
        for name, part, values in zip(("dense", "experts"), ours, theirs, strict=True):
            squares = torch.zeros(2, device=self.device)
            for p, (_, gradient) in zip(part, values, strict=True):
                squares[0] += (p.grad.float() - gradient.float()).square().sum()
                squares[1] += p.grad.float().square().sum()
            dist.all_reduce(squares, group=self.group)
            errors[name] = (squares[0] / squares[1]).sqrt().item()
        for name, error in errors.items():
            # not max(), which would drop a NaN
            self.apart[name] = error if not error <= self.apart[name] else self.apart[name]

    def close(self) -> None:
        """Free what the model shares with other ranks. Collective."""
        if self.model is not None:
            self.model.close()


def train(
    recipe: Recipe,
    text: Tensor,
    device: torch.device,
    group: dist.ProcessGroup,
    label: str,
    stop_after: int | None = None,
    replay: Replay | None = None,
    **moe_options,
) -> Curves:
    """Train on the ranks of `group`, all of which call."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tokens_per_rank = recipe.batch // size * recipe.model.context
    with torch.device(device):
        model = ByteLM(recipe.model, group, max_tokens=tokens_per_rank, **moe_options)
    model.initialise(recipe.seed)
    dense, experts = model.dense_parameters(), model.expert_parameters()
    optimizers = [MasterAdamW(ps, recipe.weight_decay) for ps in (dense, experts)]

    steps = min(recipe.steps, stop_after or recipe.steps)
    progress = Progress(steps, label, active=rank == 0)
    curves = Curves()
    for step in range(steps):
        loss = differentiate(model, recipe, text, step, device, group)
        if replay is not None and step in replay.steps:
            replay.check(model, step, loss)
        norms = global_norms([p.grad for p in dense], [p.grad for p in experts], group)
        scale = (recipe.max_grad_norm / (norms.norm() + 1e-6)).clamp(max=1.0)
        for optimizer in optimizers:
            optimizer.step(recipe.rate(step), scale)

        curves.losses.append(loss)
        curves.norms.append(norms.tolist())
        recent = curves.losses[-WINDOW:]
        tokens = (step + 1) * recipe.batch * recipe.model.context
        progress.update(step + 1, tokens, sum(recent) / len(recent))
    progress.close()
    model.close()
    return curves


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
    steps = ", ".join(str(step + 1) for step in sorted(replay.steps))
    return [
        (
            f"losses of steps {steps}, each from equal parameters,",
            replay.apart["loss"],
            args.early_tolerance,
            " nats",
        ),
        ("dense gradients there", replay.apart["dense"], args.gradient_tolerance, ""),
        ("experts' gradients there", replay.apart["experts"], args.gradient_tolerance, ""),
    ]


def checks_of_curves(
    mine: Curves, other: Curves, args: argparse.Namespace, device: torch.device
) -> list[Check]:
    """Judge two runs. Losses alone would not do: AdamW hides a wrong scale of gradients. Their norms show it."""
    steps = min(len(mine.losses), len(other.losses))
    window = min(SMOOTHING[device.type], steps)
    pairs = zip(mine.smoothed(window), other.smoothed(window), strict=False)
    means = f"means over {window} steps of " if window > 1 else ""
    checks = [
        (f"{means}losses 1..{steps}", max(abs(a - b) for a, b in pairs), args.tolerance, " nats")
    ]
    if early := min(EARLY_STEPS[device.type], steps):
        losses = zip(mine.losses[:early], other.losses[:early], strict=True)
        norms = list(zip(mine.norms[:early], other.norms[:early], strict=True))
        apart = [max(abs(a[part] / b[part] - 1) for a, b in norms) for part in (0, 1)]
        of = f"steps 1..{early}"
        checks += [
            (f"losses of {of}", max(abs(a - b) for a, b in losses), args.early_tolerance, " nats"),
            (f"norms of dense gradients, {of},", apart[0], args.norm_tolerance, ""),
            (f"norms of experts' gradients, {of},", apart[1], args.norm_tolerance, ""),
        ]
    return checks


def worker(me: Rank, args: argparse.Namespace) -> int:
    on_gpu = me.device.type == "cuda"
    steps = args.steps or (400 if on_gpu else 300)
    batch = args.batch or (16 * me.size if on_gpu else 32)
    recipe = Recipe(GPU_MODEL if on_gpu else CPU_MODEL, batch=batch, steps=steps, seed=args.seed)
    if batch % me.size:
        raise SystemExit(f"--batch {batch} does not divide over {me.size} ranks")
    backend = "staged" if args.backend == "auto" and not on_gpu else args.backend
    text = corpus()
    m = recipe.model
    me.print(
        f"{len(text) / 1e6:.2f} MB of English; {m.num_blocks} blocks of attention and {m.num_experts} experts "
        f"(top {m.top_k}) on {me.size} ranks, {me.device.type}, backend {backend}, {args.precision}"
    )
    world = dist.group.WORLD
    options = {"precision": args.precision}
    how = args.compare
    if how == "auto":
        how = "one-rank" if me.size > 1 else "staged"
    names = {"staged": ("staged", "backend staged's"), "one-rank": ("1 rank", "the one-rank run's")}
    replay = None
    if how != "none":
        others, active = (world, True) if how == "staged" else (dist.new_group([0]), me.is_first)
        other_backend = "staged" if how == "staged" else backend
        here = (recipe, text, me.device, others)
        replay = Replay(*here, active, backend=other_backend, **options)
    curves = train(
        recipe,
        text,
        me.device,
        world,
        f"{me.size} ranks",
        replay=replay,
        backend=backend,
        **options,
    )
    last = curves.losses[-WINDOW:]
    final = sum(last) / len(last)
    code = 0
    good = final < args.target
    me.print(
        f"{'PASS' if good else 'FAIL'}: loss fell from {curves.losses[0]:.3f} (ln 256 = {math.log(256):.3f}) to "
        f"{final:.3f} nats per byte; target {args.target:g}"
    )
    code |= not good

    if replay is not None:
        replay.close()
        stop = args.compare_steps or min(60, recipe.steps)
        label, name = names[how]
        if active:
            other = train(*here, label, stop, backend=other_backend, **options)
        if me.is_first:
            checks = checks_of_replay(replay, args) + checks_of_curves(
                curves, other, args, me.device
            )
            code |= not report(checks, name)
        dist.barrier()
    return int(code)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", default="auto", choices=("auto", "staged", "mega", "emulate"))
    add("--precision", default="bf16", choices=("bf16", "fp8"))
    add("--steps", type=int, help="training steps; default 400 on GPUs, 300 on a CPU")
    add("--batch", type=int, help="sequences per step over all ranks")
    add("--seed", type=int, default=1)
    add(
        "--target",
        type=float,
        default=2.5,
        help="the final loss has to be below this, nats per byte",
    )
    add("--compare", default="auto", choices=("auto", "one-rank", "staged", "none"))
    add("--compare-steps", type=int, help="steps of the comparison, default 60")
    add("--tolerance", type=float, default=0.05, help="largest difference of losses, nats")
    early = EARLY_STEPS["cpu"]
    add(
        "--early-tolerance",
        type=float,
        default=5e-3,
        help=f"the same from equal parameters, and in the first {early} steps on a CPU",
    )
    add("--norm-tolerance", type=float, default=0.05, help="of gradient norms there, relative")
    add(
        "--gradient-tolerance",
        type=float,
        default=0.05,
        help="of gradients from equal parameters: norm of the difference over the norm",
    )
    add_launch_arguments(parser)
    return launch(worker, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
