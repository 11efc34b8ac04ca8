"""Emulate the kernel's own source on CPU fibers (csrc/fibers): all ranks in one process, without a GPU.

It is slow, so use tiny shapes. It runs every role, barrier, swizzle and protocol step of the real kernels, and reports
which role waits for what if something hangs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.call import Call, Gradients, GradRequest, StashedRows
from megamoe.backends.emulate.memory import Kept, Rank, aligned_zeros, encode_emulated, nan_like
from megamoe.backends.mega.gradients import Targets
from megamoe.backends.statistics import Statistics
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import AbiMismatch, ConfigError, MegaMoEError, WindowBroken, fault_to_error
from megamoe.formats.weights import ExpertWeights, TransposedWeights
from megamoe.jit import abi, host, paths
from megamoe.jit.grouped import GroupedVariant
from megamoe.jit.source import Variant
from megamoe.launch import arguments, layout, training

REPORT_BYTES = 1 << 16
DEFAULT_CTAS = 2
# Backward's name -> name in the workspace, of regions that they share if x has no scales.
_ALSO_CALLED = {"dy_rows": "x_pool", "hs": "h", "dx_rows": "y_rows"}


class EmulationError(MegaMoEError):
    """The emulated machine stopped, in a deadlock or at an operation that the hardware would reject."""


class Emulation:
    """Emulate all ranks of a group in this process. Windows, workspaces and epochs live as long as the object.

    problem: of any rank. num_ctas: per rank, even. pool_rows: per rank; None: each rank's default. join_ns, peers_ns:
    see fill_static(), in emulated time. profile: run variants with timestamps. `profiles` then has the marks of the
    last launch, [num_ctas, 80] int64 by rank, in emulated ns.

    All calls take sequences with one entry per rank. seed: determines the order in which fibers run and copies land; 0
    is round robin. layer: number of the layer in the window, see fill_static().
    """

    def __init__(
        self,
        problem: Problem,
        *,
        num_ctas: int = DEFAULT_CTAS,
        pool_rows: int | None = None,
        step_blocks: int = 0,
        timeout_s: float | None = None,
        join_ns: int = 0,
        peers_ns: int = 10**6,
        profile: bool = False,
        weight_gradients: str = "bf16",
    ) -> None:
        if not 2 <= num_ctas <= 64 or num_ctas % 2:
            raise ConfigError("num_ctas", num_ctas, "an even number, 2..64: CTAs run in pairs")
        self.problem, self.num_ctas, self.step_blocks = problem, num_ctas, step_blocks
        self.weight_gradients = weight_gradients
        self.timeout_ns = int(env.timeout_s(timeout_s) * 1e9)
        self.join_ns, self.peers_ns = join_ns, peers_ns
        self.ranks = [
            Rank.make(replace(problem, rank=r), pool_rows, weight_gradients)
            for r in range(problem.ep_size)
        ]
        marks = num_ctas if profile else 0, arguments.PROFILE_SLOTS
        self.profiles = [torch.zeros(*marks, dtype=torch.int64, device="cpu") for _ in self.ranks]
        self.report = ""
        self.broken: MegaMoEError | None = None
        self._prefixes: list[Tensor] = []  # chunk_prefix of the last forward, by rank
        # Results that a failed launch may have written, by rank
        self.written: list[list[Tensor | None]] = []

    def variant(self, kind: str = "forward") -> Variant:
        """Return the kernel of a direction."""
        profile = self.profiles[0].numel() > 0
        panels = kind == "forward" and any("panels" in r.plan.workspace for r in self.ranks)
        of = self.problem.precision, self.problem.activation.kind
        products = self.weight_gradients if kind == "backward" else "bf16"
        return Variant(*of, profile, kind, panels, products)

    def kernel(self, kind: str = "forward") -> Any:
        """Compile, or load, the kernel of a direction."""
        return load_kernel(self.variant(kind))

    def forward_all(
        self,
        calls: Sequence[Call],
        *,
        states: Sequence[Tensor] | None = None,
        seed: int = 0,
        layer: int = 0,
        kind: str = "forward",
    ) -> list[Tensor]:
        """Run one launch of all ranks. Return their y [T, H] bf16, whatever `out` a call has.

        states: [bytes] uint8 each, memory for the state of this call (Plan.state, or Plan.train_state with kind
        "train"). Default: the workspace's.
        """
        kept = Kept()
        ys = [nan_like(call.rows[0], torch.bfloat16) for call in calls]

        def fill(index: int, args: Any) -> None:
            plan, call = self.ranks[index].plan, calls[index]
            arguments.fill_weights(args, plan, kept.weights(call.weights), encode_emulated)
            if kind == "train":
                assert states is not None
                training.fill_train_state(args, plan, states[index].data_ptr(), encode_emulated)
            elif states is not None:
                arguments.fill_state(args, plan, states[index].data_ptr())
            x, scale = map(kept.flat, call.rows)
            ids, scores, count = map(
                kept.flat, (call.topk_ids, call.topk_weights, call.num_tokens_device)
            )
            arguments.fill_call(args, x, ids, scores, ys[index], count, scale)

        self.written = [[y] for y in ys]
        self._prefixes = [self._prefix(r, kind, states) for r in range(len(ys))]
        self._launch(kind, fill, seed, layer)
        return [y.to(call.x.device) for y, call in zip(ys, calls, strict=True)]

    def _prefix(self, rank: int, kind: str, states: Sequence[Tensor] | None) -> Tensor:
        plan = self.ranks[rank].plan
        if states is None:
            return plan.views(self.ranks[rank].workspace)["chunk_prefix"]
        regions = plan.train_state if kind == "train" else plan.state
        return regions["chunk_prefix"].view(states[rank])

    def train_all(
        self, calls: Sequence[Call], *, states: Sequence[Tensor] | None = None, **options: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a launch that saves what backward_all reads. Return y [T, H] bf16 and state [bytes] uint8 of each.

        states: memory to use. options: seed, layer.
        """
        if states is None:
            states = [aligned_zeros(r.plan.train_state.bytes).fill_(0xFF) for r in self.ranks]
        ys = self.forward_all(calls, states=states, kind="train", **options)
        return ys, [state.to(call.x.device) for state, call in zip(states, calls, strict=True)]

    def backward_all(
        self,
        calls: Sequence[Call],
        dys: Sequence[Tensor],
        states: Sequence[Tensor],
        wanted: Sequence[GradRequest] | None = None,
        *,
        seed: int = 0,
        layer: int = 0,
    ) -> list[Gradients]:
        """Run one backward launch of all ranks. Return the gradients of each.

        calls: with the bf16 masters as weights. states: train_all's. wanted: without `transposed`, in FP8 the
        masters are quantized; None: all gradients.
        """
        kept = Kept()
        ranks = range(len(self.ranks))
        asked = [GradRequest()] * len(ranks) if wanted is None else wanted
        masters = [kept.weights(call.weights) for call in calls]
        targets = [
            Targets.make(masters[r], w.needs.of_weights, w.into, nan_like)
            for r, w in enumerate(asked)
        ]
        # The kernel does not write tokens from the count on: their gradients are zero.
        empty = [nan_like if c.num_tokens_device is None else torch.zeros_like for c in calls]
        dxs = [empty[r](dys[r]) for r in ranks]
        d_weights = [empty[r](calls[r].topk_ids, dtype=torch.float32) for r in ranks]

        def fill(index: int, args: Any) -> None:
            rank, call, of_rank = self.ranks[index], calls[index], asked[index]
            rows = of_rank.stash
            where = rank.backward.data_ptr(), encode_emulated, rows.memory.data_ptr() if rows else 0
            training.fill_backward(args, rank.plan, *where)
            given: ExpertWeights | TransposedWeights = masters[index].with_flat_bias()
            if self.problem.formats.transposes:
                transposed, problem = of_rank.transposed, rank.plan.problem
                if transposed is None:
                    transposed = TransposedWeights.of(problem, call.weights.quantized(problem))
                given = kept.transposed(transposed)
            training.fill_backward_weights(args, rank.plan, given, encode_emulated)
            state = kept.flat(states[index])
            training.fill_train_state(args, rank.plan, state.data_ptr(), encode_emulated)
            training.fill_gradients(
                *(args, rank.plan, encode_emulated, targets[index].tensors),
                accumulate=targets[index].accumulate,
                stashes=rows is not None,
            )
            dy, x, ids, count = map(
                kept.flat, (dys[index], call.rows[0], call.topk_ids, call.num_tokens_device)
            )
            training.fill_backward_call(args, dy, x, ids, dxs[index], d_weights[index], count)
            args.own.only_weights = of_rank.only_weights

        self.written = [[dxs[r], d_weights[r], *targets[r].tensors.values()] for r in ranks]
        self._launch("backward", fill, seed, layer)
        for r in ranks:
            if (rows := asked[r].stash) is not None:
                plan = self.ranks[r].plan
                for name in ("header", "chunk_prefix"):
                    of_state = plan.train_state[name].view(states[r].cpu())
                    plan.stash[name].view(rows.memory).copy_(of_state)
        results = []
        for r in ranks:
            found = [dxs[r], d_weights[r], *targets[r].results()]
            pairs = zip(found, asked[r].needs, strict=True)
            device = dys[r].device
            made = (t.to(device) if need and t is not None else None for t, need in pairs)
            results.append(Gradients(*made))
        return results

    def _launch(self, kind: str, fill: Callable[[int, Any], None], seed: int, layer: int) -> None:
        """fill: (rank, its argument with what fill_static fills) -> None."""
        if self.broken is not None:
            raise WindowBroken(f"call reset() first. The fault was: {self.broken}")
        argument = abi.LAUNCHES[self.variant(kind).launch]
        size, unit = ctypes.sizeof(argument), argument.alignment
        memory = ctypes.create_string_buffer(size * len(self.ranks) + unit)
        address = ctypes.addressof(memory) + -ctypes.addressof(memory) % unit
        bases = [rank.window.data_ptr() for rank in self.ranks]
        for index, rank in enumerate(self.ranks):
            args = argument.from_address(address + index * size)
            arguments.fill_static(
                *(args, rank.plan, encode_emulated, bases, rank.workspace.data_ptr(), layer),
                timeout_ns=self.timeout_ns,
                fault=ctypes.addressof(rank.fault),
                step_blocks=self.step_blocks,
                join_ns=self.join_ns,
                peers_ns=self.peers_ns,
                profile=self.profiles[index].data_ptr(),
            )
            fill(index, args)
        report = ctypes.create_string_buffer(REPORT_BYTES)
        kernel = self.kernel(kind)
        status = kernel(address, len(self.ranks), self.num_ctas, seed, report, REPORT_BYTES)
        self.report = report.value.decode(errors="replace")
        if status:
            self.broken = EmulationError(self.report)
            raise self.broken
        failed = [index for index, rank in enumerate(self.ranks) if rank.fault.edge]
        if failed:  # the cause before its consequences
            index = min(failed, key=lambda i: self.ranks[i].fault.edge == abi.Edge.peer_abort)
            record = {"rank": index, "waited_ns": self.timeout_ns}
            self.broken = fault_to_error(record | abi.fault_fields(self.ranks[index].fault))
            raise self.broken

    def reset(self) -> None:
        """Make the ranks usable again after a fault. No epoch comes again, see Window.reset."""
        last = max(int(self.region(r, "epoch")[0]) for r in range(len(self.ranks)))
        for index, rank in enumerate(self.ranks):
            rank.reset()
            self.region(index, "epoch").fill_(last + 1)
        self.broken = None

    def region(self, rank: int, name: str) -> Tensor:
        """Return a view of a region of a rank's window or workspace, as the last launch left it."""
        r = self.ranks[rank]
        if name in r.plan.window:
            return r.plan.window[name].view(r.window)
        if name in r.plan.backward:
            return r.plan.backward[name].view(r.backward)
        return r.plan.views(r.workspace)[_ALSO_CALLED.get(name, name)]

    def operands(self, rank: int) -> dict[str, Tensor]:
        """Return what the last backward launch multiplied for weight gradients, see operands_of_weights()."""
        r = self.ranks[rank]
        views = r.plan.views(r.workspace) | r.plan.backward.views(r.backward)
        return training.operands_of_weights(r.plan, views)

    def statistics(self, rank: int) -> Statistics:
        """Return what the last forward did on a rank."""
        cells = Statistics.cells(self.region(rank, "window_routes"), self.region(rank, "epoch"))
        rows = self.ranks[rank].plan.pool_rows
        return Statistics.of_cells(cells, self._prefixes[rank], rows, layout.BLOCK_ROWS)


def stashed_gradients(
    plan: arguments.Plan,
    masters: ExpertWeights,
    stashed: Sequence[StashedRows],
    wanted: GradRequest,
    *,
    num_ctas: int = DEFAULT_CTAS,
    seed: int = 0,
) -> Gradients:
    """Run the launch of one rank that makes weight gradients of stashed passes. stashed: aligned, on the CPU."""
    targets = Targets.make(Kept().weights(masters), wanted.needs.of_weights, wanted.into, nan_like)
    variant = GroupedVariant.of_stash(plan.problem.activation.planes, plan.weight_gradients)
    args, fault = abi.aligned(abi.LAUNCHES[variant.launch]), abi.FaultRecord()
    cells = torch.zeros(2, dtype=torch.int32, device="cpu")
    args.fault, args.fault_ticket = ctypes.addressof(fault), cells[0:].data_ptr()
    args.abort = cells[1:].data_ptr()
    passes = [rows.memory.data_ptr() for rows in stashed]
    zeros = training.stash_zeros(plan, cells.device)
    training.fill_stashed_weights(
        *(args, plan, encode_emulated, passes, targets.tensors),
        accumulate=targets.accumulate,
        zeros=zeros,
    )
    run_alone(variant, args, num_ctas, seed)
    if fault.edge:
        record = {"rank": plan.problem.rank, "waited_ns": 0}
        raise fault_to_error(record | abi.fault_fields(fault))
    return Gradients(None, None, *targets.results())


def run_alone(variant: GroupedVariant, args: Any, num_ctas: int, seed: int) -> None:
    """Run a kernel of one rank that meets no other one to its end. Raises EmulationError."""
    report = ctypes.create_string_buffer(REPORT_BYTES)
    place = ctypes.addressof(args), 1, num_ctas, seed, report, REPORT_BYTES
    if load_kernel(variant)(*place):
        raise EmulationError(report.value.decode(errors="replace"))


_kernels: dict[tuple[Any, Path], Any] = {}


def load_kernel(variant: Any) -> Any:
    """Return the emulated kernel of a variant: (Args of all ranks, ranks, CTAs, seed, report, its bytes) -> status."""
    key = variant, paths.CSRC  # looking for changes in all of csrc takes as long as a small launch
    if key not in _kernels:
        library = ctypes.CDLL(str(host.build_source(variant.source())))
        kernel = getattr(library, variant.entry)
        pointer, text = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_size_t)
        kernel.argtypes = [pointer, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, *text]
        args_bytes = getattr(library, f"{variant.entry}_args_bytes")
        args_bytes.restype = ctypes.c_uint64
        found, expected = args_bytes(), ctypes.sizeof(abi.LAUNCHES[variant.launch])
        if found != expected:
            raise AbiMismatch(f"Args of {variant} has {found} bytes, {expected} here")
        _kernels[key] = kernel
    return _kernels[key]
