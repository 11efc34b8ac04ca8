"""What a call may bring: argument checks; and what runs it: the table of backends, what "auto" means."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megamoe.backends.statistics import Statistics
from megamoe.core import env
from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, TurnedWeights, check_tensor
from megamoe.group.group import Facts, Group
from megamoe.group.hosts import host_name, spans_hosts
from megamoe.launch.layout import check_window

log = logging.getLogger("megamoe")

# name -> (module, class); imported when first used
BACKENDS = {
    "mega": ("megamoe.backends.mega", "MegaBackend"),
    "staged": ("megamoe.backends.staged", "StagedBackend"),
    "emulate": ("megamoe.backends.emulate", "EmulateBackend"),
    "reference": ("megamoe.backends.reference.backend", "ReferenceBackend"),
}
# what the constructors of the backends take besides problem, group and device
OPTIONS = (
    *("window", "reserve_sms", "pool_rows", "timeout_s", "pdl", "profile"),
    *("step_blocks", "num_ctas", "rounding"),
)


class Backend(Protocol):
    """What every backend offers. Everything, Backend(problem, group) too, is collective.

    state_bytes: of what a training forward saves; 0: without one, `staged` recomputes the backward pass.
    """

    state_bytes: int

    def forward(
        self,
        x: Tensor | QuantizedRows,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H] bf16. Ranks may bring x in bf16 or, where the precision stores it so, quantized."""

    def forward_train(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return y, the same bits as forward's, and the call's state [state_bytes] uint8, which may move."""

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        topk_ids: Tensor,
        weights: ExpertWeights,
        state: Tensor,
        needs: Sequence[bool],
        *,
        num_tokens_device: Tensor | None = None,
        into: Mapping[str, Tensor] | None = None,
        only_weights: bool = False,
        turned: TurnedWeights | None = None,
    ) -> list[Tensor | None]:
        """Return dx [T, H] bf16, d_topk_weights [T, K] fp32, dw13, dw2 bf16 like the masters, db13, db2 fp32.

        dy, x: [T, H] bf16, contiguous. weights: as the caller of the layer has them, bf16 masters wherever w13 or w2
        need a gradient. turned: what is multiplied in FP8, of the same weights. state: unchanged.
        needs: a flag for each; None in the list where it is False, and for "w13", "w2" of `into`: tensors like the
        masters, fp32 or bf16, that these gradients are added to. Where both are needed, both are in `into` or none.
        only_weights: no rank needs the first two in this pass; a backend may leave out what makes them.
        """

    def statistics(self) -> Statistics:
        """Return what the last forward did, without waiting for it."""

    def prepare(self, weights: ExpertWeights) -> None:
        """Compile, allocate, map: everything that a first forward would otherwise do."""

    def close(self) -> None:
        """Free what is shared with other ranks, after a barrier of the group."""


def check_call(
    problem: Problem,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    out: Tensor | None = None,
    num_tokens_device: Tensor | None = None,
    x_scale: Tensor | None = None,
) -> None:
    """Raise ArgumentError unless the tensors of one call fit the problem. Reads no contents."""
    stored = problem.formats.x
    if x_scale is not None and not stored.scaled:
        raise ArgumentError("x_scale", "given", f"None with precision {problem.precision!r}")
    if not isinstance(x, Tensor) or x.dim() != 2:
        value = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("x.shape", value, f"[T, {problem.hidden}]")
    tokens, device = x.shape[0], x.device
    dtype = torch.bfloat16 if x_scale is None else stored.dtype
    check_tensor("x", x, (tokens, problem.hidden), dtype, device)
    if x_scale is not None:
        groups = stored.scale_shape(tokens, problem.hidden)
        check_tensor("x_scale", x_scale, groups, torch.float32, device)
    if tokens > problem.max_tokens:
        raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {problem.max_tokens}")
    routes = (tokens, problem.top_k)
    check_tensor("topk_ids", topk_ids, routes, (torch.int32, torch.int64), device)
    check_tensor("topk_weights", topk_weights, routes, torch.float32, device)
    if out is not None:
        check_tensor("out", out, (tokens, problem.hidden), torch.bfloat16, device)
        check_overlap(out, x)
    if num_tokens_device is not None:
        check_tensor("num_tokens_device", num_tokens_device, (1,), torch.int32, device)


def overlap(out: Tensor, x: Tensor) -> bool:
    """Whether `out` shares some memory with x but is not x: a row could be overwritten before it was read."""
    first, second = out.data_ptr(), x.data_ptr()
    shifted = first != second or out.element_size() != x.element_size()  # rows of e4m3 are shorter
    return shifted and first < second + x.nbytes and second < first + out.nbytes


def check_overlap(out: Tensor, x: Tensor) -> None:
    """Raise ArgumentError where they overlap in part. Compiled, y is made first and then copied."""
    if not torch.compiler.is_compiling() and overlap(out, x):
        raise ArgumentError("out", "a part of x, shifted", "x itself, or memory of its own")


def why_not_mega(problem: Problem, group: Any, device: torch.device) -> str | None:
    """Return why the kernel cannot run here, or None when it can."""
    if (reason := problem.why_no_window()) is not None:
        return reason
    if device.type != "cuda":
        return f"the tensors are on {device}, the kernel needs a CUDA device"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (torch.cuda.is_available() is False)"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"compute capability is {major}.{minor}, the kernel needs 9.x (Hopper)"
    try:
        mega = _mega()
    except ImportError as error:
        return f"megamoe.backends.mega cannot be imported: {error}"
    lacking: str | None = mega.why_not(problem, group, device)
    return lacking


def resolve(name: str) -> str:
    """Return the backend asked for, MEGAMOE_BACKEND in place of "auto". Raises ConfigError."""
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ConfigError("backend", repr(name), "auto, " + ", ".join(BACKENDS))
    return env.backend() if name == "auto" else name


def backend_class(name: str) -> Any:
    """Return the class of a backend. Raises ConfigError where its module cannot be imported."""
    module, cls = BACKENDS[name]
    try:
        return getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise ConfigError("backend", repr(name), f"one that can be imported ({error})") from error


class Question(NamedTuple):
    """What a layer asks all ranks before memory is taken."""

    state: Callable[[], Any]  # returns what this rank says, or raises
    check: Callable[[dict[int, Any]], None]  # of what each rank said: raises on all ranks alike


@dataclass(frozen=True)
class Opening:
    """As which part of which call a backend is made.

    call: of order.CALLS. layer: its number on the group, since a rank may open layers that are alike in another order.
    questions: asked together with the choice of the backend.
    """

    call: str = "set-up"
    layer: int = 0
    questions: Sequence[Question] = ()


def choose(
    name: str,
    problem: Problem,
    group: Any,
    device: torch.device,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the backend that `name` stands for, agreed on over the group. Collective."""
    return _choose(name, problem, Group.of(group), device, options or {}, Opening())[0]


def _choose(
    name: str,
    problem: Problem,
    group: Group,
    device: torch.device,
    options: Mapping[str, Any],
    opening: Opening,
) -> tuple[str, dict[int, Any]]:
    """Do so as part of `opening`; return it, and what each rank stated of its launches, for "mega"."""

    def state() -> Facts:
        check_options(problem, group, options)
        asked = resolve(name)
        wanted, launches = asked in ("auto", "mega"), None
        reason = why_not_mega(problem, group, device) if wanted else None
        if asked != "auto" and reason is None:
            backend_class(asked)
        if wanted and reason is None:
            launches = _mega().Stated.here(group, options.get("reserve_sms"))
        answers = [question.state() for question in opening.questions]
        return Facts(
            (host_name(), reason, launches, answers),
            {
                "backend": repr(asked),
                "window is given": options.get("window") is not None,
                "what is opened": f"layer {opening.layer} of the group",
            },
            problem,
        )

    said = group.agree(opening.call, state)
    for i, question in enumerate(opening.questions):
        question.check({rank: answers[i] for rank, (*_, answers) in said.items()})
    asked = resolve(name)
    if asked not in ("auto", "mega"):
        return asked, {}
    why = spans_hosts([host for host, *_ in said.values()])
    for rank, (_, own, *_) in said.items():
        if why is None and own is not None:
            why = f"rank {rank}: {own}" if len(said) > 1 else own
    if why is None:
        stated = {rank: launches for rank, (*_, launches, _) in said.items()}
        _mega().check_stated(stated)
        return "mega", stated
    if asked == "mega":
        raise cannot_run(why)
    if problem.rank == 0:
        _say_why(why)
    return "staged", {}


def _mega() -> Any:
    return importlib.import_module("megamoe.backends.mega")


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
    if window is not None and not hasattr(window, "admit"):
        raise ConfigError("window", repr(window), "None or a megamoe.window.window.Window")
    for option in options.keys() - set(OPTIONS):
        raise ConfigError("option", repr(option), "one of " + ", ".join(OPTIONS))
    size = 1 if group is None else Group.of(group).size
    if size != problem.ep_size:
        raise ConfigError("ep_size", problem.ep_size, f"{size}, the size of the group")


def check_device(
    name: str, problem: Problem, group: Any, device: torch.device | str | None
) -> None:
    """Raise ConfigError, before memory is taken, where parameters on `device` could never be used."""
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", device, "one that torch can use: it finds no CUDA device")
    if resolve(name) in ("mega", "emulate"):
        check_window(problem)
    moves = device.type == "meta" or (device.type == "cpu" and torch.cuda.is_available())
    if resolve(name) != "mega" or moves:
        return
    if (reason := why_not_mega(problem, group, device)) is not None:
        raise cannot_run(reason)


def make_backend(
    name: str, problem: Problem, group: Any = None, *, device: torch.device | str, **options: Any
) -> Backend:
    """Create a backend: "auto", "mega", "staged", "emulate" or "reference". Collective.

    options: those of the backends' constructors (OPTIONS). A backend ignores what it does not know,
        since "auto" may choose either; None means unset.
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
    """Do the same as part of another call."""
    chosen, stated = _choose(name, problem, group, device, options, opening)
    make = backend_class(chosen)
    accepted = inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if key in accepted and value is not None}
    if "device" in accepted:
        given["device"] = device
    if "agreed" in accepted:
        given["agreed"] = stated
    backend: Backend = make(problem, group, **given)
    return backend
