"""Meetings on a GPU: equal bits whoever meets, also where other work takes SMs in the middle."""

import pytest
import torch

from megamoe import Problem
from megamoe.backends.call import Call
from megamoe.launch import meetings
from megamoe.launch.meetings import Meet
from megamoe.layer.functional import make_backend
from megamoe.testing import make_inputs, make_weights
from megamoe.testing.compare import same_bits

pytestmark = pytest.mark.gpu
MEETS = [
    Meet("columns", many=4, mean_rows=1),
    Meet("run", gemms=2, mean_rows=1),
    Meet("round", gemms=2, mean_rows=1, cycles=0),
    Meet("column", many=2, gemms=2, mean_rows=1, cycles=3000),
]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bits_do_not_depend_on_meetings(monkeypatch, precision):
    problem = Problem(1024, 768, 8, 4, max_tokens=4096, precision=precision)
    drawn = make_inputs(problem, 4096, device="cuda", ids_dtype=torch.int32)
    weights = make_weights(problem, device="cuda")
    call = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)
    found, beside = [], torch.cuda.Stream()
    for meet in (Meet(mean_rows=0), *MEETS):
        monkeypatch.setattr(meetings, "stated", meet)
        backend = make_backend("mega", problem, None, device="cuda")
        for busy in (False, True):
            if busy:
                with torch.cuda.stream(beside):
                    for _ in range(20):
                        drawn.x @ drawn.x.t()
            found += [backend.forward(call)[0] for _ in range(5)]
            found.append(backend.forward(call, keep=True)[0])
        backend.check()
        backend.close()
    assert all(same_bits(y, found[0]) for y in found)
