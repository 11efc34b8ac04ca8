"""An error that one rank raises before a call is raised on all of them, and soon."""

import pytest
from failing import judge, one_rank_fails

from megamoe.testing import launch


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
def test_an_error_of_one_rank_is_raised_on_all(backend):
    found = launch(one_rank_fails, 3, backend, "cpu", timeout_s=120)
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
