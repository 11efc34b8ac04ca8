"""The engine of torch.distributed where own rows are copied: what goes to others, and where what comes lies."""

from types import SimpleNamespace

import pytest
import torch

from megamoe.backends.rail import all_to_all


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("given_place", [False, True])
def test_own_rows_are_copied_and_the_others_sent(own, given_place, monkeypatch):
    send, receive = [2, 1, 3], [1, 4, 2]
    send[own] = receive[own] = 2  # to oneself as many as come
    rows = torch.randn(sum(send), 5).bfloat16()
    theirs = [torch.randn(n, 5).bfloat16() for n in receive]
    asked = {}

    def nccl(come, go, group, async_op):
        asked["go"] = [t.clone() for t in go]
        for rank, (to, of) in enumerate(zip(come, theirs, strict=True)):
            assert len(to) == (0 if rank == own else receive[rank])
            to.copy_(of.view(torch.uint8)[: len(to)])
        return SimpleNamespace(wait=lambda: asked.setdefault("waited", (group, async_op)))

    monkeypatch.setattr("torch.distributed.all_to_all", nccl)
    place = torch.zeros(sum(receive), 5).bfloat16() if given_place else None
    arrived = all_to_all("rail", own=own)(rows, send, receive, place)
    assert "waited" not in asked
    found = arrived()
    assert asked["waited"] == ("rail", True)
    assert (found is place) == given_place
    pieces = rows.split(send)
    expected = torch.cat([pieces[r] if r == own else of for r, of in enumerate(theirs)])
    assert torch.equal(found, expected)
    for rank, (gone, piece) in enumerate(zip(asked["go"], pieces, strict=True)):
        assert torch.equal(gone, piece.view(torch.uint8)[: 0 if rank == own else None])
