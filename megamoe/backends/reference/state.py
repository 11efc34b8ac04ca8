"""Store the routes of a training forward of the oracle as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError

COMPLETE = 0x6D6F65
HEADER_BYTES = 40  # int64: COMPLETE, number of the backend, fingerprint of the problem, tokens, number of the call


class State:
    """Header, topk_ids [T, K] int64, topk_weights [T, K] fp32; room for max_tokens."""

    @staticmethod
    def num_bytes(problem: Problem) -> int:
        return HEADER_BYTES + problem.max_tokens * problem.top_k * 12

    @staticmethod
    def pack(
        problem: Problem, number: int, topk_ids: Tensor, topk_weights: Tensor, call: int = 0
    ) -> Tensor:
        """Return the state [num_bytes] uint8; ids behind the call's tokens are -1. call: its number."""
        numbers = [COMPLETE, number, problem.fingerprint(), topk_ids.shape[0], call]
        header = torch.tensor(numbers, device=topk_ids.device)
        parts = header, topk_ids.long().flatten(), topk_weights.flatten()
        used = torch.cat([part.view(torch.uint8) for part in parts])
        state = used.new_zeros(State.num_bytes(problem))
        state[: used.numel()] = used
        return state

    @staticmethod
    def unpack(
        problem: Problem, number: int, state: Tensor, topk_ids: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Return topk_ids, topk_weights, the call's number. ArgumentError for a state of another layer or routes."""
        expected, room = f"one that a forward of this layer has kept ({number})", problem.max_tokens
        size = State.num_bytes(problem)
        if state.dtype != torch.uint8 or tuple(state.shape) != (size,):
            raise ArgumentError("state", f"{state.dtype} {list(state.shape)}", f"uint8 [{size}]")
        header = state[:HEADER_BYTES].clone().view(torch.int64).tolist()
        if header[0] != COMPLETE:
            raise ArgumentError("state", "one that no forward completed", expected)
        if header[1:3] != [number, problem.fingerprint()]:
            raise ArgumentError("state", f"that of layer {header[1]}", expected)
        tokens, top_k = topk_ids.shape
        if header[3] != tokens or tokens > room:
            raise ArgumentError("state", f"that of {header[3]} tokens", f"one of {tokens}")
        split = HEADER_BYTES + tokens * top_k * 8
        ids = state[HEADER_BYTES:split].clone().view(torch.int64).view(tokens, top_k)
        scores = state[split : split + tokens * top_k * 4].clone().view(torch.float32)
        if bool(((ids != topk_ids) & (ids != -1)).any()):
            raise ArgumentError("state", "that of other topk_ids", "that of the same call")
        return ids, scores.view(tokens, top_k), header[4]
