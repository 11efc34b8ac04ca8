"""Compile, launch and streams on one GPU. The layer's results are compared by tools/rank_check.py."""

from dataclasses import replace

import pytest
import torch
from layouts import LAYOUTS, apart, interleaved, with_gaps

from megamoe.backends import reference
from megamoe.backends.call import Call
from megamoe.core.config import Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.quantization import (
    codec,
    dequantize_rows,
    quantize_blockwise,
    quantize_rows,
    transpose_blocks,
)
from megamoe.formats.quantized import QuantizedRows
from megamoe.formats.weights import ExpertWeights, expected_weights
from megamoe.jit import quantize
from megamoe.jit.quantize import quantize_weights
from megamoe.launch import passes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("shape", "planes"), [((3, 512, 256), 2), ((2, 2 * 144, 272), 2), ((5, 48, 4112), 1)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_weights_have_torchs_bits(shape, planes, dtype):
    torch.manual_seed(0)
    w = torch.randn(shape, device="cuda").mul_(torch.rand(shape, device="cuda") * 3).to(dtype)
    w[0, :16, :16] = 0
    w[-1, -1] = 1e-30
    (q, scale), none = quantize_weights(w, planes)
    assert none is None
    expected_q, expected_scale = quantize_blockwise(w, planes)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))
    expected = transpose_blocks(q, scale, planes)
    places = [tuple(t.clone().zero_() for t in pair) for pair in ((q, scale), expected)]
    for given in (None, None), places:
        again, transposed = quantize_weights(w, planes, given[0], True, given[1])
        assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(again[1], scale)
        assert torch.equal(transposed[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(transposed[1], expected[1])
    for place in (None, places[1]):
        alone = quantize.transpose_weights(q, scale, planes, place)
        assert torch.equal(alone[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(alone[1], expected[1])


@pytest.mark.parametrize("shape", [(1, 128), (300, 272), (8192, 7168), (0, 256)])
def test_quantized_rows_have_torchs_bits(shape):
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").mul_(torch.rand(shape, device="cuda") * 3).bfloat16()
    x[:1, :16] = 0
    x[-1:] *= 1e-30
    pair = quantize.quantize_rows(x)
    for found, expected in zip(pair, quantize_rows(x), strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(quantize.dequantize_rows(*pair), dequantize_rows(*pair).bfloat16())


@pytest.mark.parametrize("shape", [(1, 2, 128), (300, 4, 272), (2048, 2, 7168)])
def test_sums_of_rows_have_torchs_bits(shape):
    tokens, num, hidden = shape
    rows = torch.randn(tokens * num + 1, hidden, device="cuda").bfloat16()
    rows[0] = torch.nan  # is never read
    places = torch.randperm(tokens * num, device="cuda") + 1
    places[:: num + 1] = 0
    begins = torch.arange(0, tokens * num, num, device="cuda")
    expected = torch.embedding_bag(rows, places, begins, False, 0, False, None, False, 0)[0]
    assert torch.equal(passes.sum_rows(rows, places, begins), expected)
    assert torch.equal(passes.sum_rows(rows.cpu(), places.cpu(), begins.cpu()), expected.cpu())


@pytest.mark.parametrize("change", [interleaved, apart, with_gaps])
def test_strided_weights_quantize_to_the_same_bits(change):
    torch.manual_seed(0)
    w = torch.randn(3, 2 * 144, 272, device="cuda").bfloat16()
    (q, scale), _ = quantize_weights(w, 2)
    found, _ = quantize_weights(change(w), 2)
    assert torch.equal(found[0].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(found[1], scale)


def make(precision, tokens=300, **options):
    from megamoe.backends.mega.backend import MegaBackend

    problem = Problem(512, 256, 8, 3, max_tokens=512, precision=precision)
    torch.manual_seed(1)
    masters = {
        name: torch.randn(shape, device="cuda")
        .mul_(0.05)
        .to(dtype if dtype != torch.float8_e4m3fn else torch.bfloat16)
        for name, (shape, dtype) in expected_weights(problem).items()
        if not name.endswith("_scale")
    }
    weights = ExpertWeights(**masters)
    if problem.formats.w.scaled:
        weights = weights.quantized(problem)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    ids = torch.rand(tokens, 8, device="cuda").topk(3).indices
    scores = torch.rand(tokens, 3, device="cuda")
    return problem, MegaBackend(problem, **options), (x, ids, scores, weights)


@pytest.fixture(params=["bf16", "fp8", "fp8_channel"])
def precision(request):
    return request.param


def want(problem, call):
    x, ids, scores, weights = call
    return reference.forward(problem, [x], [ids], [scores], [weights])["y"][0].float()


def y_of(backend, *call, **options):
    return backend.forward(Call(*call, **options))[0]


def close(y, expected):
    return (y.float() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_strided_weights_give_the_same_bits(precision, layout):
    _, backend, (*call, weights) = make(precision)
    y = y_of(backend, *call, weights)
    strided = LAYOUTS[layout](weights)
    assert torch.equal(y_of(backend, *call, strided), y)
    if layout == "interleaved":  # the same address, read otherwise
        other = replace(strided, w13=strided.w13.transpose(1, 2).flatten(1, 2))
        assert other.w13.data_ptr() == strided.w13.data_ptr()
        assert not torch.equal(y_of(backend, *call, other), y)
    backend.check()
    backend.close()


@pytest.mark.parametrize("precision", ["fp8", "fp8_channel"])
def test_a_quantized_x_gives_the_same_bits(precision):
    problem, backend, (x, *rest) = make(precision)
    y = y_of(backend, x, *rest)
    quantized = QuantizedRows(*codec(problem.formats.x).quantize(x))
    assert torch.equal(y_of(backend, quantized, *rest), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = y_of(backend, quantized, *rest)
    assert torch.equal(y_of(backend, x, *rest), y)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, y)
    backend.check()
    backend.close()


def test_forward(precision):
    problem, backend, call = make(precision, profile=True)
    y = y_of(backend, *call)
    backend.check()
    assert close(y, want(problem, call))
    assert torch.equal(y_of(backend, *call), y)
    assert 0.3 < backend.clock_ghz() < 2.5
    assert set(backend.intermediates()) >= {"x_pool", "h", "y_rows", "route_rows"}
    backend.close()


def test_passes_and_grid_do_not_change_bits(precision):
    problem, backend, call = make(precision)
    y = y_of(backend, *call)
    from megamoe.backends.mega.backend import MegaBackend
    from megamoe.launch.layout import min_pool_rows

    other = MegaBackend(problem, pool_rows=min_pool_rows(problem), reserve_sms=40)
    assert torch.equal(y_of(other, *call), y)
    other.check()
    with pytest.raises(ConfigError, match="profile"):
        other.clock_ghz()
    other.close()
    backend.close()


def test_streams_are_serialised(precision):
    problem, backend, call = make(precision)
    y = y_of(backend, *call)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            found.append(y_of(backend, *call))
    backend.check()
    assert all(torch.equal(f, y) for f in found)
    backend.close()


@pytest.mark.parametrize("pdl", [False, True])
def test_graphs_replay_with_new_inputs(precision, pdl):
    problem, backend, call = make(precision, pdl=pdl)
    backend.prepare(call[3])
    x, ids, scores, weights = call
    count = torch.full((1,), x.shape[0], dtype=torch.int32, device="cuda")
    y_of(backend, *call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = y_of(backend, x, ids, scores, weights, num_tokens_device=count)
        second = y_of(backend, first, ids, scores, weights)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        ids.copy_(torch.rand(x.shape[0], 8, device="cuda").topk(3).indices)
        graph.replay()
        torch.cuda.synchronize()
        backend.check()
        assert close(first, want(problem, call))
        assert close(second, want(problem, (first, ids, scores, weights)))
    count.fill_(7)
    graph.replay()
    backend.check()
    assert close(first[:7], want(problem, call)[:7])
    backend.close()


def test_no_tokens(precision):
    _, backend, call = make(precision, tokens=0)
    assert y_of(backend, *call).shape == (0, 512)
    backend.check()
    backend.close()


@pytest.mark.parametrize("quantized", [False, True])
def test_a_graph_of_few_tokens(quantized):
    """The kernel for few tokens has the ordinary one's bits and statistics, whatever the count on the device is."""
    problem, backend, (x, *rest) = make("fp8", 64)
    ordinary = make("fp8", 64, few=False)[1]
    count = torch.tensor([64], dtype=torch.int32, device="cuda")
    rows = QuantizedRows(*quantize_rows(x)) if quantized else x
    backend.prepare(rest[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = y_of(backend, rows, *rest, num_tokens_device=count)
        statistics = backend.statistics()
    assert backend.window.last_launch[1] == "few"
    for live in (64, 0, 1, 17, 64):
        count.fill_(live)
        graph.replay()
        expected = y_of(ordinary, rows, *rest, num_tokens_device=count)
        assert torch.equal(y[:live], expected[:live])
        assert torch.equal(statistics.tokens_per_expert, ordinary.statistics().tokens_per_expert)
        assert int(statistics.tokens_per_expert.sum()) == live * problem.top_k
    for layer in (backend, ordinary):
        layer.check()
        layer.close()
