"""The kernels of one layer of backend="mega": what their launches have in common."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.formats.weights import ExpertWeights, check_tensor
from megamoe.jit import abi, compiler
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant
from megamoe.launch import panels
from megamoe.launch.arguments import PROFILE_SLOTS, Plan, fill_static
from megamoe.launch.launches import on_device
from megamoe.window.window import Window

PAIR_CTAS, MAX_RUN = 2, 16  # pair_ctas, max_run of csrc/megamoe/schedule/order.h
_CLOCK_START, _CLOCK_END, _START, _END = range(4)  # csrc/megamoe/cta/profile.cuh


def why_not(variant: Variant | GroupedVariant, device: torch.device) -> str | None:
    """Return why a kernel cannot run on a device, or None. Reads attributes and prebuilt kernels; compiles nothing."""
    if device.type != "cuda":
        return f"the tensors are on {device}, the kernel needs a CUDA device"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"{torch.cuda.get_device_name(device)} is not a Hopper GPU (compute capability 9.x)"
    try:
        importlib.import_module("megamoe.jit.module")
    except ImportError as error:
        return f"cuda-bindings are missing: pip install 'cuda-bindings>=13,<14' ({error})"
    lacking = compiler.why_not(variant)
    return lacking and f"kernels cannot be compiled: {lacking}"


@dataclass(frozen=True)
class LayerKernels:
    """What is the same for all launches of a layer."""

    plan: Plan
    window: Window
    layer: int  # of the window
    grid: int  # CTAs
    patience_ns: Sequence[int]  # join_ns and peers_ns of arguments.fill_static
    timeout_ns: int
    pdl: bool
    step_blocks: int | None  # None: as arguments.py has it
    profile: Tensor | None  # [grid, PROFILE_SLOTS] int64

    def load(self, variant: Variant, beside: Any = None) -> Any:
        """Compile or load one kernel; return its Launcher, whose argument block is filled so far.

        beside: another Launcher, of which it takes the argument block; without, it has its own.
        Not collective. Raises NotCoResident for a grid that does not fit the device at once.
        """
        from megamoe.jit.module import Launcher, load_kernel

        device = self.window.device
        with on_device(device):
            kernel = load_kernel(variant, device.index or 0)
            kernel.check_resident(self.grid)
            args = self._arguments(variant.launch) if beside is None else beside.argument
            # A cooperative launch would have all CTAs or none.
            cooperative = self.patience_ns[0] == 0
            return Launcher(kernel, self.grid, args, cooperative=cooperative, pdl=self.pdl)

    def build(self, *variants: Variant) -> None:
        """Compile these at the same time, before load() takes them one after the other."""
        from megamoe.jit.module import build_kernels

        build_kernels(variants, self.window.device.index or 0)

    def load_forward(self, variant: Variant) -> Callable[[int], Any]:
        """As load(); return what says which Launcher a call of T tokens takes. They have one argument block."""
        if "panels" not in self.plan.workspace:
            few = self.load(variant)
            return lambda _: few
        expanding = replace(variant, panels=True)
        self.build(variant, expanding)
        few = self.load(variant)
        many = self.load(expanding, few)
        least = panels.least_tokens(self.plan.problem)
        return lambda tokens: many if tokens >= least else few

    def _arguments(self, launch: str) -> Any:
        from megamoe.jit.tensormap import encode

        workspace = self.window.workspace(self.plan)
        options = {} if self.step_blocks is None else {"step_blocks": self.step_blocks}
        args, (join_ns, peers_ns) = abi.aligned(abi.LAUNCHES[launch]), self.patience_ns
        fill_static(
            args,
            self.plan,
            window_bases=self.window.bases,
            workspace_base=workspace.data_ptr(),
            encoder=encode,
            timeout_ns=self.timeout_ns,
            fault=self.window.fault_address,
            profile=0 if self.profile is None else self.profile.data_ptr(),
            epoch=self.window.epoch_address,
            layer=self.layer,
            join_ns=join_ns,
            # Eight ranks, one after the other: no other wait of the launch may be over before.
            peers_ns=min(peers_ns, self.timeout_ns // 16),
            **options,
        )
        return args


def num_ctas(layer: LayerKernels) -> int:
    """Return how many CTAs took part in the last launch of a layer that shares its workspace. Waits."""
    if layer.patience_ns[0] == 0:
        return layer.grid
    members = layer.plan.workspace["members"].view(layer.window.workspace(layer.plan))
    return PAIR_CTAS * (int(members) & 0xFF)


def weights_key(w: ExpertWeights) -> tuple[Any, ...]:
    """Return what a launch depends on: addresses and strides."""
    w13, w2, s13, s2, b13, b2 = w.w13, w.w2, w.w13_scale, w.w2_scale, w.b13, w.b2
    return (
        w13.data_ptr(), w2.data_ptr(), w13.stride(), w2.stride(),
        s13 if s13 is None else s13.data_ptr(), s2 if s2 is None else s2.data_ptr(),
        b13 if b13 is None else b13.data_ptr(), b2 if b2 is None else b2.data_ptr(),
    )  # fmt: skip


def check_rows(
    p: Problem,
    device: torch.device,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    x_scale: Tensor | None = None,
) -> None:
    """Refuse what would make the kernel read out of bounds. Callers say more, see functional.check_call."""
    tokens, stored = x.shape[0], torch.bfloat16
    if x_scale is not None:
        stored = p.formats.x.dtype
        groups = p.formats.x.scale_shape(tokens, p.hidden) if p.formats.x.scaled else ()
        check_tensor("x_scale", x_scale, groups, torch.float32, device)
    if (
        x.shape[1] != p.hidden
        or tokens > p.max_tokens
        or x.dtype != stored
        or topk_weights.dtype != torch.float32
        or topk_ids.dtype not in (torch.int32, torch.int64)
        or topk_ids.shape != (tokens, p.top_k)
        or topk_weights.shape != (tokens, p.top_k)
        or not (x.is_contiguous() and topk_ids.is_contiguous() and topk_weights.is_contiguous())
        or x.device != device
    ):
        raise ArgumentError(
            "x, topk_ids, topk_weights",
            [f"{t.dtype} {list(t.shape)} on {t.device}" for t in (x, topk_ids, topk_weights)],
            f"contiguous [T <= {p.max_tokens}, {p.hidden}] {stored}, [T, {p.top_k}] int32|int64 and "
            f"[T, {p.top_k}] fp32 on {device}",
        )


def new_profile(grid: int, device: torch.device) -> Tensor:
    """Return memory for the timestamps of a launch."""
    return torch.zeros((grid, PROFILE_SLOTS), dtype=torch.int64, device=device)


def clock_ghz(profile: Tensor | None) -> float:
    """profile: [grid, PROFILE_SLOTS] of a launch -> its SM clock, the median over CTAs. Waits for the device."""
    if profile is None:
        raise ConfigError("profile", False, "True, for timestamps")
    stamps = profile.cpu()
    cycles = (stamps[:, _CLOCK_END] - stamps[:, _CLOCK_START]).double()
    ns = (stamps[:, _END] - stamps[:, _START]).double()
    return float((cycles / ns).median())


def kernel_span_ns(profile: Tensor) -> tuple[int, int]:
    """profile: as above -> when its first CTA began and its last one ended, in ns. Waits for the device."""
    stamps = profile.cpu()
    return int(stamps[:, _START].min()), int(stamps[:, _END].max())


def home_rows(plan: Plan, window: Window, kernel: str) -> dict[str, Tensor]:
    """Return what the last launch, of `kernel`, left of own tokens; see MegaBackend.intermediates. Waits."""
    regions = {name: region.view(window.memory) for name, region in plan.window.items()}
    parity, rank = window.epoch() & 1, plan.problem.rank
    tokens = int(regions["window_routes"][parity, rank, 0])
    found = {"partials": regions["window_partials"][:, :tokens]}
    if "window_x_scale" in regions and kernel != "backward":  # which stages dy there
        problem = plan.problem
        found["x_q"] = problem.formats.x.in_order(regions["window_x"][:tokens], problem.hidden)
        found["x_scale"] = regions["window_x_scale"][:tokens]
    return found


def rows_of_forward(problem: Problem, views: dict[str, Tensor]) -> dict[str, Tensor]:
    """views: the regions of workspace and state of a single pass -> what it left by pool row."""
    found = {name: views[name] for name in ("y_rows", "route_rows")}
    found["x_pool"] = problem.formats.x.in_order(views["x_pool"], problem.hidden)
    found["h"] = problem.formats.h.in_order(views["h"], problem.intermediate)
    for name in ("x_pool_scale", "h_scale"):
        if name in views:
            found[name] = views[name].t()
    if "gu" in views:
        found["gate_up"] = views["gu"].flatten(1)
    return found
