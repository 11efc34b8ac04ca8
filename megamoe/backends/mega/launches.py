"""Prepare the launches of one layer of backend="mega".

These are forward, `train` and `backward` of a training step, and weight gradients of stashed passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from megamoe.backends.call import Call, Gradients, GradRequest, StashedRows, check_call, check_stash
from megamoe.backends.mega.gradients import Targets
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, MegaMoEError
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import MASTERS, ExpertWeights, TransposedWeights, check_tensor
from megamoe.group.group import Group
from megamoe.jit import abi, compiler
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant
from megamoe.launch import panels
from megamoe.launch.arguments import (
    Plan,
    fill_pointers,
    fill_static,
    fill_weights,
)
from megamoe.launch.launches import allocator, launch_lock, launch_order, on_device
from megamoe.launch.layout import few_tokens
from megamoe.launch.training import (
    fill_backward,
    fill_backward_call,
    fill_backward_weights,
    fill_gradients,
    fill_stashed_weights,
    fill_train_state,
    move_gradients,
    operands_of_weights,
    stash_zeros,
)
from megamoe.window.window import Window

ALIGNMENT = 16  # bytes, of what TMA and vector loads read


def why_not(variant: Variant | GroupedVariant, device: torch.device) -> str | None:
    """Return why a kernel cannot run on a device, or None. Reads attributes and prebuilt kernels; compiles nothing."""
    if device.type != "cuda":
        return f"the tensors are on {device}, the kernel needs a CUDA device"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (torch.cuda.is_available() is False)"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"compute capability is {major}.{minor}, the kernel needs 9.x (Hopper)"
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
    group: Group  # of the layer
    layer: int  # of the window
    grid: int  # CTAs
    patience_ns: Sequence[int]  # join_ns and peers_ns of arguments.fill_static()
    timeout_ns: int
    pdl: bool
    step_blocks: int  # 0: the kernel chooses
    profile: Tensor | None  # [grid, PROFILE_SLOTS] int64
    few: str  # the kernel of forwards of few tokens, or ""

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
            cooperative = self.patience_ns[0] == 0  # it has all CTAs or none; others have a door
            return Launcher(kernel, self.grid, args, cooperative=cooperative, pdl=self.pdl)

    def build(self, *variants: Variant) -> None:
        """Compile these at the same time, before load() takes them one after the other."""
        from megamoe.jit.module import build_kernels

        build_kernels(variants, self.window.device.index or 0)

    def load_forwards(self, variant: Variant) -> dict[int, tuple[str, Any]]:
        """Do what load() does for forwards that save nothing: names and Launchers, by the least tokens, descending."""
        kernels, found = {0: variant}, dict[int, tuple[str, Any]]()
        if self.few:
            most = few_tokens(self.plan.problem)
            kernels = {0: replace(variant, kernel=self.few), most + 1: variant}
        if "panels" in self.plan.workspace:
            kernels[panels.least_tokens(self.plan.problem)] = replace(variant, panels=True)
        kernels = {n: k for n, k in kernels.items() if n <= self.plan.problem.max_tokens}
        self.build(*kernels.values())
        for n, k in kernels.items():  # over one argument block
            found[n] = k.kernel, self.load(k, found[0][1] if found else None)
        return dict(reversed(found.items()))

    def _arguments(self, launch: str) -> Any:
        """Return an argument block with what all calls of this layer have in common."""
        from megamoe.jit.tensormap import encode

        args, (join_ns, peers_ns) = abi.aligned(abi.LAUNCHES[launch]), self.patience_ns
        fill_static(
            *(args, self.plan, encode, self.window.bases),
            self.window.workspace(self.plan).data_ptr(),
            self.layer,
            timeout_ns=self.timeout_ns,
            fault=self.window.fault_memory.data_ptr(),
            profile=0 if self.profile is None else self.profile.data_ptr(),
            epoch=self.window.epoch_cell.data_ptr(),
            step_blocks=self.step_blocks,
            join_ns=join_ns,
            # Eight ranks, one after the other: no other wait of the launch may be over before.
            peers_ns=min(peers_ns, self.timeout_ns // 16),
        )
        return args


class Launch:
    """One kind of launch of a layer: a kernel, its argument block, and the weights that this points to. Not collective.

    It is made on the current stream of the current device, which is the layer's, and nothing waits.
    """

    def __init__(self, kernels: LayerKernels, kind: str, launcher: Any) -> None:
        from megamoe.jit.driver import use_device
        from megamoe.jit.tensormap import encode

        self._plan, self._window, self.problem = kernels.plan, kernels.window, kernels.plan.problem
        self._group = kernels.group
        self.launcher, self.argument, self._encode = launcher, launcher.argument, encode
        self.device = self._window.device
        ordinal = self.device.index or 0
        self.order = launch_order(ordinal)
        # Maps need it, in threads that have not touched the device yet: autograd's may not have.
        self._use_device = partial(use_device, ordinal)
        self._launched = kernels.layer, kind
        self._empty = allocator(self.device.type == "cuda")
        self._known: Any = None  # what stands for the call that the argument block was filled for
        self._state = 0  # address of the state that it points to
        # Addresses and strides of the weights that maps were encoded for. Calls of other sizes, which are not known,
        # may have the same weights, and no signature knows the transposed copies of a backward pass.
        self._key: tuple[Any, ...] | None = None
        self._kept: tuple[Tensor | None, ...] = ()  # copies of biases must live as long

    def point_at(self, weights: ExpertWeights, transposed: TransposedWeights | None = None) -> None:
        """Point the launch at these weights; a map is encoded once per address and strides."""
        w = weights if transposed is None else transposed.forward
        w = w if w.b13 is None else w.with_flat_bias()
        key = weights_key(w)
        if transposed is not None:
            key += weights_key(weights) + tuple(t.data_ptr() for t in transposed.named().values())
        if key == self._key:
            return
        self._known = self._key = None  # until all is filled
        self._use_device()
        self._fill_weights(weights, w, transposed)
        self._key, self._kept = key, (w.b13, w.b2, w.w13_scale, w.w2_scale)

    def _fill_weights(
        self, weights: ExpertWeights, w: ExpertWeights, transposed: TransposedWeights | None
    ) -> None:
        """w: what is multiplied, with flat biases."""
        w.validate(self.problem, self.device)
        fill_weights(self.argument, self._plan, w, self._encode)

    def _is_new(self, call: Call) -> bool:
        """Whether the argument block was filled for another call; check it then, and fill in its sizes and weights."""
        if call.known is not None and call.known is self._known:
            return False
        if call.known is None:
            check_call(self.problem, call, self.device)
        self.point_at(call.weights)
        self.argument.num_tokens = call.rows[0].shape[0]
        self.argument.ids_are_int64 = call.topk_ids.dtype == torch.int64
        # A copy of biases is made of their values: anew in every call.
        b13 = call.weights.b13
        self._known = call.known if b13 is None or b13.is_contiguous() else None
        return True

    def _keep_in(self, state: Tensor) -> None:
        """Point the launch at the state of its call."""
        base = state.data_ptr()
        # In a loop that frees it in between it lies where the last one lay.
        if base != self._state:
            self._state = 0
            self._use_device()
            fill_train_state(self.argument, self._plan, base, self._encode)
            self._state = base

    def _launch(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch; `tensors` are what the launch uses. The caller holds launch_lock."""
        handle = self.order.before_launch()
        self.launcher.launch(handle)
        self._window.last_launch, self._group.met = self._launched, True
        if handle:  # not the default stream
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(self.order.stream)  # nothing if it was made there


class Forward(Launch):
    """A forward that saves nothing. Few tokens and many may have kernels of their own, over one argument block."""

    def __init__(self, kernels: LayerKernels, variant: Variant) -> None:
        self._kernels = kernels.load_forwards(variant)
        super().__init__(kernels, *self._kernels[0])
        self._make_y: Callable[[], Tensor]

    def __call__(self, call: Call) -> Tensor:
        """Return y [T, H] bf16; see MegaBackend.forward."""
        with launch_lock:
            x, scale = call.x if type(call.x) is QuantizedRows else (call.x, None)
            if self._is_new(call):
                tokens = x.shape[0]
                kind, self.launcher = next(k for n, k in self._kernels.items() if tokens >= n)
                self._launched = self._launched[0], kind
                shape, strides = (tokens, self.problem.hidden), (self.problem.hidden, 1)
                self._make_y = partial(self._empty, shape, strides, torch.bfloat16)
            y = self._make_y() if call.out is None else call.out
            tensors = x, call.topk_ids, call.topk_weights, y, call.num_tokens_device, scale
            fill_pointers(self.argument, *tensors)
            self._launch(tensors)
        return y


class Training:
    """`train`, the forward that saves, and `backward`, and the workspace of both."""

    def __init__(self, kernels: LayerKernels, variant: Variant) -> None:
        self.kernels = kernels
        products = kernels.plan.weight_gradients
        backward = replace(variant, kernel="backward", weight_gradients=products)
        both = [replace(variant, kernel="train"), backward]
        kernels.build(*both)
        train, backward = map(kernels.load, both)
        self.train = Launch(kernels, "train", train)
        self.backward = Backward(kernels, "backward", backward)
        self._plan, self._window, self._device = kernels.plan, kernels.window, self.train.device
        self.workspace = self._window.backward_workspace(self._plan)
        place, encode = self._plan.state["chunk_prefix"], self.train._encode
        fill_backward(backward.argument, self._plan, self.workspace.data_ptr(), encode)
        behind = self._window.workspace(self._plan)[self._plan.state_offset :]
        self._routes = behind[place.offset : place.end]  # bytes
        place = self._plan.train_state["chunk_prefix"]
        self._routes_of_state = slice(place.offset, place.end)
        self._state: TensorWeakRef | None = None  # of the last train launch; autograd frees it

    def state_views(self) -> dict[str, Tensor]:
        """Return the regions of the state that the last train launch made."""
        state = None if self._state is None else self._state()
        if state is None:
            raise MegaMoEError("the state of the call was freed: call statistics() while y lives")
        return self._plan.train_state.views(state)

    def rows(self) -> dict[str, Tensor]:
        """Return what a backward launch of a single pass left by pool row; see MegaBackend.intermediates."""
        workspace = self._plan.views(self._window.workspace(self._plan))
        found = self._plan.backward.views(self.workspace)
        by_row = operands_of_weights(self._plan, workspace | found)
        by_row |= {name: found[name] for name in ("d_s", "row_weight")}
        return by_row | {"dx_rows": workspace["y_rows"], "route_rows": workspace["route_rows"]}

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return y [T, H] bf16 and the state of the call; see MegaBackend.forward."""
        launch, args = self.train, self.train.argument
        with launch_lock:
            launch._is_new(call)
            x, topk_ids, topk_weights = call[:3]
            assert isinstance(x, Tensor)
            tokens, hidden = x.shape
            y = launch._empty((tokens, hidden), (hidden, 1), torch.bfloat16)
            state = call.state
            if state is None:
                state = launch._empty((self._plan.train_state.bytes,), (1,), torch.uint8)
            launch._keep_in(state)
            fill_pointers(args, x, topk_ids, topk_weights, y, call.num_tokens_device)
            launch._launch((x, topk_ids, topk_weights, y, state, call.num_tokens_device))
            self._state = TensorWeakRef(state)
        return y, state

    def gradients(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients, see MegaBackend.backward."""
        with launch_lock:
            self.backward.stash_in(self._plan, self.workspace, wanted.stash)
            found = self.backward(call, dy, state, wanted)
            if wanted.stash is not None:
                for name in ("header", "chunk_prefix"):
                    of_state = self._plan.train_state[name].view(state)
                    self._plan.stash[name].view(wanted.stash.memory).copy_(of_state)
            # statistics() reads the routes in the workspace, since the state of the call is freed after its backward.
            # They are copied behind the launch, which has waited for launches on other streams that use that memory.
            self._routes.copy_(state[self._routes_of_state])
        return found


class Backward(Launch):
    """The gradients of a call that `train` made."""

    _rows_at = 0  # address of the rows that the last launch stashed; 0: nowhere
    _transposed: TransposedWeights | None = None  # that the argument block points to, with _known
    # If gradients went to new tensors: the call's Signature and needs, tensors like these, scratch, rows of the table.
    _fresh: tuple[Any, ...] | None = None

    def stash_in(self, plan: Plan, workspace: Tensor, stash: StashedRows | None) -> None:
        """Say where rows for weight gradients go: to the workspace, or to a stash."""
        base = 0 if stash is None else stash.memory.data_ptr()
        if base != self._rows_at:
            self._rows_at = -1  # until all is filled
            self._use_device()
            fill_backward(self.argument, plan, workspace.data_ptr(), self._encode, base)
            self._rows_at = base

    def __call__(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> Gradients:
        """Return the gradients, see MegaBackend.backward."""
        known, (x, _) = call.known, call.rows
        if known is None:
            self._check(call, dy, state, wanted)
        self._use_device()
        topk_ids, count, needs = call.topk_ids, call.num_tokens_device, wanted.needs
        make = torch.empty if count is None else torch.zeros  # rows behind have none
        dx = make(x.shape, dtype=torch.bfloat16, device=self.device)
        d_scores = make(topk_ids.shape, dtype=torch.float32, device=self.device)
        with launch_lock:
            if (
                known is None
                or known is not self._known
                or wanted.transposed is not self._transposed
            ):
                self._known = None
                self.point_at(call.weights, wanted.transposed)
                b13 = call.weights.b13  # a copy of which is made of its values
                self._known = known if b13 is None or b13.is_contiguous() else None
                self._transposed = wanted.transposed
            self._keep_in(state)
            targets = self._fill_targets(call, wanted)
            fill_backward_call(self.argument, dy, x, topk_ids, dx, d_scores, count)
            self.argument.own.only_weights = wanted.only_weights
            stash = None if wanted.stash is None else wanted.stash.memory
            self._launch((dy, x, topk_ids, state, dx, d_scores, count, stash))
        of_rows = dx if needs.x else None, d_scores if needs.topk_weights else None
        return Gradients(*of_rows, *targets.results())

    def _fill_targets(self, call: Call, wanted: GradRequest) -> Targets:
        """Fill where gradients of weights go. A call like the last one has tensors like its."""
        fresh, of_call = self._fresh, (call.known, wanted.needs)
        plain = not (wanted.into or wanted.only_weights or wanted.stash is not None)
        if plain and call.known is not None and fresh is not None and fresh[:2] == of_call:
            *_, dtype, like, scratch, rows = fresh
            made = {n: torch.empty_like(t, device=self.device) for n, t in like.items()}
            move_gradients(self.argument, rows, self._encode, made)
            return Targets(False, {}, dtype, call.weights, made, scratch)
        self._fresh = None  # until all is filled
        for name in ("w13", "w2"):
            dtype = getattr(call.weights, name).dtype
            if getattr(wanted.needs, name) and dtype not in MASTERS:
                raise ArgumentError(f"weights.{name}.dtype", dtype, "bf16 or fp32, for gradients")
        targets = Targets.make(call.weights, wanted.needs.of_weights, wanted.into)
        rows = fill_gradients(
            *(self.argument, self._plan, self._encode, targets.tensors),
            accumulate=targets.accumulate,
            stashes=wanted.stash is not None,
        )
        if plain:
            like = {n: torch.empty_like(t, device="meta") for n, t in targets.tensors.items()}
            self._fresh = *of_call, targets.dtype, like, targets._scratch, rows
        return targets

    def _fill_weights(
        self, weights: ExpertWeights, w: ExpertWeights, transposed: TransposedWeights | None
    ) -> None:
        """Point at the masters, or in FP8 at what stands in for them."""
        weights.validate(self.problem, self.device, masters=not self.problem.formats.packed)
        if transposed is not None:
            transposed = replace(transposed, forward=w)
            transposed.validate(self.problem, self.device)
        given = w if transposed is None else transposed
        fill_backward_weights(self.argument, self._plan, given, self._encode)

    def _check(self, call: Call, dy: Tensor, state: Tensor, wanted: GradRequest) -> None:
        """Raise ArgumentError for what a backward launch cannot take."""
        check_call(self.problem, call, self.device)
        x, _ = call.rows
        check_tensor("dy", dy, tuple(call.x.shape), torch.bfloat16, self.device)
        size = (self._plan.train_state.bytes,)
        check_tensor("state", state, size, torch.uint8, self.device)
        for name, tensor in (("dy", dy), ("x", x), ("state", state)):
            if tensor.data_ptr() % ALIGNMENT:
                expected = f"{ALIGNMENT}-byte aligned storage"
                raise ArgumentError(name, hex(tensor.data_ptr()), expected)
        needs = wanted.needs
        if wanted.only_weights and (needs.x or needs.topk_weights):
            expected = "no dx and no d_topk_weights with only_weights"
            raise ArgumentError("needs", list(needs), expected)
        if self.problem.formats.transposes != (wanted.transposed is not None):
            value = None if wanted.transposed is None else "given"
            expected = "TransposedWeights of these weights with precision 'fp8', else None"
            raise ArgumentError("transposed", value, expected)


class StashedWeights(Launch):
    """The weights' gradients of backward passes that were stashed: a launch that meets no other rank."""

    def __init__(self, kernels: LayerKernels) -> None:
        from megamoe.jit.module import Launcher, load_kernel

        plan, window = kernels.plan, kernels.window
        variant = GroupedVariant.of_stash(plan.problem.activation.planes, plan.weight_gradients)
        with on_device(window.device):
            kernel = load_kernel(variant, window.device.index or 0)
        args = abi.aligned(abi.LAUNCHES[variant.launch])
        launcher = Launcher(kernel, kernels.grid, args, cooperative=False)
        super().__init__(kernels, variant.kernel, launcher)
        self._zeros = stash_zeros(plan, self.device)
        args.fault = window.fault_memory.data_ptr()
        ticket, abort = plan.workspace["fault_ticket"], plan.window["window_abort"]
        args.fault_ticket = window.workspace(plan).data_ptr() + ticket.offset
        args.abort = window.bases[plan.problem.rank] + abort.offset

    def __call__(
        self, weights: ExpertWeights, stashed: Sequence[StashedRows], wanted: GradRequest
    ) -> Gradients:
        """Return the gradients, see Backend.weight_gradients."""
        check_stash(stashed, self._window.resets)
        self._use_device()
        with launch_lock:
            targets = Targets.make(weights, wanted.needs.of_weights, wanted.into)
            memory = [one.memory for one in stashed]
            passes = [rows.data_ptr() for rows in memory]
            fill_stashed_weights(
                *(self.argument, self._plan, self._encode, passes, targets.tensors),
                accumulate=targets.accumulate,
                zeros=self._zeros,
            )
            self.launcher.launch(self.order.before_launch())
        for rows in memory:  # which nobody else knows, and which go now
            if rows.is_cuda:
                rows.record_stream(torch.cuda.current_stream(rows.device))
        return Gradients(None, None, *targets.results())


def weights_key(w: ExpertWeights) -> tuple[Any, ...]:
    """Return what a launch depends on: addresses and strides."""
    w13, w2, s13, s2, b13, b2 = w.w13, w.w2, w.w13_scale, w.w2_scale, w.b13, w.b2
    return (
        w13.data_ptr(), w2.data_ptr(), w13.stride(), w2.stride(),
        s13 if s13 is None else s13.data_ptr(), s2 if s2 is None else s2.data_ptr(),
        b13 if b13 is None else b13.data_ptr(), b2 if b2 is None else b2.data_ptr(),
    )  # fmt: skip


def home_rows(plan: Plan, window: Window, kernel: str) -> dict[str, Tensor]:
    """Return what the last launch, of `kernel`, left of own tokens; see MegaBackend.intermediates. Waits."""
    regions = plan.window.views(window.memory)
    parity, rank = window.epoch() & 1, plan.problem.rank
    tokens = int(regions["window_routes"][parity, rank, 0])
    found = {}
    if kernel == "backward" or plan.problem.ep_size > 1:  # else sums go into y
        found["partials"] = regions["window_partials"][:, :tokens]
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
