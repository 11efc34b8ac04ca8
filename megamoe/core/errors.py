"""Define the exception classes, and turn a fault record of the device into one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_RANKS = 8  # of a group; FaultRecord.peer holds this when the waited-for party is local


class MegaMoEError(RuntimeError):
    """Base class of every error that this package raises deliberately."""


class _NamedValueError(MegaMoEError, ValueError):
    """An error about one named value: (argument, what it was, what was expected), or a ready-made message.

    It has no __init__, which torch.compile could not trace where it meets the error.
    """

    def __str__(self) -> str:
        if self.expected is None:
            return str(self.args[0])
        return f"{self.argument} is {self.value!s}, expected {self.expected}"

    argument = property(lambda self: self.args[0])
    value = property(lambda self: self.args[1] if len(self.args) > 1 else None)
    expected = property(lambda self: self.args[2] if len(self.args) > 2 else None)

    def __reduce__(self) -> Any:
        return type(self), (str(self),)  # a value may be of any type


class ConfigError(_NamedValueError):
    """A `Problem`, an option or an environment variable has a value that the layer cannot run."""


class ArgumentError(_NamedValueError):
    """An argument of a call, usually a tensor, does not fit the problem."""


class CompileError(MegaMoEError):
    """A kernel did not compile. The message contains the end of the compiler's log."""


class AbiMismatch(MegaMoEError):
    """A compiled kernel and this package use different layouts of the launch arguments."""


class NotCoResident(MegaMoEError):
    """The grid does not fit on the device at once. The kernel's barriers need all CTAs to run at the same time."""


class RankMismatch(MegaMoEError):
    """Ranks of one group have different configurations, or called different layers."""


class PeerFault(MegaMoEError):
    """Another rank failed first, and this rank stopped because of it."""


class ProtocolTimeout(MegaMoEError):
    """A wait took longer than the timeout (`timeout_s`, `MEGAMOE_TIMEOUT_S`)."""


class WindowBroken(MegaMoEError):
    """A launch on this window failed. All ranks have to call reset() before the window is used again."""


class UnreachablePeer(MegaMoEError):
    """A rank's memory cannot be mapped into the address space of this rank."""


class WorkspaceTooSmall(MegaMoEError):
    """The workspace is too small for one pass, or a kept backward pass needs more rows than the pool has."""


# edge name -> (producer, consumer, what `index` counts ("": nothing), crosses ranks)
_EDGES: dict[str, tuple[str, str, str, bool]] = {
    "routes_ready": ("route on the home rank", "route on the expert rank", "rank", True),
    "x_ready": ("stage x on the home rank", "dispatch", "rank", True),
    "grid_barrier": ("all CTAs", "all CTAs", "", False),
    "rows_ready": ("dispatch", "load_a", "block", False),
    "h_ready": ("gemm1", "load_a", "block", False),
    "y_rows_ready": ("gemm2", "reduce", "block", False),
    "partials_ready": ("reduce on the expert rank", "combine", "token", True),
    "panel_ready": ("expand", "load_b", "expert", False),
    "grads_ready": ("gemm1 and restore of the backward pass", "load_a and load_b", "expert", False),
}
_PROLOGUE = ("routes_ready", "config", "state")  # before the roles part
# edge name -> what is raised instead of a time-out, with fields of the record
_FAULTS: dict[str, tuple[type[MegaMoEError], str]] = {
    "peer_abort": (
        PeerFault,
        "rank {rank} left its launch because another rank gave up (edge peer_abort): see that "
        "rank's error. No wait of this rank failed; its y is NaN",
    ),
    "config": (
        RankMismatch,
        "rank {peer} runs another configuration than rank {rank}: config hash {seen:#010x}, "
        "expected {expected:#010x} (role {role}). Create the layer with equal arguments on all "
        "ranks and call the layers in the same order everywhere",
    ),
    "state": (
        RankMismatch,
        "the backward pass of rank {rank} was given a state that no forward of this layer completed: made by "
        "launch {seen}, expected {expected} (role {role}). Did that forward fail, or was reset() called since?",
    ),
    "kept": (
        WorkspaceTooSmall,
        "backward_dw() of rank {rank} has not all rows of pass {index} of those that it took: "
        "{seen} pool rows, in several fillings of pool_rows={expected}, of which one is kept. Its gradients are "
        'NaN. Expected a pool_rows of at least so many, or delay_wgrad=True in place of "keep"',
    ),
}


def fault_to_error(record: Mapping[str, Any]) -> MegaMoEError:
    """Turn a FaultRecord (csrc/megamoe/layout/args.h) into an exception.

    Args:
        record: The fields of the record, with edge and role as names.

    Returns:
        The exception, not raised.
    """
    edge, rank, peer = str(record["edge"]), int(record["rank"]), int(record["peer"])
    role = "prologue" if edge in _PROLOGUE else str(record["role"])
    if edge in _FAULTS:
        kind, text = _FAULTS[edge]
        return kind(text.format_map({**record, "role": role}))
    expected, seen = int(record["expected"]), int(record["seen"])
    seconds = int(record["waited_ns"]) / 1e9
    producer, consumer, counted, crosses = _EDGES.get(edge, ("?", "?", "index", False))
    for_whom = f" for {counted} {int(record['index'])}" if counted else ""
    if crosses and peer < MAX_RANKS:
        for_whom = f" for rank {peer}" if counted == "rank" else f"{for_whom} from rank {peer}"
    message = (
        f"rank {rank} waited {seconds:.1f} s at edge {edge} ({producer} -> {consumer})"
        f"{for_whom}: expected {expected}, saw {seen} (role {role})"
    )
    if crosses and peer < MAX_RANKS:
        message += f". Look at rank {peer}: it has died, is late, or never made this call"
    return ProtocolTimeout(message)
