"""backend="mega": the persistent kernel. Fills the argument block, launches, reports faults; no host waits."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe import env
from megamoe.backends.statistics import Statistics
from megamoe.config import Problem
from megamoe.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.formats.weights import ExpertWeights, SealedWeights
from megamoe.jit import abi, compiler
from megamoe.jit.source import Variant
from megamoe.memory import layout
from megamoe.memory.arguments import Plan, fill_pointers, fill_static, fill_weights
from megamoe.memory.launches import (
    alike,
    allocator,
    current_device,
    launch_lock,
    launch_order,
    on_device,
)
from megamoe.memory.transport.group import all_or_none, as_group, nccl_in_use
from megamoe.memory.window import Window

NCCL_MAX_CTAS = 24  # what NCCL takes at most on Hopper over NVLink unless told otherwise
PROFILE_SLOTS = 16
GPCS = 8  # of a Hopper GPU; a pair of CTAs needs two free SMs of one, so other kernels may strand one in each
PAIR_CTAS, MAX_GROUP = 2, 16  # pair_ctas, max_group of csrc/megamoe/schedule/order.h
_CLOCK_START, _CLOCK_END, _START, _END = range(4)  # csrc/megamoe/cta/profile.h


def why_not(problem: Problem, group: Any, device: torch.device) -> str | None:
    """Return why the kernel cannot run on this rank, or None. Not collective; reads attributes only."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"the tensors are on {device}, the kernel needs a CUDA device"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (compute capability 9.x)"
    try:
        importlib.import_module("megamoe.jit.module")
    except ImportError as error:
        return f"cuda-bindings are missing: pip install 'cuda-bindings>=13,<14' ({error})"
    lacking = compiler.why_not()
    if lacking is not None:
        return f"kernels cannot be compiled: {lacking}"
    own = torch.cuda.current_device() if device.index is None else device.index
    if problem.ep_size > 1:
        for peer in range(torch.cuda.device_count()):
            if peer != own and not torch.cuda.can_device_access_peer(own, peer):
                return f"cuda:{own} has no peer access to cuda:{peer}"
    return None


def _default_reserve(group: Any) -> int:
    """SMs for NCCL, where a step both trains and communicates; decided when the backend is made.

    Cooperative kernels and NCCL's do not yield to each other: without room for both, two ranks that start them in
    different orders would wait for each other for ever.
    """
    stated = env.reserve_sms()
    if stated is not None:
        return stated
    if not (torch.is_grad_enabled() and nccl_in_use(group)):
        return 0
    ctas = os.environ.get("NCCL_MAX_CTAS", "")
    return (int(ctas) if ctas.isdigit() and int(ctas) else NCCL_MAX_CTAS) + GPCS


class MegaBackend:
    """One layer on one rank. Making and closing it is collective; calls are, too, in the sense that every
    rank makes the same calls of a window in the same order, with zero tokens where it has none.

    window: one to share with other layers; its own otherwise. pool_rows: rows held at a time; fewer cost passes,
    never results. reserve_sms: SMs left to other kernels. timeout_s: longest wait inside the kernel.
    step_blocks: length of a step of the tile order (csrc/megamoe/schedule/order.h), None for automatic; for tuning.
    pdl: programmatic dependent launch. profile: in-kernel timestamps, see clock_ghz().

    A CUDA graph may capture forward() after prepare(). Replays of one window's graphs and other calls of that window
    must be ordered by the user's streams.
    """

    differentiable = False

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        window: Window | None = None,
        pool_rows: int | None = None,
        reserve_sms: int | None = None,
        timeout_s: float | None = None,
        pdl: bool | None = None,
        profile: bool = False,
        step_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        from megamoe.jit.driver import device_attribute

        if step_blocks and step_blocks < MAX_GROUP:
            raise ConfigError("step_blocks", step_blocks, f"0 (automatic) or at least {MAX_GROUP}")
        wrapped = as_group(group)
        self.problem = problem
        self._owns_window = window is None
        self.window = window or Window(problem, wrapped, device=device)
        if not self._owns_window:
            self.window.admit(problem)
            self.window.agree(problem)
        self._layer = self.window.add_layer()
        self.device = self.window.device
        self._ordinal = self.device.index or 0
        self._order = launch_order(self._ordinal)
        self._on_gpu = self.device.type == "cuda"
        rows = layout.default_pool_rows(problem) if pool_rows is None else pool_rows
        self.plan = Plan(problem, rows, self.window.spec.max_tokens)
        _ = self.plan.workspace  # raises WorkspaceTooSmall
        self.variant = Variant(problem.precision, problem.activation.kind, profile)
        self.closed = False
        self._timeout_ns = int((env.timeout_s() if timeout_s is None else timeout_s) * 1e9)
        self.window.timeout_ns = self._timeout_ns
        self._pdl = env.pdl() if pdl is None else pdl
        self._step_blocks = step_blocks
        reserve = _default_reserve(wrapped) if reserve_sms is None else reserve_sms
        sms = device_attribute(self._ordinal, "MULTIPROCESSOR_COUNT")
        if not 0 <= reserve <= sms - PAIR_CTAS:
            raise ConfigError("reserve_sms", reserve, f"0..{sms - PAIR_CTAS}")
        self.grid = (sms - reserve) // PAIR_CTAS * PAIR_CTAS
        self._args = abi.aligned(abi.Args)
        self._launcher: Any = None
        self._weights_key: tuple[Any, ...] | None = None
        self._bias: Tensor | None = None  # kept until other weights are set
        self._make_y: Callable[[], Tensor]
        # says whether x, ids and weights are like those that were checked last
        self._checked: Callable[..., bool] = lambda *_: False
        self._sealed: ExpertWeights | None = None  # whose addresses the launch has
        self.profile: Tensor | None = None
        if profile:
            shape = (self.grid, PROFILE_SLOTS)
            self.profile = torch.zeros(shape, dtype=torch.int64, device=self.device)

    @property
    def needs_close(self) -> bool:
        """Whether close() still has something to free together with other ranks."""
        return self._owns_window and not self.window.closed and self.window.group.size > 1

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile or load the kernel, allocate the workspace, encode the maps. Collective.

        The ranks meet at the end, so that no rank's first launch waits while another compiles, or failed to.
        """
        if self._launcher is None:
            self._check_not_capturing()

            def load() -> None:
                with on_device(self.device):
                    self._load()

            all_or_none(self.window.group, load, "prepare the kernel")
        self._set_weights(weights)

    def _check_not_capturing(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise MegaMoEError("call prepare(weights) before CUDA graph capture")

    def _load(self) -> None:
        from megamoe.jit.module import Launcher, load_kernel
        from megamoe.jit.tensormap import encode

        kernel = load_kernel(self.variant, self._ordinal)
        kernel.check_resident(self.grid)
        self._encode = encode
        self._workspace = self.window.workspace(self.plan)
        options = {} if self._step_blocks is None else {"step_blocks": self._step_blocks}
        fill_static(
            self._args,
            self.plan,
            window_bases=self.window.bases,
            workspace_base=self._workspace.data_ptr(),
            encoder=encode,
            timeout_ns=self._timeout_ns,
            fault=self.window.fault_address,
            profile=0 if self.profile is None else self.profile.data_ptr(),
            epoch=self.window.epoch_address,
            layer=self._layer,
            **options,
        )
        self._launcher = Launcher(kernel, self.grid, self._args, cooperative=True, pdl=self._pdl)

    def _set_weights(self, weights: ExpertWeights) -> None:
        """Point the launch at these weights; a map is encoded once per address and strides."""
        self._sealed = None
        w = weights if weights.b13 is None else weights.with_flat_bias()
        w13, w2, s13, s2, b13, b2 = w.w13, w.w2, w.w13_scale, w.w2_scale, w.b13, w.b2
        key = (
            w13.data_ptr(), w2.data_ptr(), w13.stride(), w2.stride(),
            s13 if s13 is None else s13.data_ptr(), s2 if s2 is None else s2.data_ptr(),
            b13 if b13 is None else b13.data_ptr(), b2 if b2 is None else b2.data_ptr(),
        )  # fmt: skip
        if key != self._weights_key:
            self._bias = b13
            w.validate(self.problem, self.device)
            fill_weights(self._args, self.plan, w, self._encode)
            self._weights_key = key
        if type(weights) is SealedWeights:
            self._sealed = weights

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Launch on the current stream and return y [T, H] bf16. The host waits for nothing.

        Reads x, topk_ids, topk_weights and the weights, in stream order; they may be changed by later work of that
        stream. On the default stream tensors that were made on another one need record_stream(), as for any operation
        of torch; on others this does it. Raises the fault of an earlier launch if one has become visible.
        """
        if self._on_gpu and current_device() != self._ordinal:
            with on_device(self.device):
                return self.forward(x, topk_ids, topk_weights, weights, num_tokens_device, out)
        self.window.poll()
        if self._launcher is None:
            self.prepare(weights)
        with launch_lock:
            if not self._checked(x, topk_ids, topk_weights):
                self._check(x, topk_ids, topk_weights)
                self._args.num_tokens = x.shape[0]
                self._args.ids_are_int64 = topk_ids.dtype == torch.int64
                shape, strides = tuple(x.shape), (x.shape[1], 1)
                self._make_y = partial(allocator(self._on_gpu), shape, strides, torch.bfloat16)
                self._checked = alike(x, topk_ids, topk_weights)
            y = self._make_y() if out is None else out
            if weights is not self._sealed:
                self._set_weights(weights)
            handle = self._order.before_launch()
            fill_pointers(self._args, x, topk_ids, topk_weights, y, num_tokens_device)
            self._launcher.launch(handle)
            self.window.last_layer = self._layer
        if handle:  # not the default stream
            for tensor in (x, topk_ids, topk_weights, y, num_tokens_device):
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(self._order.stream)  # nothing if it was made there
        return y

    def _check(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Refuse what would make the kernel read out of bounds. Callers say more, see functional.check_call."""
        tokens, p = x.shape[0], self.problem
        if (
            x.shape[1] != p.hidden
            or tokens > p.max_tokens
            or x.dtype != torch.bfloat16
            or topk_weights.dtype != torch.float32
            or topk_ids.dtype not in (torch.int32, torch.int64)
            or topk_ids.shape != (tokens, p.top_k)
            or topk_weights.shape != (tokens, p.top_k)
            or not (x.is_contiguous() and topk_ids.is_contiguous() and topk_weights.is_contiguous())
            or x.device != self.device
        ):
            raise ArgumentError(
                "x, topk_ids, topk_weights",
                [f"{t.dtype} {list(t.shape)} on {t.device}" for t in (x, topk_ids, topk_weights)],
                f"contiguous [T <= {p.max_tokens}, {p.hidden}] bf16, [T, {p.top_k}] int32|int64 and "
                f"[T, {p.top_k}] fp32 on {self.device}",
            )

    # --- looking inside ---

    def check(self) -> None:
        """Wait for the device; raise if any launch of the window has failed."""
        self.window.check()

    def reset(self) -> None:
        """Make the window usable again after a fault. Collective; affects all its layers."""
        self.window.reset()

    def statistics(self) -> Statistics:
        """Return what the last launch did, in stream order; the host waits for nothing. Call it before the next one."""
        if self._launcher is None or self.window.last_layer != self._layer:
            raise MegaMoEError(
                "statistics() are those of the last call of a window, and that was another layer's, or there was none"
            )
        tables = (
            self.plan.window["window_routes"].view(self.window.memory),
            self.plan.views(self._workspace)["chunk_prefix"],
            self.window.epoch_cell,
        )
        return Statistics.of_tables(*tables, self.plan.pool_rows, layout.BLOCK_ROWS)

    def intermediates(self) -> dict[str, Tensor]:
        """Return what the last launch left, by the names of megamoe.backends.reference. Waits for the device.

        Views: the next launch overwrites them. x_pool, h, y_rows (and their scales, as [M, S]) and row_route are by
        pool row, and only there when the launch was a single pass; partials [R, T, H] of own tokens by expert rank
        (only written where it has a route) and, for fp8, x_q, x_scale
        are always there.
        """
        self.check()
        if self._launcher is None:
            return {}
        plan, p = self.plan, self.problem
        window = {n: r.view(self.window.memory) for n, r in plan.window.items()}
        workspace = plan.views(self._workspace)
        parity = int(self.window.epoch() & 1)
        tokens = window["window_routes"][parity, :, 0].tolist()
        found = {"partials": window["window_partials"][:, : tokens[p.rank]]}
        if "window_x_scale" in window:
            found["x_q"] = window["window_x"][: tokens[p.rank]]
            found["x_scale"] = window["window_x_scale"][: tokens[p.rank]]
        if int(self.statistics().passes) == 1:
            for name in ("x_pool", "h", "y_rows", "row_route"):
                found[name] = workspace[name]
            for name in ("x_pool_scale", "h_scale"):
                if name in workspace:
                    found[name] = workspace[name].t()
        return found

    def clock_ghz(self) -> float:
        """Return the SM clock during the last launch, the median over CTAs. Needs profile=True; waits."""
        if self.profile is None:
            raise ConfigError("profile", False, "True, for timestamps")
        stamps = self.profile.cpu()
        cycles = (stamps[:, _CLOCK_END] - stamps[:, _CLOCK_START]).double()
        ns = (stamps[:, _END] - stamps[:, _START]).double()
        return float((cycles / ns).median())

    def close(self) -> None:
        """Free the window if it is this layer's own, after a barrier. Collective; idempotent."""
        if self.closed:
            return
        self.closed = True
        self._launcher = None
        if self._owns_window:
            self.window.close()
