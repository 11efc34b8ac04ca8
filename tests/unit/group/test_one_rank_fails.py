"""An error that one rank raises before a call is raised on all of them, and soon."""

import pytest
import torch
from failing import judge, one_rank_fails

from megamoe.testing import launch

BACKENDS = ("staged", "reference", "emulate")


def by_backend(rank):
    found = {}
    for backend in BACKENDS:
        torch._dynamo.reset()
        found[backend] = one_rank_fails(rank, backend, "cpu")
    return found


@pytest.fixture(scope="module")
def results():
    return launch(by_backend, 3, timeout_s=120)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_of_one_rank_is_raised_on_all(results, backend):
    found = [of_rank[backend] for of_rank in results]
    # A second where nothing else runs; nobody waits for the 20 s of the time-out.
    assert judge(found, bound_s=5) == []
    seconds = sorted(s for of_rank in found for _, _, s, _ in of_rank.values())
    assert seconds[len(seconds) // 2] < 1


def test_the_judge_finds_what_is_wrong():
    here = ("ArgumentError", "x.dtype is torch.float64", 0.1, True)
    there = ("PeerFault", "rank 1 raised ArgumentError: x.dtype is torch.float64", 0.1, True)
    assert judge([{"eager": there}, {"eager": here}], bound_s=1) == []
    for flaw in (
        ("PeerFault", "another rank gave up", 0.1, True),
        ("RankMismatch", *there[1:]),
        (*there[:2], 20.0, True),
        (*there[:3], False),
    ):
        assert len(judge([{"eager": flaw}, {"eager": here}], bound_s=1)) == 1
    for flaw in (("NoneType", "None", 0.1, True), (*here[:3], False)):
        assert len(judge([{"eager": there}, {"eager": flaw}], bound_s=1)) == 1
