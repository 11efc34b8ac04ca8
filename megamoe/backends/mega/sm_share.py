"""Choose the SMs of a layer's launches next to other kernels, mainly NCCL's (docs/decisions.md, 0017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megamoe.core import env
from megamoe.core.errors import RankMismatch
from megamoe.group.group import Group

# What a launch waits at most for SMs that others hold; as much is lost where they hold them for longer.
JOIN_NS = 50_000

# What it waits at most, with all of its SMs, for the launch of each peer to begin; then it leaves half of them to
# others, since the peer's host or stream may wait for a kernel of NCCL's that finds no SM here. As long as large
# launches take: so a peer that is merely late costs at most about twice the time for which it is late.
PEERS_NS = 10_000_000


class Share(NamedTuple):
    """How launches share the device."""

    reserve_sms: int  # SMs that are never taken
    join_ns: int  # how long a launch waits for those that others hold; 0: until it has all
    peers_ns: int  # how long it keeps all that it has while a peer's launch has not begun


def share_of(group: Group, reserve_sms: int | None, trains: bool = False) -> Share:
    """Return what the caller or MEGAMOE_RESERVE_SMS says, else a default; decided when kernels are made.

    trains: of launches that train, whatever the layer was made under; else it is asked whether gradients are recorded.

    Kernels that wait for other ranks do not yield to each other: where each needs all of its CTAs at once, two ranks
    that start them in different orders wait for each other for ever. So with a number, which must leave room for all
    that the others take, a launch has all of its CTAs. By default, where a step may both train and communicate, it
    takes what is free when it starts.
    """
    stated = env.reserve_sms() if reserve_sms is None else reserve_sms
    if stated is not None:
        return Share(stated, 0, 0)
    trains = trains or torch.is_grad_enabled()
    beside_others = trains and not group.in_process
    return Share(0, JOIN_NS, PEERS_NS) if beside_others else Share(0, 0, 0)


def check_shares(shares: Sequence[Share]) -> None:
    """Refuse ranks of which some share their SMs and some do not, and so never say that they have begun.

    shares: by rank. Raises RankMismatch.
    """
    joins = [share.join_ns > 0 for share in shares]
    if len(set(joins)) > 1:
        free, all_ = joins.index(True), joins.index(False)
        raise RankMismatch(
            f"the ranks of this group differ: launches of rank {free} take the SMs that are free, those of rank {all_} "
            f"all of theirs. State reserve_sms (or MEGAMOE_RESERVE_SMS) on every rank or on none, and make the layer "
            f"with gradients on or off on all of them"
        )
