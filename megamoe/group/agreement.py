"""Who takes part, and whether all were asked for the same: before memory is taken, ranks agree or all raise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megamoe.core.errors import ConfigError, RankMismatch
from megamoe.group.group import mesh_group
from megamoe.group.order import announce

ALONE = "alone"
EXPECTED = (
    f'a process group that this process is in, a DeviceMesh of one dimension, None or "{ALONE}"'
)


def process_group(group: Any) -> Any:
    """Return the process group that a user's `group` stands for; None for a rank that holds all experts.

    None is refused where several processes were started but torch.distributed is not set up, since
    dist.group.WORLD is None then: "alone" says that each rank is meant to hold all experts. Raises ConfigError.
    """
    if group is None:
        size = os.environ.get("WORLD_SIZE", "")
        if size.isdigit() and int(size) > 1 and dist.is_available() and not dist.is_initialized():
            raise ConfigError(
                f"group is None, and so is dist.group.WORLD until dist.init_process_group(), which was not called "
                f"though WORLD_SIZE is {size}: each rank would hold all experts. Call it before, or say "
                f'group="{ALONE}" if that is meant'
            )
        return None
    if isinstance(group, str) and group == ALONE:
        return None
    group = mesh_group(group)
    outside = isinstance(group, int)  # what dist.new_group returns to processes that it leaves out
    if not outside and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ConfigError("group", repr(group), EXPECTED)
    if outside or dist.get_rank(group) < 0:
        who = f"process {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise ConfigError("group", f"one that {who} is not in", EXPECTED)
    return group


def together(group: Any, name: str, attempt: Callable[[], Any]) -> dict[int, Any]:
    """Return rank -> what attempt() returned there, picklable. Collective over a process group, or None.

    name: the call that this begins, of order.CALLS.

    Raises this rank's error, or else RankMismatch with the first error of another rank: on all ranks or on none.
    """
    value, error = None, None
    try:
        value = attempt()
    except Exception as caught:
        error = caught
    found = {0: (value, error and f"{type(error).__name__}: {error}")}
    if group is not None:
        found = {dist.get_rank(group): found[0]}
        if dist.get_backend(group) != "fake":  # which exchanges nothing
            try:
                announce(group, name)
            except RankMismatch:
                if error is None:
                    raise
                raise error from None
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, *found.values(), group=group)
            found = dict(enumerate(gathered))
    if error is not None:
        raise error
    for rank, (_, text) in found.items():
        if text is not None:
            raise RankMismatch(f"rank {rank} of the group failed: {text}")
    return {rank: entry for rank, (entry, _) in found.items()}


@contextmanager
def begins(name: str, *groups: Any) -> Iterator[None]:
    """Check a call's arguments in this block, then begin it on each of these groups, or raise on all ranks. Collective.

    name: the call, of order.CALLS.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    for group in groups:
        try:
            announce(group, name, refused=error is not None)
        except RankMismatch as caught:  # the ranks of the groups that follow wait, too
            error = caught
    if error is not None:
        raise error


def tell(group: Any, name: str, error: Exception) -> None:
    """Take part in the others' together() with an error that this rank raises afterwards."""

    def fail() -> None:
        raise error

    try:
        together(group, name, fail)
    except Exception as raised:
        if raised is not error:
            raise


def check_equal(what: str, values: dict[int, Any]) -> None:
    """Raise RankMismatch unless all ranks gave the same value, which is named."""
    first = min(values)
    for rank, value in values.items():
        if value != values[first]:
            raise RankMismatch(f"{what} is {value} on rank {rank}, {values[first]} on rank {first}")
