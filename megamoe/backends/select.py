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


def hosts_of(name: str, group: Group, hosts: Sequence[str]) -> Hosts | None:
    """Return the hosts that a named backend runs inside of; None: it runs over all ranks. hosts: name of each rank's.

    "auto" stays with `staged` over several hosts: until GPUs of several hosts have run the kernel inside each, nobody
    is given that unasked. Raises ConfigError for hosts with unequal numbers of ranks, or not side by side.
    """
    if resolve(name) not in INSIDE_HOSTS or (group.num_hosts is None and len(set(hosts)) == 1):
        return None
    found = Hosts.of(hosts, group.num_hosts)
    return found if len(found.names) > 1 else None


def check_inside(
    name: str, problem: Problem, hosts: Hosts | None, options: Mapping[str, Any]
) -> None:
    """Raise ConfigError where a backend cannot have the problem that it is given on each host."""
    if hosts is not None:
        problem = inside(problem, hosts, options.get("chunks"))
    if resolve(name) in ("mega", "emulate"):
        check_window(problem)


def resolve(name: str) -> str:
    """Return the backend asked for, MEGAMOE_BACKEND in place of "auto". Raises ConfigError."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ConfigError("backend", repr(name), "auto, " + ", ".join(BACKENDS))
    return env.backend() if name == "auto" else name


@dataclass(frozen=True)
class Opening:
    """Which part of which call makes a backend.

    call: of order.CALLS. layer: its number on the group, since a rank may open layers that are alike in another order.
    equal: what has to be so on all ranks, by name.
    """

    call: str = "set-up"
    layer: int = 0
    equal: Mapping[str, Any] = field(default_factory=dict)


def choose(
    name: str,
    problem: Problem,
    group: Any,
    device: torch.device,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the backend that `name` stands for, agreed on over the group. Collective."""
    return _choose(name, problem, Group.of(group), device, options or {}, Opening()).name


def window_of(
    name: str, problem: Problem, group: Group, device: torch.device, options: Mapping[str, Any]
) -> tuple[Problem, Group] | None:
    """Return the problem and the group of the window that a layer has, or None where it has none. Collective."""
    chosen = _choose(name, problem, group, device, options, Opening())
    if chosen.name != "mega" or chosen.hosts is None:
        return (problem, group) if chosen.name == "mega" else None
    here = inside(problem, chosen.hosts, options.get("chunks"))
    return here, Links.of(group, chosen.hosts).host


class _Chosen(NamedTuple):
    """hosts: inside each of which it runs, or None. stated: what each rank said of its launches, for "mega"."""

    name: str
    hosts: Hosts | None = None
    stated: Mapping[int, Any] = {}


def _choose(
    name: str,
    problem: Problem,
    group: Group,
    device: torch.device,
    options: Mapping[str, Any],
    opening: Opening,
) -> _Chosen:
    """Choose a backend as part of `opening`."""

    def state() -> RankConfig:
        check_options(problem, group, options)
        asked = resolve(name)
        wanted, launches = asked in ("auto", "mega"), None
        reason = why_not_mega(problem, device) if wanted else None
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
    hosts = hosts_of(name, group, names)
    if asked != "mega":
        check_inside(name, problem, hosts, options)
    if asked not in ("auto", "mega"):
        return _Chosen(asked, hosts)
    why = spans_hosts(names) if hosts is None else None
    if why is not None:
        why += '; backend="mega" by name runs inside each, which no GPUs of several hosts have run'
    if why is None:
        here = problem if hosts is None else inside(problem, hosts, options.get("chunks"))
        why = here.why_no_window()
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
    chunks, exchange = over_hosts(options).values()
    most = min(problem.max_tokens, MAX_CHUNKS)
    if chunks is not None and not (type(chunks) is int and 1 <= chunks <= most):
        of = "max_tokens = " if most < MAX_CHUNKS else ""
        expected = f"None or a number from 1 to {of}{most}"
        raise ConfigError("chunks", repr(chunks), expected)
    if exchange not in tuple(EXCHANGES):
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
    operands = operands_of(problem, options.get("weight_gradients"))
    return {"weight_gradients": operands, **over_hosts(options)}


def over_hosts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a layer over several hosts."""
    exchange = options.get("exchange")
    return {
        "chunks": options.get("chunks"),
        "exchange": next(iter(EXCHANGES)) if exchange is None else exchange,
    }


def check_device(
    name: str, problem: Problem, group: Any, device: torch.device | str | None
) -> None:
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
    return open_backend(name, problem, *where, options, Opening("make_backend()"))


def open_backend(
    name: str,
    problem: Problem,
    group: Group,
    device: torch.device,
    options: Mapping[str, Any],
    opening: Opening,
) -> Backend:
    """Make the backend that was asked for, as part of another call."""
    chosen = _choose(name, problem, group, device, options, opening)
    if chosen.hosts is None:
        return _made(chosen.name, problem, group, device, options, chosen.stated)
    return _made_over_hosts(chosen, problem, group, device, options)


def _made(
    name: str,
    problem: Problem,
    group: Group,
    device: torch.device,
    options: Mapping[str, Any],
    stated: Mapping[int, Any] | None,
) -> Backend:
    """stated: what ranks said of their launches; None: they say so now."""
    make = BACKENDS[name]
    accepted = inspect.signature(make).parameters
    if "weight_gradients" not in accepted and options.get("weight_gradients") == "e4m3":
        raise ConfigError("weight_gradients", "'e4m3'", f"'bf16' with backend {name!r}")
    given = {key: value for key, value in options.items() if key in accepted and value is not None}
    if "weight_gradients" in accepted:
        given["weight_gradients"] = operands_of(problem, options.get("weight_gradients"))
    if "device" in accepted:
        given["device"] = device
    if "agreed" in accepted:
        given["agreed"] = stated
    backend: Backend = make(problem, group, **given)
    return backend


def _made_over_hosts(
    chosen: _Chosen,
    problem: Problem,
    group: Group,
    device: torch.device,
    options: Mapping[str, Any],
) -> Backend:
    """Make the backend inside each host, and what stands around it; a rank's error is everybody's. Collective."""
    assert chosen.hosts is not None
    links = Links.of(group, chosen.hosts)
    links.timeout_s = env.timeout_s(options.get("timeout_s"))
    if any(group.gather(mark_of("set-up"), links.broken is not None).values()):
        links.renew()
    given = {name: value for name, value in options.items() if value is not None}
    if env.reserve_sms() is None:  # the rail's kernels run beside those of the layer
        given.setdefault("reserve_sms", RAIL_CTAS)
    chunks, exchange = over_hosts(options).values()

    def make(here: Problem) -> Backend:
        # A token has a part of its routes here: the pool need not be larger than for one host's tokens.
        tokens = -(-problem.max_tokens // chunks_of(problem, links.hosts, chunks))
        rows = default_pool_rows(replace(here, rank=0, max_tokens=tokens))
        return _made(chosen.name, here, links.host, device, {"pool_rows": rows, **given}, None)

    def make_all() -> Backend:
        options = {"chunks": chunks, "exchange": exchange, "group": group}
        return HostsBackend(problem, links, make, **options)

    return group.all_or_none("set-up", make_all)
