"""Connect a rank to the equal ranks of all hosts (its rail) and to its own host, and find which rank failed first.

A rank that fails reports it twice: to the ranks that it exchanges data with, by marks, and through torch.distributed's
store, which still answers if a rank is gone. So every rank's error names the rank that failed first, not the one that
passed the error on.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megamoe.core import env
from megamoe.core.errors import (
    ArgumentError,
    ConfigError,
    MegaMoEError,
    PeerFault,
    ProtocolTimeout,
    RankMismatch,
    WindowBroken,
)
from megamoe.group.group import Group
from megamoe.group.hosts import Hosts
from megamoe.group.order import mark_of

RAIL_CTAS = 8  # SMs that NCCL takes at most for a rail; a launch of the kernel leaves as many
# torch.distributed's time-out is this much longer than ours, so that ours fires first: it names the missing rank.
SLACK_S = 10.0
_LOOK_S = 0.25  # between looks at the store
_GRACE_S = 10.0  # that others have at most to say what they saw
# What ranks report, strongest first: the first two leave a layer usable, where nothing is under way.
_REFUSED, _DIFFERS, _FAILED, _WAITED, _TOLD = range(5)

_made: WeakKeyDictionary[Any, dict[Hosts, Links]] = WeakKeyDictionary()


class Part(Group):
    """Some ranks of a wider group, as which errors name them. Its exchanges wait for at most the links' time-out."""

    def __init__(self, links: Links, ranks: Sequence[int], own: int) -> None:
        super().__init__()
        self.links, self.ranks = links, list(ranks)
        self.rank, self.size = self.ranks.index(own), len(self.ranks)
        self.in_process = not self._others
        self._exchanges = bool(self._others)
        self._counts: Counter[str] = Counter()

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def _others(self) -> list[int]:
        return [r for i, r in enumerate(self.ranks) if i != self.rank]

    def number(self, what: str) -> int:
        """Count likewise, however often the process group is made anew."""
        self._counts[what] += 1
        return self._counts[what]

    def label(self, rank: int) -> str:
        """Return how errors call a rank: by its number in the job, and its host."""
        return self.links.names[self.ranks[rank]]

    def wait(self, work: Any) -> None:
        """Wait on the host until an operation is done, and the stream until it has its result.

        Raises ProtocolTimeout where it takes longer than the time-out, or another rank has reported a fault.
        """
        begin, look = time.monotonic(), 2 * _LOOK_S
        try:
            while not work.is_completed():
                waited = time.monotonic() - begin
                if waited > self.links.timeout_s:
                    raise ProtocolTimeout(f"waited {waited:.1f} s for {self._awaited()}")
                if waited > look:
                    look += _LOOK_S
                    if self.links.is_reported():
                        raise ProtocolTimeout(f"left {self._awaited()}: another rank had failed")
                time.sleep(min(2e-3, max(2e-5, waited / 50)))  # at most 2 % too late
            work.wait()
        except MegaMoEError:
            raise
        except RuntimeError as error:  # of torch.distributed, whose engines have types of their own
            raise ProtocolTimeout(f"lost {self._awaited()}: {error}") from error

    def _awaited(self) -> str:
        return " or ".join(self.links.names[r] for r in self._others)


class Links:
    """Hold one rank's process groups for a layer over hosts: its rail and its host. All layers of a group share it.

    Creating it and renew() are collective over the group.
    rail, host: renew() replaces their process groups; the objects stay the same.
    broken: what broke a call so that only renew() helps, or None.
    num_recorded: number of the last call whose gradients are recorded, equal along a rail. Numbers never repeat.
    """

    def __init__(self, group: Group, hosts: Hosts) -> None:
        self.group, self.hosts, self.timeout_s = group, hosts, env.timeout_s()
        jobs = dist.get_process_group_ranks(group.process_group)
        each, (host, local) = hosts.per_host, hosts.place(group.rank)
        self.names = [f"rank {job} on {hosts.names[r // each]}" for r, job in enumerate(jobs)]
        self._jobs = jobs
        self.rail = Part(self, range(local, group.size, each), group.rank)
        self.host = Part(self, range(host * each, (host + 1) * each), group.rank)
        self.broken: str | None = None
        self._round = self._incident = self.num_recorded = 0
        self.renew()

    @staticmethod
    def of(group: Group, hosts: Hosts) -> Links:
        """Return those of a group, made once. Collective."""
        made = _made.setdefault(group.process_group, {})
        if hosts not in made:
            made[hosts] = Links(group, hosts)
        return made[hosts]

    def renew(self) -> None:
        """Make the process groups anew: what was under way in the old ones is lost. Collective over the group."""
        again, self._round = self._round > 0, self.group.number("links")
        for what, part in (("rail", self.rail), ("host", self.host)):
            if part.size > 1:
                ranks, old = [self._jobs[r] for r in part.ranks], part.process_group
                if self.broken is not None and old is not None and "nccl" in dist.get_backend(old):
                    with suppress(RuntimeError):
                        old.abort()  # its kernels would wait on, and hold SMs
                name = f"{self._name()}/{what}/{min(ranks)}"
                whole = self.group.process_group
                part.process_group = _new_group(whole, ranks, name, self.timeout_s)
        self._incident, self.broken = 0, None
        if again:  # ranks that were left in a call have counted it, or not
            counts = self.group.gather(mark_of("set-up"), self.num_recorded)
            self.num_recorded = max(counts.values())

    # --- who broke a call ---

    def is_reported(self) -> bool:
        """Whether some rank has reported a fault of this call."""
        try:
            return bool(self._store().check(["any"]))
        except RuntimeError:
            return False

    def end_incident(self, cause: str | None) -> None:
        """Go on to another incident. cause: what broke the links, if that is so."""
        self._incident += 1
        self.broken = self.broken or cause

    def check(self) -> None:
        """Raise WindowBroken where an earlier call broke the links."""
        if self.broken is not None:
            raise WindowBroken(f"call reset() on all ranks first. The fault was: {self.broken}")

    def report(self, error: Exception, refuses: bool = False) -> bool:
        """Publish this rank's error in the store. Return True if the error started on this rank.

        refuses: the rank makes no call.
        """
        kind = _REFUSED if refuses else _kind(error)
        own = kind in (_REFUSED, _FAILED)
        text = f"{type(error).__name__}: {error}" if own else str(error)
        self._set(str(self.group.rank), json.dumps([kind, text]))
        self._set("any", "")
        return own

    def verdict(self, error: Exception) -> MegaMoEError:
        """Return what broke the call that ended in this error, by what ranks report within a bound."""
        found, said = self._reports()
        deadline = time.monotonic() + min(self.timeout_s / 2, _GRACE_S)
        while (
            said is None
            and 0 < len(found) < self.group.size
            and min((kind for kind, _ in found.values()), default=_TOLD) > _FAILED
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            found, said = self._reports()
        if said is not None:  # by ranks that have gone on since; who was missing then may have come
            return ProtocolTimeout(said)
        strongest = min(((kind, rank) for rank, (kind, _) in found.items()), default=(_TOLD, -1))
        (kind, rank), silent = strongest, [r for r in range(self.group.size) if r not in found]
        if kind == _DIFFERS:
            return RankMismatch(found[rank][1])
        if kind == _REFUSED:
            return PeerFault(f"{self.names[rank]} raised {found[rank][1]}")
        if kind == _FAILED:
            return MegaMoEError(f"{self.names[rank]} failed: {found[rank][1]}")
        if not found:
            return ProtocolTimeout(
                f"{self.names[self.group.rank]} was left by another, or lost it; the store of torch.distributed, which "
                f"would say who began it, does not answer: {error}"
            )
        if silent:
            said = (
                f"{self._list(silent)} did not take part in this call over {len(self.hosts.names)} hosts: dead, later "
                f"than the time-out of {self.timeout_s:g} s, or never made it ({error})"
            )
            self._set("said", said)
            return ProtocolTimeout(said)
        return ProtocolTimeout(f"{self.names[self.group.rank]} {error}")

    def _list(self, ranks: Iterable[int]) -> str:
        by_host: dict[str, list[str]] = {}
        for r in ranks:
            host = self.hosts.names[self.hosts.place(r)[0]]
            by_host.setdefault(host, []).append(str(self._jobs[r]))
        return "; ".join(
            f"rank{'s' * (len(of) > 1)} {', '.join(of)} on {h}" for h, of in by_host.items()
        )

    def _store(self) -> Any:
        name = f"{self._name()}/{self._incident}"
        return dist.PrefixStore(name, distributed_c10d._get_default_store())

    def _name(self) -> str:
        return f"megamoe/{self.group.process_group.group_name}/{self._round}"

    def _set(self, key: str, value: str) -> None:
        # Where the store went with a rank the others find out by themselves.
        with suppress(RuntimeError):
            self._store().set(key, value)

    def _reports(self) -> tuple[dict[int, tuple[int, str]], str | None]:
        """Return what each rank reports that has done so, and what some rank has made of it."""
        found: dict[int, tuple[int, str]] = {}
        with suppress(RuntimeError):
            store = self._store()
            if store.check(["said"]):
                return found, store.get("said").decode()
            for rank in range(self.group.size):
                if store.check([str(rank)]):
                    kind, text = json.loads(store.get(str(rank)))
                    found[rank] = kind, text
        return found, None


def _kind(error: Exception) -> int:
    if isinstance(error, RankMismatch):
        return _DIFFERS
    if isinstance(error, (ProtocolTimeout, PeerFault, WindowBroken)):
        return _WAITED
    return _REFUSED if isinstance(error, (ArgumentError, ConfigError)) else _FAILED


def _new_group(like: Any, ranks: list[int], name: str, timeout_s: float) -> Any:
    backend: str = dist.get_backend(like)
    if backend not in ("gloo", "nccl"):
        backend = dist.get_backend_config(like)
    options, timeout = None, timedelta(seconds=timeout_s + SLACK_S)
    if "nccl" in str(backend):
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas, options._timeout = RAIL_CTAS, timeout
    # torch's own name counts the groups that a rank is in: where ranks are in others, they would wait for each other
    # under different names.
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        return dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options,
            use_local_synchronization=True,
        )
    finally:
        distributed_c10d._process_group_name = original
