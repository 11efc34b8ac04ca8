"""Compute which rows each expert rank receives, and in which order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megamoe.core.config import Problem

CHUNK = 32  # tokens
BLOCK = 128  # rows


@dataclass(frozen=True)
class Rows:
    """The rows of one expert rank, in pool order. All tensors [M] int64.

    token is an index into the tokens of all home ranks put one after the other (or, after `keep`,
    into the kept ones). expert is local. pool_row counts the padding too: experts begin at
    multiples of 128.
    """

    home: Tensor
    token: Tensor
    k: Tensor
    expert: Tensor
    pool_row: Tensor
    counts: Tensor  # [C, L]: routes of a chunk to an expert; chunks interleaved over home ranks

    def keep(self, tokens: Tensor) -> Rows:
        """Return the rows of `tokens` [n] int64; `token` becomes the position in there."""
        highest = int(torch.cat([self.token, tokens, tokens.new_zeros(1)]).max())
        position = tokens.new_full((highest + 1,), -1)
        position[tokens] = torch.arange(tokens.numel(), device=tokens.device)
        token = position[self.token]
        mask = token >= 0
        kept = {name: getattr(self, name)[mask] for name in ("home", "k", "expert", "pool_row")}
        return replace(self, token=token[mask], **kept)


def route(problem: Problem, rank: int, topk_ids: list[Tensor]) -> Rows:
    """Order the rows of an expert rank by expert, chunk, k, token. topk_ids: [T, K] by home rank."""
    begin, num = problem.expert_begin(rank), problem.num_local_experts(rank)
    ranks, top_k = problem.ep_size, problem.top_k
    home, token, k, expert = [], [], [], []
    for source, ids in enumerate(topk_ids):
        local = ids.long() - begin
        t, which = torch.nonzero((local >= 0) & (local < num), as_tuple=True)
        home.append(torch.full_like(t, source))
        token.append(t)
        k.append(which)
        expert.append(local[t, which])
    home_M, token_M, k_M, expert_M = (torch.cat(parts) for parts in (home, token, k, expert))

    chunk = token_M // CHUNK * ranks + home_M
    longest = max(ids.shape[0] for ids in topk_ids)
    num_chunks = -(-longest // CHUNK) * ranks
    key = ((expert_M * num_chunks + chunk) * top_k + k_M) * CHUNK + token_M % CHUNK
    order = torch.argsort(key)  # keys are unique
    counts = torch.bincount(chunk * num + expert_M, minlength=num_chunks * num)

    of_expert = torch.bincount(expert_M, minlength=num)
    padded = -(-of_expert // BLOCK) * BLOCK
    shift = (padded.cumsum(0) - padded) - (of_expert.cumsum(0) - of_expert)
    expert_M = expert_M[order]
    pool_row = torch.arange(expert_M.numel(), device=expert_M.device) + shift[expert_M]

    offsets = [0, *accumulate(len(ids) for ids in topk_ids)]
    token_M = token_M + torch.tensor(offsets, device=token_M.device)[home_M]
    return Rows(
        home=home_M[order],
        token=token_M[order],
        k=k_M[order],
        expert=expert_M,
        pool_row=pool_row,
        counts=counts.reshape(num_chunks, num),
    )
