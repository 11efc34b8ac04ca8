"""A backend that trains without a GPU: staged mathematics, with a state that its backward pass cannot do without."""

from __future__ import annotations

from typing import ClassVar

import torch

from megamoe.backends.staged import StagedBackend, moe, without_rows_behind
from megamoe.formats.weights import ExpertWeights
from megamoe.group.order import BACKWARD
from megamoe.layer import functional
from megamoe.layer.backward import _recording_gradients

COMPLETE = 0x5A


class Saving(StagedBackend):
    """state: COMPLETE, then ids (int32) and weights (fp32) of max_tokens tokens."""

    calls: ClassVar[
        list
    ] = []  # of all instances: ("forward" | "forward_train", ) or ("backward", needs, weights, turned)

    def __init__(self, problem, group=None):
        super().__init__(problem, group)
        self.routes = problem.max_tokens * problem.top_k
        self.state_bytes = 16 + 8 * self.routes

    def forward(self, *args):
        self.calls.append(("forward",))
        return super().forward(*args)

    def parts(self, state, tokens):
        routes = state[16:].view(2, 4 * self.routes)
        shape = (self.problem.max_tokens, self.problem.top_k)
        ids = routes[0].view(torch.int32).view(shape)[:tokens]
        return ids, routes[1].view(torch.float32).view(shape)[:tokens]

    def forward_train(self, x, topk_ids, topk_weights, weights, num_tokens_device=None):
        self.calls.append(("forward_train",))
        y = super().forward(x, topk_ids, topk_weights, weights, num_tokens_device)
        state = torch.empty(self.state_bytes, dtype=torch.uint8).fill_(0xFF)
        ids, scores = self.parts(state, x.shape[0])
        if num_tokens_device is not None:
            topk_ids = without_rows_behind(topk_ids, num_tokens_device)
        ids.copy_(topk_ids)
        scores.copy_(topk_weights)
        state[0] = COMPLETE
        return y, state

    def backward(
        self,
        dy,
        x,
        topk_ids,
        weights,
        state,
        needs,
        *,
        num_tokens_device=None,
        into=None,
        only_weights=False,
        turned=None,
    ):
        self.calls.append(("backward", tuple(needs), weights, turned))
        assert not (only_weights and any(needs[:2]))
        assert self.problem.formats.w.scaled == (turned is not None)
        if weights.w13_scale is not None:
            weights = weights.dense(self.problem, torch.bfloat16)
        assert int(state[0]) == COMPLETE, "not the state of a forward pass"
        assert dy.is_contiguous()
        assert dy.data_ptr() % 16 == 0
        assert weights.w13.dtype == weights.w2.dtype == torch.bfloat16
        ids, scores = self.parts(state.clone(), x.shape[0])
        sources = (x, scores, weights.w13, weights.w2, weights.b13, weights.b2)
        leaves = [
            None if source is None else source.detach().requires_grad_(need)
            for source, need in zip(sources, needs, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        with _recording_gradients():
            mark, dense = self.mark.ints(BACKWARD), ExpertWeights(*leaves[2:])
            y, _ = moe(self.problem, self.group, leaves[0], ids, leaves[1], dense, mark)
            found = iter(torch.autograd.grad(y, wanted, dy, materialize_grads=True))
        grads = [next(found) if any(leaf is w for w in wanted) else None for leaf in leaves]
        for index, name in ((2, "w13"), (3, "w2")):
            if grads[index] is not None and name in (into or {}):
                into[name].add_(grads[index])
                grads[index] = None
        return grads


functional.BACKENDS["saving"] = ("saving", "Saving")
