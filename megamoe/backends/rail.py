"""Exchange rows between ranks by counts: all ranks of a group for `staged`, equal ranks of the hosts for `hosts/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.group.group import Group
from megamoe.group.order import MARK_INTS, check_numbers

# Waits for an exchange (the stream waits if it can, else the host) and returns what this rank received.
Waiter = Callable[[], Tensor]
# The engine: (rows [sum(send), ...], rows to each rank, rows from each rank[, memory for these]) -> a Waiter.
Exchange = Callable[..., Waiter]


def all_to_all(
    process_group: Any, wait: Callable[[Any], None] | None = None, own: int | None = None
) -> Exchange:
    """Return the engine of torch.distributed over a process group; what it starts runs beside the caller's stream.

    wait: waits for an operation of it; None: as torch.distributed does. own: NCCL only: the caller's rank, whose own
    rows are copied here and now, since NCCL would copy them as slowly as it sends.
    """

    def exchange(
        rows: Tensor, send: Sequence[int], receive: Sequence[int], place: Tensor | None = None
    ) -> Waiter:
        out = rows.new_empty(sum(receive), *rows.shape[1:]) if place is None else place
        # as bytes, since not every gloo knows bf16
        ways = out.view(torch.uint8), rows.contiguous().view(torch.uint8)
        splits = list(receive), list(send)
        if own is None:
            work = dist.all_to_all_single(*ways, *splits, group=process_group, async_op=True)
        else:
            come, go = (list(way.split(of)) for way, of in zip(ways, splits, strict=True))
            come[own].copy_(go[own])
            come[own], go[own] = come[own][:0], go[own][:0]
            work = dist.all_to_all(come, go, group=process_group, async_op=True)

        def arrived() -> Tensor:
            if wait is None:
                work.wait()
            else:
                wait(work)
            return out

        return arrived

    return exchange


class Crossing(torch.autograd.Function):
    """Exchange rows between ranks; the gradient makes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], exchange: Exchange
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.exchange = send, receive, exchange
        return exchange(rows, send, receive)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grad, ctx.receive, ctx.send)(), None, None, None


def exchange_counts(
    group: Group,
    mark: Sequence[int],
    parts: Sequence[Tensor] | Tensor,
    number: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tell each rank `parts` [R], numbers of rows; the host waits. Collective.

    number: [1] int32, of the call that a backward pass belongs to.
    Returns what each rank said to this one, [R, parts[own rank].numel()] int32, and its copy in CPU memory. Raises
    RankMismatch unless all have this mark, and this number.
    """
    told = parts if number is None else [torch.cat([part, number]) for part in parts]
    table, found = group.meet(mark, told)
    end = MARK_INTS + parts[group.rank].numel()
    if number is not None:
        check_numbers(found[:, end].tolist(), group.rank, group.label)
    return table[:, MARK_INTS:end], found[:, MARK_INTS:end]
