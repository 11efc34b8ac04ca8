"""The kernel inside each of two hosts, without a GPU: two ranks over gloo, whose CUDA driver is a stub."""

RANKS = """
import os
import torch.distributed as dist
from megamoe import MegaMoE
from megamoe.adapters import library_layer
from megamoe.backends import select as functional
from megamoe.testing import launch
from megamoe.window import window as windows

def one_of_two(rank, options):
    os.environ["MEGAMOE_HOST"] = f"host-{rank}"
    layer = MegaMoE(272, 144, 6, 3, group=dist.group.WORLD, max_tokens=70, backend="mega", init_seed=1, **options)
    x = torch.zeros(5, 272, dtype=torch.bfloat16, requires_grad=True)
    ids, scores = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
    def launches():
        return number("stub_launches").value
    counts = [launches()]
    with torch.no_grad():
        layer(x, ids, scores)
    counts.append(launches())
    y = layer(x, ids, scores)
    state = layer._layer._runtime.backend.state_bytes
    counts.append(launches())
    y.sum().backward()
    counts.append(launches())
    backend = layer._layer._runtime.backend
    inner, passes = backend.inner, layer.statistics().passes.tolist()
    problem, memory = inner.problem, megamoe.memory_report(layer)
    found = {
        "launches": [after - before for before, after in zip(counts, counts[1:])],
        "name": type(inner).__name__, "problem": [problem.num_experts, problem.ep_size, problem.max_tokens],
        "reserve": inner.share.reserve_sms, "join": inner.share.join_ns, "rows": inner.plan.pool_rows,
        "default": layout.default_pool_rows(replace(problem, max_tokens=-(-70 // backend.chunks))),
        "state": (state - 256) // backend.chunks - inner.state_bytes, "address": argument("backward").state.header % 64,
        "window": memory["window_bytes"] == layout.total_bytes(inner.plan.window),
    }
    second = MegaMoE(272, 144, 6, 3, group=dist.group.WORLD, max_tokens=70, backend="mega", window=inner.window,
                     **options)
    second(x, ids, scores)
    found["shared"] = second._layer._runtime.backend.inner.window is inner.window
    second.close()
    layer.close()
    cpu = torch.device("cpu")
    borrowed = library_layer.borrow_window(layer.problem, dist.group.WORLD, cpu, "mega", options)
    of = borrowed["window"]
    found["borrowed"] = [of.spec.ep_size, of.spec.max_tokens, of.group.label(0)]
    library_layer.return_window(borrowed)
    return found
"""
PRELUDE = """
from dataclasses import replace
import megamoe
from megamoe.launch import layout
"""


def ranks(run, options):
    return run(f"""{PRELUDE}{RANKS}
with on_cpu(), mock.patch.object(functional, "why_not_mega", lambda *_: None):
    print(json.dumps(launch(one_of_two, 2, {options!r}, timeout_s=60, start_method="fork")))
""")


def test_each_chunk_is_a_launch_on_the_problem_of_a_host(run):
    for rank, found in enumerate(ranks(run, {"chunks": 2})):
        assert found["name"] == "MegaBackend"
        assert found["launches"] == [2, 2, 2]
        assert found["problem"] == [3, 1, 2 * 35]
        assert (found["reserve"], found["join"]) == (8, 0)  # what a rail's kernels run on
        assert found["rows"] == found["default"]
        rows, columns = 2 * 35, (2 * 272, 3 * 4)  # x as it travels, ids
        assert found["state"] == sum(-(-rows * n // 256) * 256 for n in columns)
        assert found["address"] == 0
        assert found["window"]
        assert found["shared"]
        assert found["borrowed"] == [1, 2 * 35, f"rank {rank} on host-{rank}"]


def test_the_number_of_sms_is_the_callers(run):
    for found in ranks(run, {"reserve_sms": 20}):
        assert found["reserve"] == 20
        assert found["launches"] == [1, 1, 1]
