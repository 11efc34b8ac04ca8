"""An error that one rank raises before a call is raised on all of them, and soon."""

import pytest
from failing import judge, one_rank_fails

from megamoe.testing import launch


@pytest.mark.parametrize("backend", ["staged", "reference", "emulate"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_error_of_one_rank_is_raised_on_all(backend, ranks):
    found = launch(one_rank_fails, ranks, backend, "cpu", timeout_s=120)
    # A second where nothing else runs; nobody waits for the 20 s of the time-out.
    assert judge(found, bound_s=5) == []
    seconds = sorted(s for of_rank in found for _, _, s, _ in of_rank.values())
    assert seconds[len(seconds) // 2] < 1
