"""The kernel inside each of two hosts, without a GPU: two ranks over gloo, whose CUDA driver is a stub."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from driver_stub import argument, copies, launched, tensors

from megamoe import MegaMoE, memory_report
from megamoe.adapters import library_layer
from megamoe.backends import select
from megamoe.launch import layout
from megamoe.testing import launch

pytestmark = pytest.mark.stub


def one_of_two(rank, options):
    os.environ["MEGAMOE_HOST"] = f"host-{rank}"
    given = {"group": dist.group.WORLD, "max_tokens": 70, "backend": "mega", **options}
    layer, (x, ids, scores) = MegaMoE(272, 144, 6, 3, init_seed=1, **given), tensors()
    x.requires_grad_()

    def launches(act):
        before = launched()
        return act(), launched() - before

    with torch.no_grad():
        _, without = launches(lambda: layer(x, ids, scores))
    y, forward = launches(lambda: layer(x, ids, scores))
    backend = layer._layer._runtime.backend
    inner, chunks, state = backend.inner, backend.chunks, backend.state_bytes
    _, backward = launches(lambda: y.sum().backward())
    layer.statistics()
    with mock.patch.object(
        inner, "prepare"
    ) as prepare:  # of other weights, before a graph is captured
        other = copies(layer.expert_weights())
        backend.prepare(other)
    prepare.assert_called_once_with(other)
    assert [without, forward, backward] == [chunks] * 3
    assert type(inner).__name__ == "MegaBackend"
    part = -(-70 // chunks)
    problem = inner.problem
    assert (problem.num_experts, problem.ep_size, problem.max_tokens) == (3, 1, 2 * part)
    assert inner.share.join_ns == 0
    assert inner.plan.pool_rows == layout.default_pool_rows(replace(problem, max_tokens=part))
    saved = sum(-(-2 * part * n // 256) * 256 for n in (2 * 272, 3 * 4))  # x as it travels, ids
    assert (state - 256) // chunks - inner.state_bytes == saved
    assert argument("backward").state.header % 64 == 0
    assert memory_report(layer)["window_bytes"] == inner.plan.window.bytes
    second = MegaMoE(272, 144, 6, 3, window=inner.window, **given)
    second(x, ids, scores)
    assert second._layer._runtime.backend.inner.window is inner.window
    second.close()
    layer.close()
    borrowed = library_layer.borrow_window(
        layer.problem, dist.group.WORLD, torch.device("cpu"), "mega", options
    )
    of = borrowed["window"]
    assert (of.spec.ep_size, of.spec.max_tokens, of.group.label(0)) == (
        1,
        2 * part,
        f"rank {rank} on host-{rank}",
    )
    library_layer.return_window(borrowed)
    return chunks, inner.share.reserve_sms


@pytest.mark.parametrize(
    ("options", "chunks", "reserved"),
    [({"chunks": 2}, 2, 8), ({"reserve_sms": 20}, 1, 20)],  # 8: what a rail's kernels run on
)
def test_each_chunk_is_a_launch_on_the_problem_of_a_host(monkeypatch, options, chunks, reserved):
    monkeypatch.setattr(select, "why_not_mega", lambda *_: None)
    found = launch(one_of_two, 2, options, timeout_s=60, start_method="fork")
    assert found == [(chunks, reserved)] * 2
