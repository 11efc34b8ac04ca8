"""Tiny models of transformers, with its own experts and with a megamoe layer over the same parameters."""

import copy

import pytest
import torch

from megamoe.errors import ConfigError
from megamoe.testing import assert_close

transformers = pytest.importorskip("transformers", minversion="5.20")
from megamoe.adapters import transformers as adapter  # noqa: E402

SMALL = {
    **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
MODELS = {
    "Qwen3Moe": {
        "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16
    },
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV3": {
        "moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def experts():
    registered = adapter.register(backend="staged", max_tokens=16)
    yield registered
    registered.close()


def model_of(name, implementation):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def experts_of(model):
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "has_gate")]


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_those_of_transformers(experts, name):
    module = experts_of(model_of(name, "megamoe"))[-1]
    eager = copy.deepcopy(module)
    eager.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 64, generator=generator).bfloat16()  # three calls of 16 tokens
    scores = torch.randn(40, module.num_experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(2)
    dy = torch.randn(40, 64, generator=generator).bfloat16()
    found = []
    for each in (module, eager):
        leaves = [x.clone().requires_grad_(), weights.bfloat16().requires_grad_()]
        y = each(leaves[0], ids, leaves[1])
        assert y.dtype == torch.bfloat16
        y.backward(dy)
        named = dict(zip(("x", "weights"), leaves, strict=True)) | dict(each.named_parameters())
        found.append({"y": y.detach()} | {n: t.grad for n, t in named.items()})
    assert len(found[0]) == (7 if name == "GptOss" else 5)
    for key, value in found[1].items():
        assert value.abs().max() > 0
        assert_close(found[0][key], value, relative=0.02, name=key)
    assert any(m is module for m in experts._layers)
    assert not any(m is eager for m in experts._layers)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_and_is_saved(experts, name, tmp_path):
    model = model_of(name, "megamoe")
    ids = torch.randint(128, (2, 12), generator=torch.Generator().manual_seed(2))
    loss = model(ids, labels=ids).loss
    loss.backward()
    for module in experts_of(model):
        for key, parameter in module.named_parameters():
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.any(), key
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
        model.save_pretrained(tmp_path)
        load = transformers.AutoModelForCausalLM.from_pretrained
        again = load(tmp_path, dtype=torch.bfloat16, experts_implementation="megamoe").eval()
        assert torch.equal(again(ids).logits, logits)
        own = load(tmp_path, dtype=torch.bfloat16, experts_implementation="eager").eval()
        assert set(own.state_dict()) == set(model.state_dict())
        assert all(torch.equal(t, own.state_dict()[n]) for n, t in model.state_dict().items())


def test_what_a_layer_does_not_compute_is_refused():
    module = experts_of(model_of("Mixtral", "eager"))[0]
    module.act_fn = torch.nn.ReLU()
    with pytest.raises(ConfigError, match="activation is that of MixtralExperts, expected one of"):
        adapter.activation_of(module)
    module.has_post_expert_norm = True
    with pytest.raises(ConfigError, match="no norm behind each expert"):
        adapter.weights_of(module)


def test_activations_are_told_apart():
    module = experts_of(model_of("GptOss", "eager"))[0]
    assert adapter.activation_of(module).up_offset == 1.0
    assert adapter.activation_of(module).limit == module.limit
    module.alpha = 1.5
    assert adapter.activation_of(module).alpha == 1.5
    kinds = {"gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}
    module = experts_of(model_of("Mixtral", "eager"))[0]
    for name, kind in kinds.items():
        module.act_fn = transformers.activations.ACT2FN[name]
        assert adapter.activation_of(module).kind == kind


def test_weights_are_views_where_they_can_be():
    module = experts_of(model_of("Qwen3Moe", "eager"))[0]
    weights = adapter.weights_of(module)
    assert weights.w13.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2.data_ptr() == module.down_proj.data_ptr()
