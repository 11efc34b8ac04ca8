"""Select the backend of a layer: the table of backends, their options, and the meaning of "auto"."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from megamoe.backends.call import Backend
from megamoe.backends.emulate.backend import EmulateBackend
from megamoe.backends.hosts.backend import MAX_CHUNKS, HostsBackend, chunks_of, inside
from megamoe.backends.hosts.plan import EXCHANGES
from megamoe.backends.mega.backend import MegaBackend, Stated, check_stated, why_not_mega
from megamoe.backends.options import OF_BACKENDS
from megamoe.backends.reference.backend import ReferenceBackend
from megamoe.backends.staged import StagedBackend
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.group.group import Group, RankConfig
from megamoe.group.hosts import Hosts, host_name, spans_hosts
from megamoe.group.links import RAIL_CTAS, Links
from megamoe.group.order import mark_of
from megamoe.launch.layout import check_window, default_pool_rows

log = logging.getLogger("megamoe")

BACKENDS: dict[str, Any] = {
    "mega": MegaBackend,
    "staged": StagedBackend,
    "emulate": EmulateBackend,
    "reference": ReferenceBackend,
}
# backends that run inside each host where a group spans several; by name only, see hosts_of()
INSIDE_HOSTS = ("mega", "emulate", "reference")


def hosts_of(
    name: str, problem: Problem, group: Group, names: Sequence[str], options: Mapping[str, Any]
) -> Hosts | None:
    """Return the hosts that a named backend runs inside of; None: it runs over all ranks. names: of each rank's host.

    "auto" stays with `staged` over several hosts: until GPUs of several hosts have run the kernel inside each, nobody
    is given that unasked. Raises ConfigError for hosts with unequal numbers of ranks, or not side by side, and for a
    problem that the backend cannot have there.
    """
    asked, found = resolve(name), None
    if asked in INSIDE_HOSTS and (group.num_hosts is not None or len(set(names)) > 1):
        found = Hosts.of(names, group.num_hosts)
        found = found if len(found.names) > 1 else None
    here = problem if found is None else inside(problem, found, options.get("chunks"))
    if asked in ("mega", "emulate"):
        check_window(here)
    return found


def resolve(name: str) -> str:
    """Return the backend asked for, MEGAMOE_BACKEND in place of "auto". Raises ConfigError."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ConfigError("backend", repr(name), "auto, " + ", ".join(BACKENDS))
    return env.get("MEGAMOE_BACKEND") if name == "auto" else name


@dataclass(frozen=True)
class Opening:
    """Ask for a backend as part of a collective call.

    options: OF_BACKENDS. call: of order.CALLS. layer: its number on the group, since a rank may open layers that are
    alike in another order. equal: what has to be so on all ranks, by name.
    """

    name: str
    problem: Problem
    group: Group
    device: torch.device
    options: Mapping[str, Any] = field(default_factory=dict)
    call: str = "set-up"
    layer: int = 0
    equal: Mapping[str, Any] = field(default_factory=dict)


def window_of(opening: Opening) -> tuple[Problem, Group] | None:
    """Return the problem and the group of the window that a layer has, or None where it has none. Collective."""
    chosen = choose(opening)
    if chosen.name != "mega":
        return None
    if chosen.hosts is None:
        return opening.problem, opening.group
    here = inside(opening.problem, chosen.hosts, opening.options.get("chunks"))
    return here, Links.of(opening.group, chosen.hosts).host


class _Chosen(NamedTuple):
    """hosts: inside each of which it runs, or None. stated: what each rank said of its launches, for "mega"."""

    name: str
    hosts: Hosts | None = None
    stated: Mapping[int, Any] = {}


def choose(opening: Opening) -> _Chosen:
    """Return the backend that `opening.name` stands for, agreed on over the group. Collective."""
    name, problem, group, options = opening.name, opening.problem, opening.group, opening.options

    def state() -> RankConfig:
        check_options(problem, group, options)
        asked = resolve(name)
        wanted, launches = asked in ("auto", "mega"), None
        reason = why_not_mega(problem, opening.device) if wanted else None
        if wanted and reason is None:
            launches = Stated.here(group, options.get("reserve_sms"))
        return RankConfig(
            (host_name(), reason, launches),
            {
                "backend": repr(asked),
                "window is given": options.get("window") is not None,
                **agreed_options(problem, options),
                "what is opened": f"layer {opening.layer} of the group",
                **opening.equal,
            },
            problem,
        )

    said = group.agree(opening.call, state)
    asked, names = resolve(name), [host for host, *_ in said.values()]
    hosts = hosts_of(name, problem, group, names, options)
    if asked not in ("auto", "mega"):
        return _Chosen(asked, hosts)
    why = spans_hosts(names) if hosts is None else None
    if why is not None:
        why += '; backend="mega" by name runs inside each, which no GPUs of several hosts have run'
    elif hosts is None:
        why = problem.why_no_window()
    for rank, (_, own, _) in said.items():
        if why is None and own is not None:
            why = f"rank {rank}: {own}" if len(said) > 1 else own
    if why is None:
        stated = {rank: launches for rank, (*_, launches) in said.items()}
        check_stated(stated)
        return _Chosen("mega", hosts, stated)
    if asked == "mega":
        raise cannot_run(why)
    if problem.rank == 0:
        _say_why(why)
    return _Chosen("staged")


@cache
def _say_why(reason: str) -> None:
    """Log once a process, not once a layer."""
    log.warning('backend "auto" is staged here, not mega: %s', reason)


def cannot_run(reason: str) -> ConfigError:
    """Return the error of an explicit "mega" that cannot run."""
    return ConfigError("backend", "'mega'", f"one that can run here: {reason}")


def check_options(problem: Problem, group: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown option, or a problem of another size than the group."""
    if not isinstance(problem, Problem):
        raise ConfigError("problem", type(problem).__name__, "megamoe.Problem")
    reserve, window = options.get("reserve_sms"), options.get("window")
    if reserve is not None and (not isinstance(reserve, int) or reserve < 0):
        raise ConfigError("reserve_sms", repr(reserve), "None or a number of SMs")
    env.timeout_s(options.get("timeout_s"))
    chunks, exchange = options.get("chunks"), options.get("exchange")
    most = min(problem.max_tokens, MAX_CHUNKS)
    if chunks is not None and not (type(chunks) is int and 1 <= chunks <= most):
        of = "max_tokens = " if most < MAX_CHUNKS else ""
        expected = f"None or a number from 1 to {of}{most}"
        raise ConfigError("chunks", repr(chunks), expected)
    if exchange not in (None, *EXCHANGES):
        raise ConfigError("exchange", repr(exchange), " or ".join(map(repr, EXCHANGES)))
    products, known = options.get("weight_gradients"), problem.formats.weight_gradients
    if products not in (None, *known):
        expected = " or ".join(map(repr, known)) + f" with precision {problem.precision!r}"
        raise ConfigError("weight_gradients", repr(products), expected)
    if window is not None and not hasattr(window, "admit"):
        raise ConfigError("window", repr(window), "None or a megamoe.window.window.Window")
    for option in options.keys() - set(OF_BACKENDS):
        raise ConfigError("option", repr(option), "one of " + ", ".join(OF_BACKENDS))
    size = 1 if group is None else Group.of(group).size
    if size != problem.ep_size:
        raise ConfigError("ep_size", problem.ep_size, f"{size}, the size of the group")


def operands_of(problem: Problem, given: str | None) -> str:
    """Return what weight gradients multiply: as given, or the precision's default."""
    return given or problem.formats.weight_gradients[0]


def agreed_options(problem: Problem, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that ranks have to agree on."""
    return {
        "weight_gradients": operands_of(problem, options.get("weight_gradients")),
        "chunks": options.get("chunks"),
        "exchange": options.get("exchange") or next(iter(EXCHANGES)),
    }


def check_device(name: str, problem: Problem, device: torch.device | str | None) -> None:
    """Raise ConfigError, before memory is taken, where parameters on `device` could never be used."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", device, "one that torch can use: it finds no CUDA device")
    moves = device.type == "meta" or (device.type == "cpu" and torch.cuda.is_available())
    if resolve(name) != "mega" or moves:
        return
    if (reason := why_not_mega(problem, device)) is not None:
        raise cannot_run(reason)


def make_backend(
    name: str, problem: Problem, group: Any = None, *, device: torch.device | str, **options: Any
) -> Backend:
    """Create a backend: "auto", "mega", "staged", "emulate" or "reference". Collective.

    options: OF_BACKENDS. A backend ignores what it does not know, since "auto" may choose either; None means unset.
    Raises ConfigError for unknown names and options and for "mega" where it cannot run, RankMismatch where ranks
    differ.
    """
    where = Group.of(group), torch.device(device)
    return open_backend(Opening(name, problem, *where, options, "make_backend()"))


def open_backend(opening: Opening) -> Backend:
    """Make the backend that was asked for. Collective."""
    chosen = choose(opening)
    if chosen.hosts is None:
        return _made(replace(opening, name=chosen.name), chosen.stated)
    return _made_over_hosts(opening, chosen.name, chosen.hosts)


def _made(opening: Opening, stated: Mapping[int, Any] | None = None) -> Backend:
    """stated: what ranks said of their launches; None: they say so now."""
    name, problem, options = opening.name, opening.problem, opening.options
    make = BACKENDS[name]
    accepted = inspect.signature(make).parameters
    if "weight_gradients" not in accepted and options.get("weight_gradients") == "e4m3":
        raise ConfigError("weight_gradients", "'e4m3'", f"'bf16' with backend {name!r}")
    given = {key: value for key, value in options.items() if value is not None}
    given["weight_gradients"] = operands_of(problem, options.get("weight_gradients"))
    given |= {"device": opening.device, "agreed": stated}
    given = {key: value for key, value in given.items() if key in accepted}
    backend: Backend = make(problem, opening.group, **given)
    return backend


def _made_over_hosts(opening: Opening, name: str, hosts: Hosts) -> Backend:
    """Make the backend inside each host, and what stands around it; a rank's error is everybody's. Collective."""
    problem, group, options = opening.problem, opening.group, opening.options
    links = Links.of(group, hosts)
    links.timeout_s = env.timeout_s(options.get("timeout_s"))
    if any(group.gather(mark_of("set-up"), links.broken is not None).values()):
        links.renew()
    given = {name: value for name, value in options.items() if value is not None}
    if env.reserve_sms() is None:  # the rail's kernels run beside those of the layer
        given.setdefault("reserve_sms", RAIL_CTAS)
    agreed = agreed_options(problem, options)
    chunks, exchange = agreed["chunks"], agreed["exchange"]

    def make(here: Problem) -> Backend:
        # A token has a part of its routes here: the pool need not be larger than for one host's tokens.
        tokens = -(-problem.max_tokens // chunks_of(problem, links.hosts, chunks))
        rows = default_pool_rows(replace(here, rank=0, max_tokens=tokens))
        within = {"pool_rows": rows, **given}
        return _made(replace(opening, name=name, problem=here, group=links.host, options=within))

    def make_all() -> Backend:
        return HostsBackend(problem, links, make, chunks=chunks, exchange=exchange, group=group)

    return group.all_or_none("set-up", make_all)
