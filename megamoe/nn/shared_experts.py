"""Compute shared experts in the layer's own launch: a shared expert of n * I is n experts of I that every token takes.

The activation works on each column separately and the down projection is a sum, so the parts add up to the whole. Every
rank holds all parts after its routed experts, and its tokens use its own: none of their rows crosses ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.statistics import Statistics
from megamoe.core.config import MAX_TOP_K, Activation, Problem, activation_by_name
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import SCALE_GROUP
from megamoe.core.transforms import lasting
from megamoe.experts.placement import SlotsOfShared
from megamoe.formats.versions import made_of
from megamoe.formats.weights import (
    ExpertWeights,
    check_experts,
    check_tensor,
    expected_weights,
    masters_of,
)
from megamoe.layer import main_grad
from megamoe.layer.rows import finite_factor


class SharedExperts:
    """Add a shared expert to a layer as n extra experts per rank.

    Create the layer with `problem` of this object: it has E + n R experts, the last n of each rank are the shared
    parts, and K + n routes per token. It takes no placement. The attribute `count` is n.

    Args:
        problem: The problem of the routed experts.
        intermediate: Width of the shared expert, or of several together: n * I.
        activation: Activation of the shared expert, which must be that of the routed ones. Default: that one.
        routed_scaling_factor: Factor of topk_weights only. (The layer's own argument multiplies the shared expert,
            too.) Default: 1.0.
        device: Device of topk_ids. Default: "cpu".

    Raises:
        ConfigError: The shared expert cannot be cut into parts of width I, or there are too many experts.
    """

    def __init__(
        self,
        problem: Problem,
        intermediate: int,
        *,
        activation: str | Activation | None = None,
        routed_scaling_factor: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if not isinstance(problem, Problem):
            raise ConfigError("problem", type(problem).__name__, "megamoe.Problem")
        width = problem.intermediate
        if not isinstance(intermediate, int) or intermediate < 1 or intermediate % width:
            raise ConfigError("intermediate", intermediate, f"a multiple of {width}, the experts'")
        if activation is not None and activation_by_name(activation) != problem.activation:
            raise ConfigError("activation", activation, f"{problem.activation}, the experts'")
        self.count, self.routed_problem = intermediate // width, problem
        self.routed_scaling_factor = finite_factor(routed_scaling_factor)
        top_k = problem.top_k + self.count
        if top_k > MAX_TOP_K:
            found = f"{intermediate}, {self.count} times {width}"
            expected = f"at most {MAX_TOP_K - problem.top_k} times: each is one more expert a token"
            raise ConfigError("intermediate", found, expected)
        experts = problem.num_experts + self.count * problem.ep_size
        self.problem = SlotsOfShared(**vars(problem) | {"num_experts": experts, "top_k": top_k})
        slots = [e + self.count * problem.rank_of_expert(e) for e in range(problem.num_experts)]
        end = self.problem.expert_begin(problem.rank + 1)
        with lasting():
            self._slots = torch.tensor(slots, device=device)  # [E]
            self._own = torch.arange(end - self.count, end, device=device)  # [n]

    def routes(
        self, topk_ids: Tensor, topk_weights: Tensor, shared_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Append the shared parts to the routes of a batch; differentiable. It does not wait and may be captured.

        Args:
            topk_ids: [..., K] int32 or int64. Ids outside [0, E) are dropped.
            topk_weights: [..., K] of any float type.
            shared_weights: [..., 1] of any float type, the weight of each token's shared expert. Default: 1.

        Returns:
            Ids [..., K + n], and weights [..., K + n] fp32.

        Raises:
            ArgumentError: A shape or dtype is wrong. Only this rank raises.
        """
        if not isinstance(topk_ids, Tensor):
            raise ArgumentError("topk_ids", type(topk_ids).__name__, "a tensor")
        experts, lead = self.routed_problem.num_experts, tuple(topk_ids.shape[:-1])
        shape, device = (*lead, self.routed_problem.top_k), self._slots.device
        floats = torch.float32, torch.bfloat16, torch.float16, torch.float64
        options: dict[str, Any] = {"device": device, "contiguous": False}
        check_tensor("topk_ids", topk_ids, shape, (torch.int32, torch.int64), **options)
        check_tensor("topk_weights", topk_weights, shape, floats, **options)
        if shared_weights is None:
            shared_weights = torch.ones((*lead, 1), dtype=torch.float32, device=device)
        check_tensor("shared_weights", shared_weights, (*lead, 1), floats, **options)
        valid = (topk_ids >= 0) & (topk_ids < experts)
        routed = self._slots[topk_ids.long().where(valid, 0)].where(valid, -1)
        ids = torch.cat([routed, self._own.expand(*lead, -1)], -1)
        scores = topk_weights.float()
        if self.routed_scaling_factor != 1.0:
            scores = scores * self.routed_scaling_factor
        every = torch.cat([scores, shared_weights.float().expand(*lead, self.count)], -1)
        return ids.to(topk_ids.dtype), every

    def parts(self, whole: ExpertWeights) -> ExpertWeights:
        """Cut a shared expert into n experts; differentiable.

        Args:
            whole: The shared expert without a first dimension: w13 [P*n*I, H] or [P, n*I, H], gate rows first, w2 [H,
                n*I], b13 [P*n*I], b2 [H], and scales as for one expert. In the format of the routed experts, or bf16.
                If the layer has biases and `whole` has none, they are zero.

        Returns:
            ExpertWeights of n experts.

        Raises:
            ArgumentError: A shape or dtype is wrong, or parts end within a 128-block of scales.
        """
        check_experts("shared", whole)
        n, planes = self.count, self.problem.activation.planes
        if whole.w13.dim() == 3 and len(whole.w13) == planes:  # as checkpoints are read
            whole = replace(whole, w13=whole.w13.flatten(0, 1))
        expected, device = self._whole_shapes(whole), whole.w13.device
        for name, (shape, dtype) in expected.items():
            value = getattr(whole, name)
            check_tensor(f"shared.{name}", value, shape, dtype, device, contiguous=False)
        for name in whole.named().keys() - expected.keys():
            raise ArgumentError(f"shared.{name}", "given", "None, as the routed experts have it")
        made = {}
        for name, value in whole.named().items():
            if name in ("w13", "w13_scale", "b13"):
                made[name] = value.unflatten(0, (planes, n, -1)).transpose(0, 1).flatten(1, 2)
            elif name == "w2_scale" and self.problem.formats.w.whole_rows:
                made[name] = value.repeat(n, 1, 1)  # that of each part, too
            elif name in ("w2", "w2_scale"):
                made[name] = value.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
        if self.problem.bias:
            rows, hidden = planes * self.problem.intermediate, self.problem.hidden
            zeros = partial(torch.zeros, dtype=torch.float32, device=device)
            made.setdefault("b13", zeros(n, rows))
            rest = zeros(n, hidden)
            b2 = [] if whole.b2 is None else [whole.b2[None]]  # added once
            made["b2"] = torch.cat([*b2, rest])[:n]
        return ExpertWeights(**made)

    def _whole_shapes(self, whole: ExpertWeights) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return name -> (shape, dtype) of what parts() is given."""
        n, width = self.count, self.problem.intermediate
        of_part = replace(self.problem, ep_size=1, rank=0, num_experts=1)
        stored, masters = of_part.formats.w, masters_of(of_part, whole.w13)
        if (
            masters is None
            and stored.scaled
            and not stored.whole_rows
            and n > 1
            and width % SCALE_GROUP
        ):
            found = f"of parts of {width}, which end within a block of scales"
            raise ArgumentError("shared.w13", found, "bf16 masters")
        expected = {}
        for name, ((_, rows, *rest), dtype) in expected_weights(of_part, masters).items():
            if name in ("w13", "w13_scale", "b13"):
                shape = (n * rows, *rest)
            elif name == "w2_scale" and stored.whole_rows:
                shape = (rows, *rest)
            else:
                shape = (rows, *(n * columns for columns in rest[:1]), *rest[1:])
            if getattr(whole, name) is not None or not name.startswith("b"):
                expected[name] = shape, dtype
        return expected

    def empty(self, device: torch.device | str = "cpu", masters: bool = True) -> ExpertWeights:
        """Allocate the weights of the layer: L routed experts, then n shared parts. See split().

        Args:
            device: The device. Default: "cpu".
            masters: True: bf16; False: the precision's format. Default: True.

        Returns:
            ExpertWeights with undefined values.
        """
        wanted = expected_weights(self.problem, torch.bfloat16 if masters else None).items()
        return ExpertWeights(**{n: torch.empty(s, dtype=d, device=device) for n, (s, d) in wanted})

    def split(self, weights: ExpertWeights) -> tuple[ExpertWeights, ExpertWeights]:
        """Split the layer's weights into views of the routed experts and of the shared parts.

        Args:
            weights: The weights of the layer.

        Returns:
            The routed and the shared ExpertWeights.
        """
        num = self.routed_problem.num_local_experts()
        named = weights.named().items()
        routed, shared = {n: t[:num] for n, t in named}, {n: t[num:] for n, t in named}
        return ExpertWeights(**routed), ExpertWeights(**shared)

    def join(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights,
        *,
        accumulate_into_main_grad: bool = False,
    ) -> ExpertWeights:
        """Join routed experts and shared parts into the weights that the layer takes; the gradient goes back to both.

        Views that split() returned, and parameters over them, are joined without a copy. Other tensors are copied,
        under torch.compile in every call.

        Args:
            routed: L experts.
            shared: n experts, as parts() returns them.
            accumulate_into_main_grad: True: add gradients of w13 and w2 to the `main_grad` of these tensors, for a
                layer with this option. The kernel adds directly if these are adjacent, too. Default: False.

        Returns:
            ExpertWeights of L + n experts.

        Raises:
            ArgumentError: The tensors do not belong together.
        """
        check_experts("routed", routed)
        check_experts("shared", shared)
        problem, device = self.problem, routed.w13.device
        of = replace(problem, num_experts=self.routed_problem.num_experts)
        routed.validate(of, device, masters=True)
        cut, made = methodcaller("split", (len(routed.w13), self.count)), {}
        for name, mine in routed.named().items():
            given = theirs = getattr(shared, name)
            shape = self.count, *mine.shape[1:]
            flat = (self.count, *mine.flatten(1, 2).shape[1:]) if mine.dim() > 3 else shape
            if isinstance(theirs, Tensor) and tuple(theirs.shape) == flat:
                theirs = theirs.view(shape)  # planes apart
            elif _apart(name, theirs, mine, self.problem.activation.planes):
                theirs = theirs.flatten(1, 2)
            check_tensor(f"shared.{name}", theirs, shape, mine.dtype, device, contiguous=False)
            adds = accumulate_into_main_grad and name in main_grad.NAMES
            adds_to = (mine, given) if adds else None
            whole = main_grad.joined((mine, theirs), _as_one, cut, _copied, adds_to)
            wanted = mine.requires_grad or theirs.requires_grad
            made[name] = made_of(whole, (mine, theirs), trains=wanted)
        for name in shared.named().keys() - made.keys():
            raise ArgumentError(f"shared.{name}", "given", "None, as the routed experts have it")
        return ExpertWeights(**made)

    def routed(self, statistics: Statistics) -> Statistics:
        """Return a layer's statistics without the shared parts.

        Args:
            statistics: Result of the layer's statistics().

        Returns:
            Statistics of the routed experts.
        """
        num = self.routed_problem.num_local_experts()
        return replace(statistics, tokens_per_expert=statistics.tokens_per_expert[:num])


def _apart(name: str, theirs: Any, mine: Tensor, planes: int) -> bool:
    """Return True if one tensor has separate planes and the other has them concatenated."""
    if name not in ("w13", "b13") or not isinstance(theirs, Tensor):
        return False
    return theirs.dim() == mine.dim() + 1 and theirs.shape[1] == planes


def _as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Return rows of two adjacent tensors as one view, or None."""
    routed, shared = parts
    if torch.compiler.is_compiling() or not _lies_behind(routed, shared):
        return None
    shape = len(routed) + len(shared), *routed.shape[1:]
    return routed.detach().as_strided(shape, routed.stride())


def _copied(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate as integers: torch.cat lacks e4m3 on some devices, and autocast to fp16 casts bf16."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[parts[0].element_size()]
    return torch.cat([t.view(bits) for t in parts]).view(parts[0].dtype)


def _lies_behind(routed: Tensor, shared: Tensor) -> bool:
    """Return True if both are one tensor in memory, the shared experts after the routed ones."""
    if routed.untyped_storage().data_ptr() != shared.untyped_storage().data_ptr():
        return False
    if not len(routed) or routed.stride() != shared.stride():
        return False
    end = routed.storage_offset() + len(routed) * routed.stride(0)
    return shared.storage_offset() == end and routed.is_inference() == shared.is_inference()
