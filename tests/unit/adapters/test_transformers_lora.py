"""LoRA on packed experts by operators, next to float experts with merged factors. PEFT itself: tests/libraries."""

import pytest
import torch

from megamoe.adapters import transformers_lora
from megamoe.adapters.transformers_lora import run_with_lora
from megamoe.core.config import Activation, Problem
from megamoe.core.errors import ConfigError
from megamoe.formats.weights import ExpertWeights
from megamoe.launch.passes import dequantize_mxfp4
from megamoe.testing import assert_close, compare

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 96, 6, 3
# A limit that no pre-activation reaches: rounding to its other side would change a gradient by all of its size.
ACT = Activation("clamped_swiglu", alpha=1.702, limit=60.0, up_offset=1.0)
NAMES = "gate_up_proj", "down_proj"
DEVICE = "cpu"
SIZES = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def drawn(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(DEVICE)


def halves(t):
    """Rows g0, u0, g1, ... -> gate rows, then up rows."""
    return torch.cat((t[:, 0::2], t[:, 1::2]), 1)


@pytest.fixture(scope="module")
def weights():
    problem = Problem(
        HIDDEN, WIDTH, EXPERTS, TOP_K, precision="bf16xmxfp4", activation=ACT, bias=True
    )
    w13, w2 = (drawn(EXPERTS, *SIZES[n], seed=i, scale=0.1) for i, n in enumerate(NAMES))
    biases = drawn(EXPERTS, 2 * WIDTH, seed=2).float(), drawn(EXPERTS, HIDDEN, seed=3).float()
    packed = ExpertWeights(w13, w2, *biases).quantized(problem)
    return packed, packed.dense(problem, torch.float32)


def factors(names, rank, adapters=1):
    """As PEFT has them: B [E, N, r], A [E, r, K], and their scaling."""
    found = {}
    for name in names:
        n, k = SIZES[name]
        found[name] = [
            (
                drawn(EXPERTS, n, rank, seed=5 + i, scale=0.2).requires_grad_(),
                drawn(EXPERTS, rank, k, seed=9 + i, scale=0.2).requires_grad_(),
                2.0,
            )
            for i in range(adapters)
        ]
    return found


def inputs(tokens=40):
    """Two experts have no rows, one of them between others."""
    x = drawn(tokens, HIDDEN, seed=20).requires_grad_()
    chosen = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(21))
    chosen[:, [2, 5]] = 0
    scores, ids = chosen.to(DEVICE).topk(TOP_K)
    return x, ids, scores.requires_grad_()


def merged(adapters, dense, x, ids, scores):
    """In fp32, token by token, on weights with the factors' products added."""
    w = {"gate_up_proj": dense.w13, "down_proj": dense.w2}
    for name, found in adapters.items():
        delta = sum(s * b.float() @ a.float() for b, a, s in found)
        w[name] = w[name] + (halves(delta) if name == "gate_up_proj" else delta)
    pre = torch.einsum("th,tknh->tkn", x.float(), w["gate_up_proj"][ids]) + dense.b13[ids]
    y = torch.einsum("tki,tkhi->tkh", ACT(pre), w["down_proj"][ids]) + dense.b2[ids]
    return (scores[..., None] * y).sum(1)


@pytest.mark.parametrize("per_panel", [1, 4, 6])
@pytest.mark.parametrize(
    ("names", "rank", "adapters"),
    [(NAMES, 8, 1), (NAMES[:1], 4, 1), (NAMES[1:], 12, 1), (NAMES, 4, 2)],
)
def test_results_and_gradients_are_those_of_merged_weights(
    monkeypatch, weights, names, rank, adapters, per_panel
):
    # of w13; w2 is half as large
    monkeypatch.setattr(transformers_lora, "PANEL_BYTES", per_panel * 2 * 2 * WIDTH * HIDDEN)
    dense_experts = []

    def dequantize(*given):
        dense_experts.append(len(given[0]))
        dequantize_mxfp4(*given)

    monkeypatch.setattr(transformers_lora, "dequantize_mxfp4", dequantize)
    packed, dense = weights
    lora, (x, ids, scores) = factors(names, rank, adapters), inputs()
    leaves = [x, scores, *(t for found in lora.values() for b, a, _ in found for t in (b, a))]
    y = run_with_lora(lora, ACT, x, ids, scores, packed)
    expected = merged(lora, dense, x, ids, scores)
    assert_close(y, expected, relative=1e-2, name="y")
    dy = drawn(*y.shape, seed=30)
    found = torch.autograd.grad(y, leaves, dy)
    wanted = torch.autograd.grad(expected, leaves, dy.float())
    assert min(EXPERTS, 2 * per_panel) == max(dense_experts)
    for i, (grad, value) in enumerate(zip(found, wanted, strict=True)):
        assert value.any()
        assert grad.dtype == leaves[i].dtype
        assert_close(grad, value, relative=1e-2, name=f"gradient {i}")


def test_another_expert_s_factors_are_seen(weights):
    packed, dense = weights
    lora, given = factors(NAMES, 8), inputs()
    y = run_with_lora(lora, ACT, *given, packed)
    rolled = {n: [(b.roll(1, 0), a, s) for b, a, s in found] for n, found in lora.items()}
    assert compare(y, merged(rolled, dense, *given)).relative > 0.1


def test_one_rank_alone():
    adapter = pytest.importorskip("megamoe.adapters.transformers", reason="transformers is missing")
    packed = pytest.importorskip("megamoe.adapters.transformers_packed")
    from transformers import GptOssConfig

    module = packed.PackedExperts(GptOssConfig(hidden_size=64, intermediate_size=96))
    module.adapters["down_proj"] = []
    call = adapter.Experts(backend="staged").over_ranks(module, None, None)
    with pytest.raises(ConfigError, match="experts with LoRA is over several ranks"):
        call(*inputs())


def test_no_tokens(weights):
    x, ids, scores = inputs(0)
    assert run_with_lora(factors(NAMES, 8), ACT, x, ids, scores, weights[0]).shape == (0, HIDDEN)


def test_biases_that_are_trained(weights):
    packed, dense = weights
    lora, (x, ids, scores) = factors(NAMES, 8), inputs()
    found = []
    for given, call in ((packed, run_with_lora), (dense, None)):
        leaves = [t.clone().requires_grad_() for t in (given.b13, given.b2)]
        own = ExpertWeights(given.w13, given.w2, *leaves, given.w13_scale, given.w2_scale)
        y = call(lora, ACT, x, ids, scores, own) if call else merged(lora, own, x, ids, scores)
        found.append(torch.autograd.grad(y.float().square().mean(), leaves))
    for grad, value in zip(*found, strict=True):
        assert_close(grad, value, relative=2e-2)


@pytest.mark.slow
def test_the_kernels_source(monkeypatch, weights):
    monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")
    test_results_and_gradients_are_those_of_merged_weights(monkeypatch, weights, NAMES, 8, 1, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("per_panel", [4, 6])
def test_on_a_gpu(monkeypatch, weights, per_panel):
    monkeypatch.setitem(globals(), "DEVICE", "cuda")
    there = [ExpertWeights(**{n: t.cuda() for n, t in w.named().items()}) for w in weights]
    test_results_and_gradients_are_those_of_merged_weights(
        monkeypatch, there, NAMES, 8, 1, per_panel
    )
