"""The kernel's own source on CPU fibers (csrc/fibers): all ranks in one process, no GPU.

Slow (tiny shapes), but it runs every role, barrier, swizzle and protocol step of the real kernel, and says
who waits for what when something hangs.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megamoe import env
from megamoe.backends.order import REFUSED, Mark, meet
from megamoe.backends.reference.backend import pack, unpack
from megamoe.backends.statistics import Statistics
from megamoe.config import Problem
from megamoe.errors import AbiMismatch, ConfigError, MegaMoEError, WindowBroken, fault_to_error
from megamoe.formats.weights import ExpertWeights
from megamoe.jit import abi, host
from megamoe.jit.source import Variant
from megamoe.memory import arguments, layout
from megamoe.memory.arguments import Plan
from megamoe.memory.transport.group import Group, TorchGroup, as_group

MAP_MARK = 0x70614D54  # EmulatedTensorMap::valid_mark in csrc/fibers/tma.h
REPORT_BYTES = 1 << 16
DEFAULT_CTAS = 2

# Data that the kernel must write before it reads: filled with NaN patterns when a rank's memory is made.
_POISONED = (
    *("x_pool", "x_pool_scale", "h", "h_scale", "y_rows"),
    *("window_weights", "window_x", "window_x_scale", "window_partials"),
)


class EmulationError(MegaMoEError):
    """The emulated machine stopped: a deadlock, or an operation that the hardware would not accept."""


def encode_emulated(
    base: int,
    dims: Sequence[int],
    strides_bytes: Sequence[int],
    box: Sequence[int],
    element_bytes: int,
) -> bytes:
    """Return an EmulatedTensorMap, innermost dimension first; the stand-in for cuTensorMapEncodeTiled."""

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[0] * (count - len(values))]

    packed = struct.pack(
        "<QII4Q3Q4II",
        *(base, MAP_MARK, len(dims)),
        *(*padded(dims, 4), *padded(strides_bytes, 3), *padded(box, 4), element_bytes),
    )
    return packed.ljust(128, b"\0")


@dataclass
class _Rank:
    """Memory of one emulated rank; what a GPU would hold."""

    plan: Plan
    window: Tensor
    workspace: Tensor
    fault: Any

    @classmethod
    def make(cls, problem: Problem, pool_rows: int | None) -> _Rank:
        rows = layout.default_pool_rows(problem) if pool_rows is None else pool_rows
        plan = Plan(problem, rows)
        window = _aligned_zeros(layout.total_bytes(plan.window))
        workspace = _aligned_zeros(plan.workspace_bytes)
        for regions, memory in ((plan.window, window), (plan.workspace, workspace)):
            for name in _POISONED:
                if name in regions:
                    memory[regions[name].offset : regions[name].end] = 0xFF
        workspace[plan.state_offset :] = 0xFF
        return cls(plan, window, workspace, abi.FaultRecord())

    def reset(self) -> None:
        for regions, names, memory in (
            (self.plan.window, layout.WINDOW_CONTROL, self.window),
            (self.plan.workspace, layout.WORKSPACE_CONTROL, self.workspace),
        ):
            for name in names:
                regions[name].view(memory).zero_()
        ctypes.memset(ctypes.addressof(self.fault), 0, ctypes.sizeof(self.fault))


def _aligned_zeros(nbytes: int) -> Tensor:
    raw = torch.zeros(nbytes + layout.ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -raw.data_ptr() % layout.ALIGNMENT
    return raw[start : start + nbytes]


class Emulation:
    """All ranks of a group in this process. Windows, workspaces and epochs live as long as the object.

    problem: of any rank. num_ctas: of each rank, even. pool_rows: of every rank (None: the default of each).
    flags: further ones for g++, such as "-fsanitize=undefined".
    """

    def __init__(
        self,
        problem: Problem,
        *,
        num_ctas: int = DEFAULT_CTAS,
        pool_rows: int | None = None,
        step_blocks: int = arguments.DEFAULT_STEP_BLOCKS,
        timeout_s: float | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        if not 2 <= num_ctas <= 64 or num_ctas % 2:
            raise ConfigError("num_ctas", num_ctas, "an even number, 2..64: CTAs run in pairs")
        self.problem, self.num_ctas, self.step_blocks = problem, num_ctas, step_blocks
        self.timeout_ns = int((env.timeout_s() if timeout_s is None else timeout_s) * 1e9)
        variant = Variant(problem.precision, problem.activation.kind)
        self.kernel = getattr(_load(variant, flags), variant.entry)
        self.ranks = [
            _Rank.make(replace(problem, rank=r), pool_rows) for r in range(problem.ep_size)
        ]
        self.report = ""
        self.broken: MegaMoEError | None = None

    def forward_all(
        self,
        xs: Sequence[Tensor],
        topk_ids: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[ExpertWeights],
        *,
        num_tokens_device: Sequence[Tensor | None] | None = None,
        states: Sequence[Tensor] | None = None,
        seed: int = 0,
    ) -> list[Tensor]:
        """Run one launch of all ranks; the sequences have one entry a rank. Return their y [T, H] bf16.

        states: [bytes] uint8 each, where this call leaves its state (Plan.state) in place of the workspace's.
        seed: of the order in which fibers run and copies land; 0 is round robin.
        """
        if self.broken is not None:
            raise WindowBroken(f"call reset() first. The fault was: {self.broken}")
        devices = [x.device for x in xs]
        keep: list[Tensor] = []  # what the argument blocks point to

        def here(tensor: Tensor | None) -> Any:
            if tensor is None:
                return None
            tensor = tensor.detach().cpu().contiguous()
            keep.append(tensor if tensor.data_ptr() % 16 == 0 else tensor.clone())
            return keep[-1]

        def in_place(tensor: Tensor) -> Tensor:
            """Keep the strides: the maps have them."""
            tensor = tensor.detach().cpu()
            keep.append(tensor if tensor.data_ptr() % 16 == 0 else tensor.contiguous().clone())
            return keep[-1]

        ys = []
        size = ctypes.sizeof(abi.Args)
        memory = ctypes.create_string_buffer(size * len(self.ranks) + abi.Args.alignment)
        address = ctypes.addressof(memory) + -ctypes.addressof(memory) % abi.Args.alignment
        bases = [rank.window.data_ptr() for rank in self.ranks]
        for index, rank in enumerate(self.ranks):
            args = abi.Args.from_address(address + index * size)
            given = _tensors(weights[index]).items()
            kept = {n: (in_place if n in ("w13", "w2") else here)(t) for n, t in given}
            experts = ExpertWeights(**kept)
            ys.append(torch.full(xs[index].shape, float("nan"), dtype=torch.bfloat16, device="cpu"))
            arguments.fill_static(
                args,
                rank.plan,
                window_bases=bases,
                workspace_base=rank.workspace.data_ptr(),
                encoder=encode_emulated,
                timeout_ns=self.timeout_ns,
                fault=ctypes.addressof(rank.fault),
                step_blocks=self.step_blocks,
            )
            if states is not None:
                arguments.fill_state(args, rank.plan, states[index].data_ptr())
            arguments.fill_weights(args, rank.plan, experts, encode_emulated)
            tokens = None if num_tokens_device is None else here(num_tokens_device[index])
            x, ids, scores = (here(t[index]) for t in (xs, topk_ids, topk_weights))
            arguments.fill_call(args, x, ids, scores, ys[-1], tokens)
        self._launch(address, seed)
        return [y.to(device) for y, device in zip(ys, devices, strict=True)]

    def _launch(self, address: int, seed: int) -> None:
        report = ctypes.create_string_buffer(REPORT_BYTES)
        status = self.kernel(address, len(self.ranks), self.num_ctas, seed, report, REPORT_BYTES)
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
        """Make the ranks usable again after a fault."""
        for rank in self.ranks:
            rank.reset()
        self.broken = None

    def region(self, rank: int, name: str) -> Tensor:
        """Return a view of a region of a rank's window or workspace, as the last launch left it."""
        r = self.ranks[rank]
        if name in r.plan.window:
            return r.plan.window[name].view(r.window)
        return r.plan.views(r.workspace)[name]

    def statistics(self, rank: int) -> Statistics:
        """Return what the last launch did on a rank."""
        tables = (self.region(rank, n) for n in ("window_routes", "chunk_prefix", "epoch"))
        return Statistics.of_tables(*tables, self.ranks[rank].plan.pool_rows, layout.BLOCK_ROWS)


_libraries: dict[str, Any] = {}


def _load(variant: Variant, flags: tuple[str, ...]) -> Any:
    path = str(host.build_host(variant, flags))
    if path not in _libraries:
        library = ctypes.CDLL(path)
        getattr(library, variant.entry).argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64),
            *(ctypes.c_char_p, ctypes.c_size_t),
        ]
        args_bytes = getattr(library, f"{variant.entry}_args_bytes")
        args_bytes.restype = ctypes.c_uint64
        found, expected = args_bytes(), ctypes.sizeof(abi.Args)
        if found != expected:
            raise AbiMismatch(f"Args has {found} bytes in {path}, {expected} here")
        _libraries[path] = library
    return _libraries[path]


class EmulateBackend:
    """The backend interface: rank 0 gathers what all ranks were given, emulates them all, and shares the results."""

    name = "emulate"
    differentiable = False

    def __init__(
        self,
        problem: Problem,
        group: Any = None,
        *,
        num_ctas: int = DEFAULT_CTAS,
        pool_rows: int | None = None,
    ) -> None:
        self.problem, self.group = problem, as_group(group)
        self.mark = Mark.make(problem, group)
        self._options = {"num_ctas": num_ctas, "pool_rows": pool_rows}
        self._statistics: Statistics | None = None
        self._emulation: Emulation | None = None

    @property
    def emulation(self) -> Emulation:
        """The ranks; made on first use, on rank 0 only."""
        if self._emulation is None:
            self._emulation = Emulation(self.problem, **self._options)
        return self._emulation

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile the kernel. Collective."""
        _on_rank_0(self.group, lambda: self.emulation.report)

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H] bf16. Collective."""
        weights.validate(self.problem, x.device)
        tensors = tuple(_to(t, "cpu") for t in (x, topk_ids, topk_weights, num_tokens_device))
        experts = ExpertWeights(**{name: _to(t, "cpu") for name, t in _tensors(weights).items()})
        self._meet(0)
        everyone = self.group.all_gather((*tensors, pack(experts)))
        xs, ids, scores, counts, all_experts = map(list, zip(*everyone, strict=True))

        def run() -> list[tuple[Tensor, Statistics]]:
            all_weights = [unpack(e) for e in all_experts]
            ys = self.emulation.forward_all(xs, ids, scores, all_weights, num_tokens_device=counts)
            return [(y, self.emulation.statistics(rank)) for rank, y in enumerate(ys)]

        y, found = _on_rank_0(self.group, run)[self.problem.rank]
        self._statistics = Statistics(*(t.to(x.device) for t in vars(found).values()))
        return y.to(x.device) if out is None else out.copy_(y)

    def statistics(self) -> Statistics:
        """Return those of the last forward."""
        return Statistics.of_last(self._statistics)

    def refuse(self) -> None:
        """Tell the ranks that meet for a call that this one makes none. Collective."""
        self._meet(REFUSED)

    def _meet(self, flags: int) -> None:
        if isinstance(self.group, TorchGroup):
            meet(self.group.process_group, self.mark.ints(flags))

    def check(self) -> None:
        """Nothing can be pending: forward raises where it fails."""

    def close(self) -> None:
        """Free the emulated ranks."""
        self._emulation = None


def _tensors(weights: ExpertWeights) -> dict[str, Any]:
    return {field.name: getattr(weights, field.name) for field in fields(weights)}


def _to(tensor: Tensor | None, device: str) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(device)


def _on_rank_0(group: Group, function: Any) -> Any:
    """Return function() of rank 0 on all ranks; its exception is everybody's."""
    result, error = None, None
    if group.rank == 0:
        try:
            result = function()
        except MegaMoEError as caught:
            error = caught
        except Exception as caught:  # the other ranks wait for an answer, whatever it is
            error = MegaMoEError(f"rank 0 could not emulate: {type(caught).__name__}: {caught}")
    if group.size > 1:
        result, error = group.all_gather((result, error))[0]
    if error is not None:
        raise error
    return result
