"""The host's side of launches of few tokens over several ranks: each rank takes a kernel by its own tokens alone."""

from dataclasses import replace

import driver_stub
import pytest
from driver_stub import backend_of, forward, on_ranks, tensors

from megamoe.core.config import Problem
from megamoe.jit import module
from megamoe.launch import layout

pytestmark = pytest.mark.stub
PROBLEM = replace(driver_stub.PROBLEM, ep_size=2)


def test_each_rank_takes_a_kernel_by_its_own_tokens(monkeypatch):
    made = {name: driver_stub.kernel() for name in ("push-fp8-swiglu", "fp8-swiglu")}
    monkeypatch.setattr(module, "load_kernel", lambda variant, device: made[str(variant)])

    def body(member):
        problem = replace(PROBLEM, rank=member.rank)
        backend = backend_of(problem, group=member)
        weights, kernels = driver_stub.weights_of(problem), []
        for tokens in (64, 65, 8) if member.rank else (0, 1, 70):
            x, ids, scores = tensors(tokens)
            forward(backend, x, ids, scores, weights)
            kernels.append(
                next(n for n, k in made.items() if k is backend._forward.launcher.kernel)
            )
            assert backend._forward.argument.num_tokens == tokens
        own, plan = backend._forward.argument.own, backend.plan
        for name in ("words", "x", "x_scale", "x_ready"):
            assert (
                getattr(own, f"window_few_{name}") == plan.window[f"window_few_{name}"].offset > 0
            )
        assert (own.tokens, 1 << own.ids_shift) == (64, -(-problem.top_k // 2))
        assert plan.pool_rows >= layout.few_pool_rows(problem)
        return kernels

    few, many = made
    assert on_ranks(body) == [[few, few, many], [few, many, few]]


@pytest.mark.parametrize(
    "changed",
    [{"precision": "bf16"}, {"intermediate": 304}, {"top_k": 17, "num_experts": 18}, {"rows": 384}],
)
def test_a_problem_that_it_cannot_run(changed):
    problem = Problem(288, 160, 8, 3, ep_size=2, max_tokens=70, precision="fp8")
    assert layout.few_kernel(problem, layout.default_pool_rows(problem)) == "push"
    rows = changed.pop("rows", 4096)
    assert layout.few_kernel(replace(problem, **changed), rows) == ""
