"""FP8 and FP4 experts of transformers: read in place, compared with its own experts over the dequantized weights."""

import copy

import pytest
import torch

from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.testing import assert_close, compare

transformers = pytest.importorskip("transformers", minversion="5.20")
from hf_models import experts_of, model_of, routes, rows, token_ids  # noqa: E402
from hf_quantized import HIDDEN, PAIRS, ROUNDED_ROWS, SIZES, fp4_pair, fp8_pair, quantized  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.adapters.transformers_weights import weights_of  # noqa: E402

ROUNDED_ROWS_AND_WEIGHTS = 0.08  # twice w13, once w2 besides

pytestmark = pytest.mark.usefixtures("experts")


@pytest.mark.parametrize("kind", PAIRS)
@torch.no_grad()
def test_experts_are_those_of_transformers(experts, kind):
    model, dense = PAIRS[kind]()
    module, own = experts_of(model)[-1], experts_of(dense)[-1]
    assert type(module).__name__ == "FP8Experts"
    topk_weights, ids = routes(40, 4)
    y = module(rows(40, HIDDEN), ids, topk_weights)
    expected = own(rows(40, HIDDEN), ids, topk_weights)
    assert_close(y, expected, relative=ROUNDED_ROWS)
    weights = weights_of(module)
    assert weights.w13.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2.data_ptr() == module.down_proj.data_ptr()
    in_place = weights.w13_scale.data_ptr() == module.gate_up_proj_scale_inv.data_ptr()
    assert in_place == (kind == "fp8")
    scales = module.gate_up_proj_scale_inv.view(torch.uint8)
    # A fault that this test sees, whatever torch draws; copies are made anew.
    scales.chunk(2, dim=1)[1].zero_()
    y = module(rows(40, HIDDEN), ids, topk_weights)
    assert compare(y, expected).relative > 0.1


@pytest.mark.parametrize("kind", PAIRS)
@torch.no_grad()
def test_whole_models(kind):
    model, dense = PAIRS[kind]()
    ids = token_ids(2, 12)
    assert_close(model(ids).logits, dense(ids).logits, relative=0.02)
    texts = model.eval().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert texts.shape == (2, 15)


@pytest.mark.parametrize("pair", [fp8_pair, fp4_pair])
def test_gradients_pass_through_frozen_experts(pair):
    model, dense = pair()
    topk_weights, ids = routes(40, 4)
    found = []
    for module in (experts_of(model)[0], experts_of(dense)[0]):
        leaves = rows(40, HIDDEN).requires_grad_(), topk_weights.clone().requires_grad_()
        module(leaves[0], ids, leaves[1]).backward(rows(40, HIDDEN, seed=4))
        found.append([t.grad for t in leaves])
    for mine, expected in zip(*found, strict=True):
        assert_close(
            mine, expected, relative=0.06
        )  # in FP8 dy and dgu are quantized, too; in FP4 x and h
    assert all(p.grad is None for p in experts_of(model)[0].parameters())


@torch.no_grad()
def test_fp4_weights_are_arranged_once_for_each_version():
    module = experts_of(fp4_pair()[0])[0]
    first = weights_of(module)
    assert weights_of(module) is first
    module.gate_up_proj_scale_inv.copy_(module.gate_up_proj_scale_inv)
    second = weights_of(module)
    assert second is not first
    adapter.register("megamoe_other", backend="staged").close()
    assert weights_of(module) is not second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, r"weight_block_size is None, expected \[128, 128\]"),
        ({"block_size": [64, 128]}, r"weight_block_size is \[64, 128\], expected \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', expected 'dynamic'"),
        ({"is_transposed": True}, "FP8Experts in FP8, expected no biases"),
    ],
)
def test_other_fp8_formats_are_refused(change, message):
    module = experts_of(quantized(model_of("Qwen3Moe", "eager", **SIZES))[0])[0]
    vars(module).update(change)
    with pytest.raises(ConfigError, match=message):
        weights_of(module)


def test_blocks_of_gate_and_up_rows_are_refused():
    sizes = SIZES | {"moe_intermediate_size": 96}
    module = experts_of(quantized(model_of("Qwen3Moe", "eager", **sizes))[0])[0]
    with pytest.raises(ConfigError, match="intermediate size is 96, expected a multiple of 128"):
        weights_of(module)


def test_fp4_with_scales_that_are_no_powers_of_two_is_refused():
    pytest.importorskip("transformers", minversion="5.23")
    model, _ = quantized(model_of("Qwen3Moe", "eager", **SIZES), expert_dtype="fp4")
    with pytest.raises(ArgumentError, match="w13_scale.dtype is torch.float32, expected"):
        weights_of(experts_of(model)[0])


@pytest.mark.parametrize(
    ("kind", "precision", "expected"),
    [
        ("fp8", "bf16", "fp8"),
        ("fp4", "fp8", "fp8xmxfp4 or bf16xmxfp4"),
        ("fp4", "bf16xmxfp4", None),
    ],
)
@torch.no_grad()
def test_stored_weights_have_their_precision(kind, precision, expected):
    model, dense = PAIRS[kind]()
    other = adapter.register("megamoe_other", backend="staged", precision=precision)
    model.set_experts_implementation("megamoe_other")
    topk_weights, ids = routes(9, 4)
    given = rows(9, HIDDEN), ids, topk_weights
    if expected is None:
        y = experts_of(model)[0](*given)
        assert_close(y, experts_of(dense)[0](*given), relative=0.02)  # x and h are bf16
    else:
        message = f"precision is {precision}, expected {expected}, as FP8Experts stores its weights"
        with pytest.raises(ConfigError, match=message):
            experts_of(model)[0](*given)
    other.close()


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_float_parameters_are_quantized_again_when_they_change(name):
    own = adapter.register("megamoe_fp8", backend="staged", precision="fp8")
    module = experts_of(model_of(name, "megamoe_fp8"))[0]
    dense = copy.deepcopy(module)
    dense.config._experts_implementation = "eager"
    topk_weights, ids = routes(20, module.num_experts)
    y = module(rows(20), ids, topk_weights)
    expected = dense(rows(20), ids, topk_weights)
    assert_close(y, expected, relative=ROUNDED_ROWS_AND_WEIGHTS)
    y.backward(rows(20, seed=4))
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    with torch.no_grad():
        changed = module(rows(20), ids, topk_weights)
        anew = copy.deepcopy(module)(rows(20), ids, topk_weights)
    assert compare(changed, y).relative > 0.1
    assert torch.equal(changed, anew)
    own.close()
