"""Represent the ranks of a layer: validate that they agree before memory is allocated, and exchange small messages."""

from __future__ import annotations

import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError, RankMismatch
from megamoe.core.transforms import lasting, outside
from megamoe.core.uncompiled import uncompiled
from megamoe.group.order import FAILED, MARK_INTS, WIDTH, Mark, check_marks, mark_of

T = TypeVar("T")
log = logging.getLogger("megamoe")

ALONE = "alone"
EXPECTED = (
    f'a process group that this process is in, a DeviceMesh of one dimension, None or "{ALONE}"'
)
_HEAD = 2  # numbers beside a mark that say how long a value is
_ROOM = 4 * (WIDTH - MARK_INTS - _HEAD)  # bytes of a value that go with the mark
_ROOM_OF_ERROR = 4 * (WIDTH - MARK_INTS)

_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # what was made on each group


@dataclass(frozen=True)
class RankConfig:
    """Hold what a rank tells the others before memory is allocated. Only `own` and the rank may differ."""

    own: Any = None
    equal: Mapping[str, Any] = field(default_factory=dict)
    problem: Problem | None = None  # with the rank that it was given

    def stated(self) -> dict[str, Any]:
        """Return all that must be equal, by name."""
        fields = {} if self.problem is None else vars(self.problem)
        of_problem = {f"Problem.{name}": repr(v) for name, v in fields.items() if name != "rank"}
        return {**of_problem, **self.equal}


class Group:
    """Represent the ranks that share layers: those of a torch.distributed process group, or one rank alone.

    process_group: of any backend; None: alone. Groups over one process group are equal.
    in_process: True if no other process takes part.

    Every exchange is collective, waits on the host, and begins with a mark. If ranks make different calls, all of them
    raise RankMismatch, which names the calls.
    """

    in_process: bool

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self.num_hosts: int | None = None  # of a mesh of two dimensions
        alone = process_group is None
        self.rank = 0 if alone else dist.get_rank(process_group)
        self.size = 1 if alone else dist.get_world_size(process_group)
        self.in_process = self.size == 1
        # torch's "fake" backend exchanges nothing
        self._exchanges = self.size > 1 and dist.get_backend(process_group) != "fake"
        # True if an exchange or launch has told the others that this rank is in the collective call.
        self.met = False

    @staticmethod
    def of(given: Any) -> Group:
        """Convert a user's argument to a Group; return a Group as it is. Raises ConfigError.

        If several processes were started but torch.distributed is not initialized, dist.group.WORLD is None. So None is
        rejected then. "alone" states that each rank is meant to hold all experts.
        """
        if isinstance(given, Group):
            return given
        if given is None:
            size = os.environ.get("WORLD_SIZE", "")
            started = size.isdigit() and int(size) > 1
            if started and dist.is_available() and not dist.is_initialized():
                raise ConfigError(
                    f"group is None, and so is dist.group.WORLD until dist.init_process_group(), which was not called "
                    f"though WORLD_SIZE is {size}: each rank would hold all experts. Call it before, or say "
                    f'group="{ALONE}" if that is meant'
                )
            return Group()
        if isinstance(given, str) and given == ALONE:
            return Group()
        if isinstance(given, DeviceMesh):
            if given.ndim == 2 and (given.mesh_dim_names or ("",))[0] == "hosts":
                return _of_hosts(given)
            if given.ndim != 1:
                names = f" {given.mesh_dim_names}" if given.mesh_dim_names else ""
                mesh = f"a mesh of {given.ndim} dimensions{names}"
                expected = 'a DeviceMesh of one dimension: mesh["ep"], say, or of two: mesh["hosts", "experts"]'
                raise ConfigError("group", mesh, expected)
            given = given.get_group()
        outside = isinstance(given, int)  # what dist.new_group returns to processes it leaves out
        if not outside and not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
            raise ConfigError("group", repr(given), EXPECTED)
        if outside or dist.get_rank(given) < 0:
            who = f"process {dist.get_rank()}" if dist.is_initialized() else "this process"
            raise ConfigError("group", f"one that {who} is not in", EXPECTED)
        return Group(given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.process_group is other.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    def number(self, what: str) -> int:
        """Count one more `what` of this group; equal on all ranks, because creation is collective. Alone: 0."""
        if self.process_group is None:
            return 0
        counts = _made.setdefault(self.process_group, Counter())
        counts[what] += 1
        return counts[what]

    def mark(self, problem: Problem) -> Mark:
        """Return the mark of a new backend."""
        return Mark(self.number("backends"), problem.fingerprint() & 0x7FFFFFFF)

    def label(self, rank: int) -> str:
        """Return the name of a rank in errors of exchanges."""
        return f"rank {rank}"

    # --- exchanges ---

    def meet(
        self, mark: Sequence[int], parts: Sequence[Tensor] | Tensor = ()
    ) -> tuple[Tensor, Tensor]:
        """Exchange WIDTH numbers with each rank: the mark, then the rank's entry of `parts` [R]. Collective.

        mark: Mark.ints(), or mark_of(). Raises RankMismatch if marks differ. Returns the received [R, WIDTH] int32,
        and its copy in CPU memory.
        """
        self.met = True
        device = parts[0].device if len(parts) else self._device()
        sent = _marked(tuple(mark), self.size, device)
        if isinstance(parts, Tensor):
            sent = sent.clone()
            sent[:, MARK_INTS : MARK_INTS + parts.shape[1]] = parts
        elif parts:
            rows = zip(sent, parts, strict=True)
            pieces = [(row[:MARK_INTS], t, row[MARK_INTS + t.numel() :]) for row, t in rows]
            sent = torch.cat([piece for row in pieces for piece in row]).to(torch.int32)
            sent = sent.view(self.size, WIDTH)
        if not self._exchanges:
            return sent, sent.cpu()
        table = self._swap(sent)
        found = table.cpu()
        marks = found[:, :MARK_INTS].tolist()
        check_marks(marks, self.rank, self.label, lambda rank: _unpacked(found[rank, MARK_INTS:]))
        return table, found

    def gather(self, mark: Sequence[int], value: Any) -> dict[int, Any]:
        """Return rank -> its value, picklable. Collective: one exchange if all fit next to the mark, else two."""
        if not self._exchanges:
            return {self.rank: value}
        data, device = pickle.dumps(value), self._device()
        packed = _padded(data[:_ROOM], _ROOM).view(torch.int32).long()
        size = torch.tensor(divmod(len(data), 1 << 30), device="cpu")
        _, found = self.meet(mark, [torch.cat([size, packed]).to(device)] * self.size)
        numbers = found[:, MARK_INTS:]
        sizes = [(high << 30) + low for high, low in numbers[:, :_HEAD].tolist()]
        rows = numbers[:, _HEAD:].contiguous().view(torch.uint8)
        if max(sizes) > _ROOM:
            row = _padded(data, max(sizes)).to(device)
            rows = self._swap(row.expand(self.size, -1).contiguous()).cpu()
        self.met = False  # another step of the same call follows
        pairs = zip(rows, sizes, strict=True)
        return {
            rank: pickle.loads(row[:n].numpy().tobytes()) for rank, (row, n) in enumerate(pairs)
        }

    def begin(self, call: str) -> None:
        """Begin a collective call of CALLS. If ranks begin different calls, all raise RankMismatch. Collective."""
        if self._exchanges:
            self.meet(mark_of(call))

    # --- errors ---

    def together(self, call: str, backend: Callable[[], Any] = lambda: None) -> Together:
        """Return a context: if its block raises an error before this rank has met the others, all ranks raise.

        Args:
            call: The call that the other ranks wait in, one of CALLS.
            backend: Returns the backend that ends their wait in a call of a layer. Other calls: None.
        """
        return Together(self, call, backend)

    def fail(self, mark: Sequence[int], error: Exception, device: Any = None) -> None:
        """Join the exchange that the others begin with this mark, and make them raise PeerFault. Collective.

        device: Where the others' numbers are. Default: as in meet().
        """
        data = f"{type(error).__name__}: {error}".encode()[:_ROOM_OF_ERROR]
        text = _padded(data, _ROOM_OF_ERROR).view(torch.int32).to(device or self._device())
        self.meet([mark[0] | FAILED, mark[1]], [text] * self.size)

    def barrier(self) -> None:
        """Wait for all ranks. The host waits on every backend, unlike in NCCL's barrier."""
        self.begin("a barrier")

    def _device(self) -> torch.device:
        """Return the device for small tensors of an exchange, as dist.all_gather_object chooses it."""
        nccl = self._exchanges and dist.get_backend(self.process_group) == "nccl"
        return torch.device("cuda" if nccl else "cpu")

    def _swap(self, rows: Tensor) -> Tensor:
        """Send row r of [R, N] to rank r, as bytes, and return the received rows. All exchanges use this collective."""
        out, ones = torch.empty_like(rows), [1] * self.size
        received, sent = (t.view(torch.uint8) for t in (out, rows))
        options = {"group": self.process_group, "async_op": True}
        self.wait(dist.all_to_all_single(received, sent, ones, ones, **options))
        return out

    def wait(self, work: Any) -> None:
        """Wait for an operation of torch.distributed. If it runs on a GPU, the stream waits, not the host."""
        work.wait()

    # --- what ranks agree on ---

    def agree(self, call: str, state: Callable[[], RankConfig]) -> dict[int, Any]:
        """Return rank -> RankConfig.own of the result of state() on that rank. Collective.

        call: the call that this begins, of CALLS. All ranks raise, or none: this rank's error, PeerFault with the
        error of another rank, or RankMismatch if values differ that must be equal.
        """
        with self.together(call):
            facts = state()
            by_rank: dict[int, RankConfig] = self.gather(mark_of(call), facts)
            self.met = True  # all ranks raise the same error
            self._check_equal(by_rank)
        self.met = False
        return {rank: stated.own for rank, stated in by_rank.items()}

    def _check_equal(self, by_rank: Mapping[int, RankConfig]) -> None:
        for rank, config in by_rank.items():
            if self.size > 1 and config.problem is not None and config.problem.rank != rank:
                stated = config.problem.rank
                raise RankMismatch(f"rank {rank} of the group was given Problem.rank = {stated}")
        first = min(by_rank)
        expected = by_rank[first].stated()
        for rank, config in by_rank.items():
            differing = [
                f"{what} is {value} on rank {rank}, {expected[what]} on rank {first}"
                for what, value in config.stated().items()
                if value != expected[what]
            ]
            if differing:
                raise RankMismatch("; ".join(differing))

    def all_or_none(self, what: str, do: Callable[[], T]) -> T:
        """Return do(); raise its error, or PeerFault with that of another rank. what: of CALLS. Collective."""
        with self.together(what):
            made = do()
            self.gather(mark_of(what), None)
        return made


class Together:
    """The context of Group.together(), which may be entered again. While torch compiles it does nothing: torch repeats
    a call that fails then without compiling, and an operator does not fail before its graph runs."""

    def __init__(self, ranks: Group, call: str, backend: Callable[[], Any]) -> None:
        self._ranks, self._call, self._backend = ranks, call, backend

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self._ranks.met = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not torch.compiler.is_compiling():
            self.tell(error)

    @uncompiled("an error of one rank has to reach the others")
    def tell(self, error: Exception) -> None:
        """Make the other ranks raise this rank's error, unless this rank has met them: then they know it."""
        ranks = self._ranks
        if ranks.met or not ranks._exchanges:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return  # nothing runs in a capture, so no rank waits
        log.error("rank %d failed before it met the other ranks: %s", ranks.rank, error)
        with outside():
            if (backend := self._backend()) is not None:
                backend.abort(error)
            else:
                ranks.fail(mark_of(self._call), error)
        ranks.met = True


def _of_hosts(mesh: DeviceMesh) -> Group:
    """Return the group of all ranks of a mesh, host by host. The first dimension of the mesh is hosts."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ConfigError("group", f"a mesh of ranks {ranks}", "one whose ranks ascend")
    whole = ranks == list(range(dist.get_world_size()))
    group = Group(dist.group.WORLD if whole else mesh._flatten().get_group())
    group.num_hosts = mesh.shape[0]
    return group


@lru_cache(maxsize=256)  # a copy from the host's memory would wait for the stream at every call
def _marked(mark: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return [size, WIDTH] int32, the mark and zeros. The tensor is shared: do not write to it."""
    with lasting():
        row = torch.tensor([*mark, *[0] * (WIDTH - MARK_INTS)], dtype=torch.int32, device="cpu")
        return row.repeat(size, 1).to(device)


def _padded(data: bytes, size: int) -> Tensor:
    """Return [size] uint8: the data, then zeros."""
    return torch.frombuffer(bytearray(data).ljust(size, b"\0"), dtype=torch.uint8)


def _unpacked(numbers: Tensor) -> str:
    data = bytes(numbers.contiguous().view(torch.uint8).numpy())
    return data.rstrip(b"\0").decode(errors="replace")
