"""What a call may bring: argument checks; and what runs it: the table of backends, what "auto" means."""

from __future__ import annotations

import importlib
import inspect
import logging
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe import env
from megamoe.config import Problem
from megamoe.errors import ArgumentError, ConfigError, RankMismatch
from megamoe.formats.weights import ExpertWeights, check_tensor
from megamoe.memory.transport.group import host_name, spans_hosts

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
    """What every backend offers. Everything, Backend(problem, group) too, is collective."""

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: ExpertWeights,
        num_tokens_device: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return y [T, H] bf16."""

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
) -> None:
    """Raise ArgumentError unless the tensors of one call fit the problem. Reads no contents."""
    if not isinstance(x, Tensor) or x.dim() != 2:
        value = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError("x.shape", value, f"[T, {problem.hidden}]")
    tokens, device = x.shape[0], x.device
    check_tensor("x", x, (tokens, problem.hidden), torch.bfloat16, device)
    if tokens > problem.max_tokens:
        raise ArgumentError("x.shape[0]", tokens, f"at most max_tokens = {problem.max_tokens}")
    routes = (tokens, problem.top_k)
    check_tensor("topk_ids", topk_ids, routes, (torch.int32, torch.int64), device)
    check_tensor("topk_weights", topk_weights, routes, torch.float32, device)
    if out is not None:
        check_tensor("out", out, (tokens, problem.hidden), torch.bfloat16, device)
    if num_tokens_device is not None:
        check_tensor("num_tokens_device", num_tokens_device, (1,), torch.int32, device)


def why_not_mega(problem: Problem, group: Any, device: torch.device) -> str | None:
    """Return why the kernel cannot run here, or None when it can."""
    if device.type != "cuda":
        return f"the tensors are on {device}, the kernel needs a CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"compute capability is {major}.{minor}, the kernel needs 9.x (Hopper)"
    try:
        mega = importlib.import_module("megamoe.backends.mega")
    except ImportError as error:
        return f"megamoe.backends.mega cannot be imported: {error}"
    reason: str | None = mega.why_not(problem, group, device)
    return reason


def choose(name: str, problem: Problem, group: Any, device: torch.device) -> str:
    """Return the backend that `name` stands for, agreed on over the group (collective)."""
    if name == "auto":
        name = env.backend()
    if name != "auto":
        if name not in BACKENDS:
            raise ConfigError("backend", repr(name), "auto, " + ", ".join(BACKENDS))
        _agree(problem, group, name)
        return name
    everyone = _agree(problem, group, (host_name(), why_not_mega(problem, group, device)))
    reason = spans_hosts([host for host, _ in everyone])
    for rank, (_, own) in enumerate(everyone):
        if reason is None and own is not None:
            reason = f"rank {rank}: {own}" if len(everyone) > 1 else own
    if reason is None:
        return "mega"
    if problem.rank == 0:
        _say_why(reason)
    return "staged"


@cache
def _say_why(reason: str) -> None:
    """Log once a process, not once a layer."""
    log.warning('backend "auto" is staged here, not mega: %s', reason)


def _agree(problem: Problem, group: Any, value: Any) -> list[Any]:
    """Gather `value` from all ranks, after checking that they were configured alike."""
    if group is None or problem.ep_size == 1:
        return [value]
    mine = (problem.fingerprint(), problem.rank, value, repr(problem))
    gathered: list[Any] = [None] * problem.ep_size
    dist.all_gather_object(gathered, mine, group=group)
    for rank, (fingerprint, stated, _, text) in enumerate(gathered):
        if stated != rank:
            raise RankMismatch(f"rank {rank} of the group was given Problem.rank = {stated}")
        if fingerprint != gathered[0][0]:
            raise RankMismatch(f"rank {rank} was given {text}, rank 0 {gathered[0][3]}")
    return [entry[2] for entry in gathered]


def make_backend(
    name: str, problem: Problem, group: Any = None, *, device: torch.device | str, **options: Any
) -> Backend:
    """Create a backend: "auto", "mega", "staged", "emulate" or "reference". Collective.

    options: those of the backends' constructors (OPTIONS). A backend ignores what it does not know,
        since "auto" may choose either; None means unset.
    """
    for option in options.keys() - set(OPTIONS):
        raise ConfigError("option", repr(option), "one of " + ", ".join(OPTIONS))
    size = 1 if group is None else dist.get_world_size(group)
    if size != problem.ep_size:
        raise ConfigError("ep_size", problem.ep_size, f"{size}, the size of the group")
    device = torch.device(device)
    chosen = choose(name, problem, group, device)
    module, cls = BACKENDS[chosen]
    try:
        make = getattr(importlib.import_module(module), cls)
    except ImportError as error:
        raise ConfigError("backend", repr(chosen), f"one that can be imported ({error})") from error
    accepted = inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if key in accepted and value is not None}
    if "device" in accepted:
        given["device"] = device
    backend: Backend = make(problem, group, **given)
    return backend
