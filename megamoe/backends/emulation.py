"""The kernel's own source on CPU fibers (csrc/fibers): all ranks in one process, no GPU.

Slow (tiny shapes), but it runs every role, barrier, swizzle and protocol step of the real kernels, and says
who waits for what when something hangs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megamoe.backends.emulated_rank import Kept, Rank, aligned_zeros, encode_emulated, nan_like
from megamoe.backends.gradients import Targets
from megamoe.backends.statistics import Statistics
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import AbiMismatch, ConfigError, MegaMoEError, WindowBroken, fault_to_error
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, TurnedWeights
from megamoe.jit import abi, host
from megamoe.jit.source import Variant
from megamoe.launch import arguments, layout, training

REPORT_BYTES = 1 << 16
DEFAULT_CTAS = 2
# What backward calls regions that have another name in the workspace where x has no scales.
_ALSO_CALLED = {"dy_rows": "x_pool", "hs": "h", "dx_rows": "y_rows"}
_ALL_NEEDED = (True,) * 6


class EmulationError(MegaMoEError):
    """The emulated machine stopped: a deadlock, or an operation that the hardware would not accept."""


class Emulation:
    """All ranks of a group in this process. Windows, workspaces and epochs live as long as the object.

    problem: of any rank. num_ctas: of each rank, even. pool_rows: of every rank (None: the default of each).
    flags: further ones for g++, such as "-fsanitize=undefined". join_ns, peers_ns: see
    arguments.fill_static; emulated time. profile: the variants with timestamps; `profiles` has the marks of the last
    launch, [num_ctas, 16] int64 by rank, in emulated ns.

    All calls take sequences with one entry a rank. seed: of the order in which fibers run and copies land; 0 is round
    robin. layer: which of the window's, see arguments.fill_static.
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
        join_ns: int = 0,
        peers_ns: int = 10**6,
        profile: bool = False,
    ) -> None:
        if not 2 <= num_ctas <= 64 or num_ctas % 2:
            raise ConfigError("num_ctas", num_ctas, "an even number, 2..64: CTAs run in pairs")
        self.problem, self.num_ctas, self.step_blocks = problem, num_ctas, step_blocks
        self.timeout_ns = int(env.timeout_s(timeout_s) * 1e9)
        self._flags, self.join_ns, self.peers_ns = flags, join_ns, peers_ns
        self.ranks = [
            Rank.make(replace(problem, rank=r), pool_rows) for r in range(problem.ep_size)
        ]
        self.profiles = [
            torch.zeros(
                num_ctas if profile else 0, arguments.PROFILE_SLOTS, dtype=torch.int64, device="cpu"
            )
            for _ in self.ranks
        ]
        self.report = ""
        self.broken: MegaMoEError | None = None
        self._prefixes: list[Tensor] = []  # chunk_prefix of the last forward, by rank
        self.written: list[
            list[Tensor | None]
        ] = []  # what a launch that failed left of its results, by rank

    def variant(self, kind: str = "forward") -> Variant:
        """Return the kernel of a direction."""
        profile = self.profiles[0].numel() > 0
        panels = any("panels" in rank.plan.workspace for rank in self.ranks)
        return Variant(self.problem.precision, self.problem.activation.kind, profile, kind, panels)

    def kernel(self, kind: str = "forward") -> Any:
        """Compile, or load, the kernel of a direction."""
        return load_kernel(self.variant(kind), self._flags)

    def forward_all(
        self,
        xs: Sequence[Tensor | QuantizedRows],
        topk_ids: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[ExpertWeights],
        *,
        num_tokens_device: Sequence[Tensor | None] | None = None,
        states: Sequence[Tensor] | None = None,
        seed: int = 0,
        layer: int = 0,
        kind: str = "forward",
    ) -> list[Tensor]:
        """Run one launch of all ranks. Return their y [T, H] bf16.

        states: [bytes] uint8 each, where this call leaves its state (Plan.state, or Plan.train_state with kind
        "train") in place of the workspace's.
        """
        kept = Kept()
        scales = [x.scale if isinstance(x, QuantizedRows) else None for x in xs]
        xs = [x.q if isinstance(x, QuantizedRows) else x for x in xs]
        ys = [nan_like(x, torch.bfloat16) for x in xs]
        counts = num_tokens_device or [None] * len(self.ranks)

        def fill(index: int, args: Any) -> None:
            plan = self.ranks[index].plan
            arguments.fill_weights(args, plan, kept.weights(weights[index]), encode_emulated)
            if kind == "train":
                assert states is not None
                training.fill_train_state(args, plan, states[index].data_ptr(), encode_emulated)
            elif states is not None:
                arguments.fill_state(args, plan, states[index].data_ptr())
            tensors = (kept.flat(t[index]) for t in (xs, topk_ids, topk_weights))
            further = (kept.flat(t[index]) for t in (counts, scales))
            arguments.fill_call(args, *tensors, ys[index], *further)

        self.written = [[y] for y in ys]
        self._prefixes = [self._prefix(r, kind, states) for r in range(len(ys))]
        self._launch(kind, fill, seed, layer)
        return [y.to(x.device) for y, x in zip(ys, xs, strict=True)]

    def _prefix(self, rank: int, kind: str, states: Sequence[Tensor] | None) -> Tensor:
        plan = self.ranks[rank].plan
        if states is None:
            return plan.views(self.ranks[rank].workspace)["chunk_prefix"]
        regions = plan.train_state if kind == "train" else plan.state
        return regions["chunk_prefix"].view(states[rank])

    def train_all(
        self,
        xs: Sequence[Tensor],
        topk_ids: Sequence[Tensor],
        topk_weights: Sequence[Tensor],
        weights: Sequence[ExpertWeights],
        *,
        states: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Do the same and save for backward_all. Return y and state [bytes] uint8.

        states: memory to use. options: num_tokens_device, seed, layer.
        """
        if states is None:
            states = [aligned_zeros(r.plan.train_state_bytes).fill_(0xFF) for r in self.ranks]
        call = (xs, topk_ids, topk_weights, weights)
        ys = self.forward_all(*call, states=states, kind="train", **options)
        return ys, [state.to(x.device) for state, x in zip(states, xs, strict=True)]

    def backward_all(
        self,
        dys: Sequence[Tensor],
        xs: Sequence[Tensor],
        topk_ids: Sequence[Tensor],
        weights: Sequence[ExpertWeights],
        states: Sequence[Tensor],
        *,
        needs: Sequence[Sequence[bool]] | None = None,
        into: Sequence[Mapping[str, Tensor] | None] | None = None,
        num_tokens_device: Sequence[Tensor | None] | None = None,
        only_weights: Sequence[bool] | None = None,
        turned: Sequence[TurnedWeights] | None = None,
        seed: int = 0,
        layer: int = 0,
    ) -> list[list[Tensor | None]]:
        """Run one backward launch of all ranks. Return of each: dx, d_topk_weights, dw13, dw2, db13, db2.

        weights: the bf16 masters. turned: what is multiplied in FP8; None: made from the masters. states: train_all's.
        needs: flags in the order of what is returned; into: by name, what is added to instead
        (megamoe/backends/gradients.py). They may differ from rank to rank. only_weights: the launch makes neither dx
        nor d_topk_weights.
        """
        kept = Kept()
        ranks = range(len(self.ranks))
        wanted = [_ALL_NEEDED] * len(ranks) if needs is None else needs
        sums = [None] * len(ranks) if into is None else into
        counts = num_tokens_device or [None] * len(ranks)
        masters = [kept.weights(w) for w in weights]
        if self.problem.formats.w.scaled and turned is None:
            turned = [
                TurnedWeights.of(r.plan.problem, w.quantized(r.plan.problem))
                for r, w in zip(self.ranks, weights, strict=True)
            ]
        targets = [Targets.make(masters[r], wanted[r][2:], sums[r], nan_like) for r in ranks]
        # The kernel leaves tokens behind the count alone: they have no gradient.
        empty = [nan_like if count is None else torch.zeros_like for count in counts]
        dxs = [empty[r](dys[r]) for r in ranks]
        d_weights = [empty[r](topk_ids[r], dtype=torch.float32) for r in ranks]

        def fill(index: int, args: Any) -> None:
            rank = self.ranks[index]
            training.fill_backward(args, rank.plan, rank.backward.data_ptr(), encode_emulated)
            of_rank = masters[index].with_flat_bias()
            given = of_rank if turned is None else kept.turned(turned[index])
            training.fill_backward_weights(args, rank.plan, given, encode_emulated)
            state = kept.flat(states[index])
            training.fill_train_state(args, rank.plan, state.data_ptr(), encode_emulated)
            training.fill_gradients(args, rank.plan, encode_emulated, **targets[index].arguments)
            training.fill_backward_call(
                args,
                dy=kept.flat(dys[index]),
                x=kept.flat(xs[index]),
                topk_ids=kept.flat(topk_ids[index]),
                dx=dxs[index],
                d_topk_weights=d_weights[index],
                num_tokens_device=kept.flat(counts[index]),
                only_weights=only_weights is not None and only_weights[index],
            )

        self.written = [[dxs[r], d_weights[r], *targets[r].tensors] for r in ranks]
        self._launch("backward", fill, seed, layer)
        results = []
        for r in ranks:
            found = [dxs[r], d_weights[r], *targets[r].results()]
            asked = zip(found, wanted[r], strict=True)
            results.append(
                [t.to(dys[r].device) if need and t is not None else None for t, need in asked]
            )
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
                args,
                rank.plan,
                window_bases=bases,
                workspace_base=rank.workspace.data_ptr(),
                encoder=encode_emulated,
                timeout_ns=self.timeout_ns,
                fault=ctypes.addressof(rank.fault),
                step_blocks=self.step_blocks,
                layer=layer,
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

    def statistics(self, rank: int) -> Statistics:
        """Return what the last forward did on a rank."""
        tables = (
            self.region(rank, "window_routes"), self._prefixes[rank], self.region(rank, "epoch")
        )  # fmt: skip
        return Statistics.of_tables(*tables, self.ranks[rank].plan.pool_rows, layout.BLOCK_ROWS)


_libraries: dict[str, Any] = {}


def load_kernel(variant: Any, flags: tuple[str, ...] = ()) -> Any:
    """Return the emulated kernel of a variant: (Args of all ranks, ranks, CTAs, seed, report, its bytes) -> status."""
    path = str(host.build_host(variant, flags))
    if path not in _libraries:
        library = ctypes.CDLL(path)
        getattr(library, variant.entry).argtypes = [
            *(ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_uint64),
            *(ctypes.c_char_p, ctypes.c_size_t),
        ]
        args_bytes = getattr(library, f"{variant.entry}_args_bytes")
        args_bytes.restype = ctypes.c_uint64
        found, expected = args_bytes(), ctypes.sizeof(abi.LAUNCHES[variant.launch])
        if found != expected:
            raise AbiMismatch(f"Args has {found} bytes in {path}, {expected} here")
        _libraries[path] = library
    return getattr(_libraries[path], variant.entry)
