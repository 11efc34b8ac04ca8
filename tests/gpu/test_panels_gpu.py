"""MXFP4 weights expanded in memory, on a GPU: the bits of those expanded in slots; a captured launch can do both."""

import pytest
import torch

from megamoe import ExpertWeights, Problem, activation_by_name
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.launch import panels
from megamoe.testing import make_inputs, same_bits

NEVER = 1 << 20
CASES = {
    "odd sizes": (Problem(1056, 416, 9, 3, max_tokens=1500, precision="fp8xmxfp4"), "uniform"),
    "overloaded": (Problem(512, 1024, 4, 2, max_tokens=700, precision="fp8xmxfp4"), "hot"),
    "more experts than rooms": (
        Problem(2880, 736, 40, 4, max_tokens=1024, precision="fp8xmxfp4", activation=activation_by_name("relu2")),
        "uniform",
    ),
}  # fmt: skip


def random_weights(problem, binades):
    """Return experts of any codes, their scales of so many binades: far ones are rounded, not just shifted."""
    p, g = problem, torch.Generator(device="cuda").manual_seed(binades)

    def of(low, high, *shape):
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8, device="cuda")

    experts, rows13 = p.num_experts, p.activation.planes * p.intermediate
    w13, w2 = (
        of(0, 256, experts, rows13, p.hidden // 2),
        of(0, 256, experts, p.hidden, p.intermediate // 2),
    )
    scales = [of(122 - binades, 122, *w.shape[:2], w.shape[2] // 16) for w in (w13, w2)]
    return ExpertWeights.from_mxfp4(w13, w2, *scales, planes=p.activation.planes)


def made(problem, mean_rows, monkeypatch):
    monkeypatch.setattr(panels, "MEAN_ROWS", mean_rows)
    return make_backend("mega", problem, None, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("binades", [4, 30])
@pytest.mark.parametrize("name", CASES)
def test_bits(name, binades, monkeypatch):
    problem, routing = CASES[name]
    inputs = make_inputs(problem, problem.max_tokens, routing=routing, device="cuda")
    call = inputs.x, inputs.topk_ids, inputs.topk_weights, random_weights(problem, binades)
    found = []
    for mean_rows in (0, NEVER):
        layer = made(problem, mean_rows, monkeypatch)
        found += [layer.forward(Call(*call))[0].clone() for _ in range(3)]
        layer.close()
    assert found[0].isfinite().all()
    assert found[0].any()
    assert all(same_bits(y, found[0]) for y in found)


@pytest.mark.gpu
def test_one_graph_of_few_rows_and_many(monkeypatch):
    problem, _ = CASES["odd sizes"]
    inputs = make_inputs(problem, problem.max_tokens, device="cuda")
    count = torch.full((1,), problem.max_tokens, dtype=torch.int32, device="cuda")
    weights = random_weights(problem, 4)
    call = Call(inputs.x, inputs.topk_ids, inputs.topk_weights, weights, count)
    plain, layer = made(problem, NEVER, monkeypatch), made(problem, 300, monkeypatch)
    with torch.no_grad():
        for each in (plain, layer):
            each.forward(call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = layer.forward(call)
        # Three rows a token, nine experts: panels from 901 on.
        for tokens in (1500, 700, 901, 1, 899, 1500):
            count.fill_(tokens)
            graph.replay()
            expected, _ = plain.forward(call)
            assert same_bits(y[:tokens], expected[:tokens]), tokens
            assert y[:tokens].any()
    for each in (plain, layer):
        each.check()
        each.close()
