"""What the transformers adapter reads in an experts module: its activation, its weights."""

import pytest
from copies import watched

import megamoe
from megamoe.core.config import Activation
from megamoe.core.errors import ArgumentError, ConfigError

transformers = pytest.importorskip("transformers", minversion="5.20")
import torch  # noqa: E402
from hf_models import experts_of, model_of, token_ids  # noqa: E402

from megamoe.adapters import transformers as adapter  # noqa: E402
from megamoe.adapters.transformers_weights import activation_of, weights_of  # noqa: E402


@pytest.mark.parametrize("up_to", [7.0, 1000.0])
def test_activations_are_told_apart(up_to):
    module = experts_of(model_of("GptOss", "eager"))[0]
    module.limit, module.alpha = up_to, 1.5
    expected = Activation("clamped_swiglu", alpha=1.5, limit=up_to, up_offset=1.0)
    assert activation_of(module) == expected
    del module.limit  # the gate knows a limit that the module does not name
    module._apply_gate = lambda x: expected(x.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1))
    with pytest.raises(
        ConfigError, match="expected one of swiglu, geglu, geglu_tanh, clamped_swiglu$"
    ):
        activation_of(module)


def test_activations_are_found_by_what_they_give():
    kinds = {
        "gelu": "geglu",
        "gelu_new": "geglu_tanh",
        "gelu_pytorch_tanh": "geglu_tanh",
        "silu": "swiglu",
    }
    module = experts_of(model_of("Mixtral", "eager"))[0]
    for name, kind in kinds.items():
        module.act_fn = transformers.activations.ACT2FN[name]
        assert activation_of(module).kind == kind
    module = experts_of(model_of("NemotronH", "eager"))[0]
    module.act_fn = torch.nn.SiLU()
    with pytest.raises(ConfigError, match="NemotronHExperts, expected one of relu2"):
        activation_of(module)


@pytest.mark.parametrize("name", ["Qwen3Moe", "NemotronH"])
def test_weights_are_views_where_they_can_be(name):
    module = experts_of(model_of(name, "eager"))[0]
    weights = weights_of(module)
    assert weights.w13.data_ptr() == next(module.parameters()).data_ptr()
    assert weights.w2.data_ptr() == module.down_proj.data_ptr()


def step(model):
    """Train a step; return the logits before it."""
    ids = token_ids(2, 12)
    out = model(ids, labels=ids)
    out.loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True).step()
    return out.logits.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_experts_are_quantized_once_a_step(name, dtype):
    """In place, transposed, cast: FP8 copies are of the parameters, not of what is copied in every call."""
    own = adapter.register("megamoe_quantized", backend="staged", precision="fp8")
    model = model_of(name, "megamoe_quantized").to(dtype)
    layers = len(experts_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = token_ids(2, 12)
    with watched() as seen:
        for _ in range(2):
            for _ in range(2):
                model(ids, labels=ids).loss.backward()
            optimizer.step()
        model.load_state_dict(model.state_dict())
        with torch.no_grad():
            model(ids)
            for p in experts_of(model)[0].parameters():
                p.mul_(-1)
            model(ids)
    assert seen == {"stale": 0, "q": 2 * (3 * layers + 1)}
    own.close()


@pytest.mark.parametrize(
    ("name", "dtype"), [("Qwen3Moe", torch.bfloat16), ("GptOss", torch.float32)]
)
def test_the_step_quantizes(name, dtype):
    """after_step() knows the experts from their first call on; one of another model's parameters is refused."""
    own = adapter.register("megamoe_stepped", backend="reference", precision="fp8")
    model = model_of(name, "megamoe_stepped").to(dtype)
    due, ids = 2 * len(experts_of(model)), token_ids(2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    megamoe.after_step(optimizer, model)
    of_calls, of_steps = [], []
    with watched() as seen:
        for _ in range(3):
            for made, act in (
                (of_calls, lambda: [model(ids, labels=ids).loss.backward() for _ in range(2)]),
                (of_steps, optimizer.step),
            ):
                before = seen["q"]
                act()
                made.append(seen["q"] - before)
            optimizer.zero_grad()
    assert seen["stale"] == 0
    assert of_calls == [due, 0, 0]
    assert of_steps == [due] * 3
    dense = torch.optim.SGD(model.lm_head.parameters(), lr=1e-2)
    with pytest.raises(ArgumentError, match="without experts of the model"):
        megamoe.after_step(dense, model)
    own.close()


def test_fp32_masters_are_quantized_without_a_bf16_copy():
    """FP8 reads them in place, and their gradients are the sums before any rounding; BF16 still casts."""
    own = adapter.register("megamoe_wide", backend="reference", precision="fp8")
    model = model_of("Qwen3Moe", "megamoe_wide").float()
    module = experts_of(model)[0]
    with torch.no_grad():
        module.down_proj.mul_(1 + 2**-12)  # to numbers that bf16 has not
    x = torch.randn(12, 64, dtype=torch.bfloat16)
    scores, ids = torch.randn(12, 6).softmax(-1).topk(2)
    module(x, ids, scores).float().square().mean().backward()
    (layer,) = module._megamoe_layers.values()
    cached = layer._runtime.cache._seen
    assert cached.w13 is module.gate_up_proj
    assert cached.w2 is module.down_proj
    expected = megamoe.ExpertWeights(module.gate_up_proj, module.down_proj).quantized(layer.problem)
    assert torch.equal(cached.weights.w2_scale, expected.w2_scale)
    gradient = module.down_proj.grad
    assert gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())
    assert weights_of(module).w2.dtype == torch.bfloat16
    own.close()


def gradients_of(**options):
    """Return the gradients of one module's experts, and how its layer makes transposes."""
    own = adapter.register("megamoe_options", backend="reference", precision="fp8", **options)
    module = experts_of(model_of("Qwen3Moe", "megamoe_options"))[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 64, generator=generator).bfloat16()
    scores, ids = torch.randn(12, 6, generator=generator).softmax(-1).topk(2)
    module(x, ids, scores).float().square().mean().backward()
    (layer,) = module._megamoe_layers.values()
    found = module.gate_up_proj.grad, module.down_proj.grad, layer._runtime.cache.makes
    own.close()
    return found


def test_options_of_fp8_training_reach_the_layers():
    plain, bf16 = gradients_of(), gradients_of(weight_gradients="bf16", transposes="made")
    for a, b in zip(plain[:2], bf16[:2], strict=True):
        assert 1e-3 < (a.float() - b.float()).norm() / a.float().norm() < 0.1
    assert (plain[2], bf16[2]) == (False, True)
    with pytest.raises(ConfigError, match="weight_gradients.*'bf16' with precision 'bf16'"):
        adapter.register("megamoe_options", weight_gradients="e4m3")
    with pytest.raises(ConfigError, match="transposes.*'none'.*'kept' or 'made'"):
        gradients_of(transposes="none")


@pytest.mark.parametrize("name", ["GptOss", "AriaText"])
def test_transposed_experts_are_moved_once(name, tmp_path):
    own = adapter.register("megamoe_moved", backend="staged")
    model, plain = (model_of(name, "megamoe_moved") for _ in range(2))
    assert adapter.relayout(model) == 2 * len(experts_of(model)) > 0
    assert adapter.relayout(model) == 0
    for module, other in zip(experts_of(model), experts_of(plain), strict=True):
        for moved, matrix in zip(
            (module.gate_up_proj, module.down_proj),
            (other.gate_up_proj, other.down_proj),
            strict=True,
        ):
            assert moved.shape == matrix.shape
            assert torch.equal(moved, matrix)
        weights = weights_of(module)
        assert weights.w13.data_ptr() == module.gate_up_proj.data_ptr()
        assert weights.w2.data_ptr() == module.down_proj.data_ptr()
    assert torch.equal(step(model), step(plain))
    for (key, moved), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        if moved.grad is not None:
            assert torch.equal(moved.grad, parameter.grad), key
            assert moved.grad.stride() == moved.stride(), key
        assert torch.equal(moved, parameter), key
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key)), key
        assert parameter.is_contiguous(), key
    own.close()


def test_experts_that_are_not_transposed_are_left():
    assert adapter.relayout(model_of("Qwen3Moe", "eager")) == 0
