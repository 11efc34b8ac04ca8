"""Implement backend="mega", the persistent kernel: fill the arguments, launch, report faults; the host never waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.backends.call import Backend, Call, Gradients, GradRequest, StashedRows
from megamoe.backends.mega import launches
from megamoe.backends.mega.launches import Forward, LayerKernels, StashedWeights, Training
from megamoe.backends.mega.sm_share import Share, check_shares, share_of
from megamoe.backends.statistics import Statistics
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError, RankMismatch
from megamoe.formats.weights import ExpertWeights
from megamoe.group.group import Group, RankConfig
from megamoe.jit import cache
from megamoe.jit.source import FEW, Variant
from megamoe.launch import layout
from megamoe.launch.arguments import PROFILE_SLOTS, Plan
from megamoe.launch.launches import current_device, on_device, refuse_capture
from megamoe.launch.meetings import MAX_RUN, PAIR_CTAS
from megamoe.window.window import SOURCES, Window


def why_not_mega(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernel cannot run on this rank, or None. For the window, see Problem.why_no_window().

    Not collective. It reads only attributes.
    """
    variant = Variant(problem.precision, problem.activation.kind)
    if (lacking := launches.why_not(variant, device)) is not None:
        return lacking
    own = torch.cuda.current_device() if device.index is None else device.index
    if problem.ep_size > 1:
        for peer in range(torch.cuda.device_count()):
            if peer != own and not torch.cuda.can_device_access_peer(own, peer):
                return f"cuda:{own} has no peer access to cuda:{peer}"
    return None


class Stated(NamedTuple):
    """Describe a rank's launches to the other ranks, before memory is allocated."""

    sources: str  # key of the kernels' sources
    share: Share
    training: Share  # of launches that train

    @classmethod
    def here(cls, group: Group, reserve_sms: int | None) -> Stated:
        """Return this rank's description. Raises ConfigError if a variable is no number."""
        shares = (share_of(group, reserve_sms, trains) for trains in (False, True))
        return cls(cache.content_key(""), *shares)


def check_stated(by_rank: Mapping[int, Stated]) -> None:
    """Raise RankMismatch if ranks have different kernel sources, or only some ranks share their SMs."""
    first = min(by_rank)
    for rank, stated in by_rank.items():
        key, expected = stated.sources, by_rank[first].sources
        if key != expected:
            raise RankMismatch(f"{SOURCES} is {key} on rank {rank}, {expected} on rank {first}")
    check_shares([stated.share for stated in by_rank.values()])


class MegaBackend(Backend):
    """Run one layer on one rank. Creation, calls and close() are collective: every rank makes the same calls of a
    window in the same order, if necessary with zero tokens.

    window: The window to share with other layers. None: its own. pool_rows: Rows of the pool. Fewer rows cost passes
    and never change results. reserve_sms: SMs left to other kernels. None: see sm_share.py. timeout_s: Longest wait in
    a launch. pdl: Programmatic dependent launch. profile: In-kernel timestamps, see clock_ghz(). step_blocks: Length of
    a step of the tile order (csrc/megamoe/schedule/order.h). None: automatic. weight_gradients: Operands of weight
    gradients, "bf16" or, in FP8, "e4m3". few: False: do not use the kernel for few tokens. agreed: Every rank's
    Stated, if the ranks have compared it and the problem already. None: they compare them now.

    A CUDA graph may capture forward() after prepare(). The user's streams must order replays of one window's graphs and
    other calls of that window.
    """

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        window: Window | None = None,
        pool_rows: int | None = None,
        reserve_sms: int | None = None,
        timeout_s: float | None = None,
        pdl: bool = False,
        profile: bool = False,
        step_blocks: int | None = None,
        device: torch.device | str | None = None,
        weight_gradients: str = "bf16",
        few: bool = True,
        agreed: Mapping[int, Stated] | None = None,
    ) -> None:
        from megamoe.jit.driver import device_attribute

        if step_blocks and step_blocks < MAX_RUN:
            raise ConfigError("step_blocks", step_blocks, f"0 (automatic) or at least {MAX_RUN}")
        self.problem = problem
        self._owns_window = window is None
        self.group = group = Group.of(group)
        self.window = window or Window(problem, group, device=device, agreed=agreed is not None)
        if not self._owns_window:
            self.window.admit(problem)
            if agreed is None:
                self.window.agree(problem)
        if agreed is None:
            mine = partial(Stated.here, group, reserve_sms)
            agreed = self.window.group.agree("make_backend()", lambda: RankConfig(mine()))
            check_stated(agreed)
        self._stated = agreed
        self.device = self.window.device
        self._ordinal = self.device.index or 0
        self._on_gpu = self.device.type == "cuda"
        rows = layout.default_pool_rows(problem) if pool_rows is None else pool_rows
        self.plan = Plan(problem, rows, self.window.spec.max_tokens, weight_gradients)
        _ = self.plan.workspace  # raises WorkspaceTooSmall
        self.state_bytes = self.plan.train_state.bytes
        self.max_stashed = layout.max_stashed_passes(problem)
        self.variant = Variant(problem.precision, problem.activation.kind, profile)
        self.closed = False
        self.window.timeout_ns = int(env.timeout_s(timeout_s) * 1e9)
        reserve, *patience_ns = self.share = agreed[self.window.group.rank].share
        kernel = layout.few_kernel(problem, rows) if few else ""
        if kernel == "push" and self.share.join_ns:  # that kernel has no door
            kernel = ""
        sms = device_attribute(self._ordinal, "MULTIPROCESSOR_COUNT")
        if not 0 <= reserve <= sms - PAIR_CTAS:
            raise ConfigError("reserve_sms", reserve, f"0..{sms - PAIR_CTAS}")
        self.grid = (sms - reserve) // PAIR_CTAS * PAIR_CTAS
        self.profile: Tensor | None = None
        if profile:
            stamps = self.grid, PROFILE_SLOTS
            self.profile = torch.zeros(stamps, dtype=torch.int64, device=self.device)
        self._kernels = LayerKernels(
            plan=self.plan,
            window=self.window,
            group=group,
            layer=self.window.add_layer(),
            grid=self.grid,
            patience_ns=patience_ns,
            timeout_ns=self.window.timeout_ns,
            pdl=pdl,
            step_blocks=step_blocks or 0,
            profile=self.profile,
            few=kernel,
        )
        self._forward: Forward | None = None
        self._training: Training | None = None
        self._stashed_weights: StashedWeights | None = None

    @property
    def needs_close(self) -> bool:  # type: ignore[override]
        """True if close() still has something to free together with other ranks."""
        return self._owns_window and not self.window.closed and self.window.group.size > 1

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile or load the kernel, allocate the workspace, encode the maps. Collective.

        The ranks synchronize at the end. So no first launch waits for a rank that still compiles, or failed to.
        """
        if self._forward is None:
            refuse_capture("call prepare(weights) before CUDA graph capture")
            make = partial(Forward, self._kernels, self.variant)
            self._forward = self.window.group.all_or_none("prepare the kernel", make)
        self._forward.point_at(weights)

    def forward(self, call: Call, keep: bool = False) -> tuple[Tensor, Tensor | None]:
        """Launch on the current stream. The host waits for nothing.

        It reads x, topk_ids, topk_weights and the weights in stream order, so later work of that stream may change
        them. As for any operation of torch, tensors of another stream need record_stream(). This method calls it,
        except on the default stream. It raises the fault of an earlier launch if one has become visible.
        keep: Save a state for backward. The first such call prepares training on all ranks and cannot be captured.
        """
        if self._on_gpu and current_device() != self._ordinal:
            with on_device(self.device):
                return self.forward(call, keep)
        self.window.poll()
        if self._forward is None:
            self.prepare(call.weights)
        if keep:
            return self._trains().forward(call)
        assert self._forward is not None
        return self._forward(call), None

    def _trains(self) -> Training:
        """Return the kernels of training. The first call prepares them on all ranks and is collective."""
        if self._training is None:
            refuse_capture("run one step, forward and backward, before CUDA graph capture")
            # The layer may have been prepared without gradients, by a validation before the first step.
            group, shares = self.window.group, [s.training for s in self._stated.values()]
            check_shares(shares)
            kernels = replace(self._kernels, patience_ns=self._stated[group.rank].training[1:])
            make = partial(Training, kernels, self.variant)
            self._training = group.all_or_none("prepare the kernels of training", make)
        return self._training

    def backward(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Launch the backward pass. Ranks may need different gradients: the launch is the same.

        All ranks make their calls in the same order. The host waits for nothing. If `only_weights` differs between
        ranks, they raise an error that names it. Raises as forward() does.
        """
        self.window.poll()
        if self._training is None:
            expected = "one that a forward of this layer has kept"
            raise ArgumentError("state", "given", expected)
        if self._on_gpu and current_device() != self._ordinal:
            with on_device(self.device):
                return self._training.gradients(call, dy, state, wanted)
        return self._training.gradients(call, dy, state, wanted)

    def prepare_stash(self) -> None:
        """Compile or load the kernel of weight_gradients(). Collective."""
        if self._stashed_weights is None:
            make = partial(StashedWeights, self._kernels)
            what = "prepare the kernels of training"
            self._stashed_weights = self.window.group.all_or_none(what, make)

    def new_stash(self) -> StashedRows:
        """Allocate memory for the rows that a backward pass stashes."""
        memory = torch.empty(self.plan.stash.bytes, dtype=torch.uint8, device=self.device)
        return StashedRows(memory, self.window.resets)

    def weight_gradients(
        self, weights: ExpertWeights, stashed: Sequence[StashedRows], wanted: GradRequest
    ) -> Gradients:
        """Launch on the current stream, see Backend.weight_gradients. The host waits for nothing."""
        self.window.poll()
        if self._stashed_weights is None:
            raise ArgumentError("weight_gradients()", "called first", "prepare_stash() before")
        with on_device(self.device):
            return self._stashed_weights(weights, stashed, wanted)

    def abort(self, error: Exception) -> None:
        """End the launch that other ranks wait in, see Window.abort()."""
        self.window.abort(error)

    # --- looking inside ---

    def check(self) -> None:
        """Wait for the device; raise if any launch of the window has failed."""
        self.window.check()

    def reset(self) -> None:
        """Make the window usable again after a fault. Collective; affects all its layers."""
        self.window.reset()

    def statistics(self) -> Statistics:
        """Return what the last call did, in stream order. Call it before the next one; the host waits for nothing.

        After a backward pass it describes the forward pass.
        """
        return self.later_statistics()()

    def later_statistics(self) -> Callable[[], Statistics]:
        """Copy the inputs of statistics(): three operations on the device instead of dozens."""
        layer, kernel = self.window.last_launch or (None, "")
        if self._forward is None or layer != self._kernels.layer:
            raise MegaMoEError(
                "statistics() describes the last call of a window, which was another layer's, or there was none"
            )
        routes = self.plan.window["window_routes"].view(self.window.memory)
        cells = Statistics.cells(routes, self.window.epoch_cell)
        prefix, sizes = (
            self._tables(kernel)["chunk_prefix"],
            (self.plan.pool_rows, layout.BLOCK_ROWS),
        )
        return partial(Statistics.of_cells, cells, prefix.clone(), *sizes)

    def _tables(self, kernel: str) -> dict[str, Tensor]:
        """Return the regions of the workspace, and the state of the last launch, which ran `kernel`."""
        views = self.plan.views(self.window.workspace(self.plan))
        if kernel == "train" and self._training is not None:
            views |= self._training.state_views()
        return views

    def intermediates(self) -> dict[str, Tensor]:
        """Return the intermediate results of the last launch, with the oracle's names. Waits for the device.

        They are views, which the next launch overwrites, or copies if memory holds columns in another order.
        Forward: x_pool, h, y_rows and their scales [M, S], by pool row; route_rows [C*32, K], each route's pool row or
        -1, by token in chunk order; partials [R, T, H] of own tokens by expert rank, undefined without a route; in FP8
        x_q, x_scale; if it trains, gate_up [M, P*I]. Backward: dy_rows, dgu [M, P*I], hs, d_s [M, S] by tile of I
        (to be summed; b2's part last), dx_rows, x_rows, row_weight, route_rows, partials. Results by pool row exist
        only after a launch of a single pass. The kernel for few tokens has no results.
        """
        self.check()
        layer, kernel = self.window.last_launch or (None, "")
        if layer != self._kernels.layer or kernel in FEW:
            return {}
        single = int(self.statistics().passes) == 1
        found = launches.rows_of_forward(self.problem, self._tables(kernel)) if single else {}
        if single and kernel == "backward" and self._training is not None:
            found = self._training.rows()
        return found | launches.home_rows(self.plan, self.window, kernel)

    def num_ctas(self) -> int:
        """Return how many CTAs took part in the last launch: fewer than `grid` if SMs were taken. Waits."""
        _, kernel = self.window.last_launch or (None, "")
        layer = self._kernels
        if self._training is not None and kernel in ("train", "backward"):
            # A layer that was prepared without gradients shares its SMs only in training launches.
            layer = self._training.kernels
        if layer.patience_ns[0] == 0:
            return layer.grid
        members = self.plan.workspace["members"].view(self.window.workspace(self.plan))
        return PAIR_CTAS * (int(members) & 0xFF)

    def clock_ghz(self) -> float:
        """Return the SM clock during the last launch, the median over CTAs. Needs profile=True; waits."""
        if self.profile is None:
            raise ConfigError("profile", False, "True, for timestamps")
        clock_start, clock_end, start, end = self.profile.cpu()[:, :4].unbind(1)  # cta/profile.cuh
        return float(((clock_end - clock_start).double() / (end - start)).median())

    def close(self) -> None:
        """Free the window if it is this layer's own, after a barrier. Collective; idempotent."""
        if self.closed:
            return
        self.closed = True
        self._forward = self._training = self._stashed_weights = None
        if self._owns_window:
            self.window.close()
