"""Create random inputs, typical routings, and weights that do not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.formats.weights import ExpertWeights, expected_weights

# Inputs have other seeds: a row of x that equals a row of weights would make sums of many standard deviations.
# Below 2^32: of a seed, torch's CPU generator takes 32 bits.
WEIGHT_SEEDS = 1 << 31
ROUTINGS = ("uniform", "hot", "one_rank", "dropped", "duplicates", "all_dropped")
OVERLOADED, SKEWED = "one_expert", "skewed"  # routings beside them


@dataclass
class Inputs:
    """What one rank feeds the layer."""

    x: Tensor  # [T, H] bf16
    topk_ids: Tensor  # [T, K]
    topk_weights: Tensor  # [T, K] fp32, rows sum to 1

    def to(self, device: torch.device | str) -> Inputs:
        """Return the same on another device."""
        return Inputs(*(t.to(device) for t in (self.x, self.topk_ids, self.topk_weights)))


def make_routing(
    problem: Problem, num_tokens: int, kind: str = "uniform", *, generator: torch.Generator
) -> Tensor:
    """Return topk_ids [T, K] int64 on the generator's device.

    uniform: different experts of a token, all experts alike. hot: one expert takes a route of each
        token.
    one_rank: all experts on the last rank that has any. dropped: a third of the ids is -1 or >= E.
    duplicates: a token may choose an expert several times. all_dropped: nothing is valid. one_expert: every route of
        every token names one expert. skewed: as uniform, but the n-th of the experts, in an order that all ranks share,
        is drawn with a weight of 1/n.
    Problems with fewer experts than top_k always get duplicates.
    """
    device, experts, top_k = generator.device, problem.num_experts, problem.top_k
    shape = (num_tokens, top_k)
    if kind == "all_dropped":
        return torch.full(shape, -1, device=device)
    if kind == "one_expert":
        return torch.full(shape, experts // 2, device=device)
    if kind == "one_rank":
        rank = problem.rank_of_expert(experts - 1)
        begin = problem.expert_begin(rank)
        return torch.randint(begin, experts, shape, generator=generator, device=device)
    if kind == "duplicates" or experts < top_k:
        return torch.randint(experts, shape, generator=generator, device=device)
    drawn: Any = {"generator": generator, "dtype": torch.float32, "device": device}
    scores = torch.rand(num_tokens, experts, **drawn)
    if kind == "hot":
        scores[:, experts // 2] = 2.0
    if kind == SKEWED:  # Gumbel's noise: the largest are draws without repetition
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
        scores = -(-scores.clamp_min(1e-30).log()).log() - (order.to(device) + 1).log()
    ids = scores.topk(top_k, dim=1).indices
    if kind == "dropped":
        dice = torch.rand(shape, **drawn)
        ids = ids.masked_fill(dice < 0.2, -1).masked_fill(dice > 0.87, experts)
    elif kind not in ("uniform", "hot", SKEWED):
        known = ", ".join((*ROUTINGS, OVERLOADED, SKEWED))
        raise ValueError(f"kind is {kind!r}, expected one of {known}")
    return ids


def make_inputs(
    problem: Problem,
    num_tokens: int,
    *,
    rank: int | None = None,
    seed: int = 0,
    routing: str = "uniform",
    device: torch.device | str = "cpu",
    ids_dtype: torch.dtype = torch.int64,
) -> Inputs:
    """Draw the inputs of one rank (default: problem.rank); each rank gets its own."""
    rank = problem.rank if rank is None else rank
    generator = torch.Generator(device=device).manual_seed(seed * 64 + rank)
    drawn: Any = {"generator": generator, "dtype": torch.float32, "device": device}
    x = torch.randn(num_tokens, problem.hidden, **drawn)
    ids = make_routing(problem, num_tokens, routing, generator=generator)
    weights = torch.rand(num_tokens, problem.top_k, **drawn) + 0.05
    weights = weights / weights.sum(1, keepdim=True)
    return Inputs(x.bfloat16(), ids.to(ids_dtype), weights)


def make_weights(
    problem: Problem,
    *,
    rank: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    quantize: bool = True,
) -> ExpertWeights:
    """Draw the weights of one rank's experts, each from its own seed, stored as the precision does.

    quantize: False returns the bf16 masters.
    """
    rank = problem.rank if rank is None else rank
    shapes = expected_weights(replace(problem, rank=rank), torch.bfloat16)
    made = {n: torch.empty(s, dtype=dtype, device=device) for n, (s, dtype) in shapes.items()}
    stds = {"w13": problem.hidden**-0.5, "w2": problem.intermediate**-0.5, "b13": 0.2, "b2": 0.2}
    generator = torch.Generator(device=device)
    drawn: Any = {"generator": generator, "dtype": torch.float32, "device": device}
    for local in range(problem.num_local_experts(rank)):
        expert = problem.expert_begin(rank) + local
        generator.manual_seed(WEIGHT_SEEDS + seed * 1_000_003 + 17 * expert)
        for name, tensor in made.items():
            tensor[local] = torch.randn(tensor.shape[1:], **drawn) * stds[name]
    weights = ExpertWeights(**made)
    return weights.quantized(problem) if quantize else weights
