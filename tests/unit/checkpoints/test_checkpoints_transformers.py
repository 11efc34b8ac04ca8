"""transformers loads what the converters wrote, and they read what it saved: the same model, bit by bit."""

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
from hf_models import SMALL, experts_of, model_of, rows  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import megamoe  # noqa: E402
from megamoe.checkpoints import convert  # noqa: E402
from megamoe.testing import assert_close, compare  # noqa: E402

SAVED = {"Qwen3Moe": "hf-per-expert", "Mixtral": "mixtral", "GptOss": "gpt-oss"}


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_equal(model, folder):
    loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    expected = parameters(model)
    found = parameters(loaded)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded(tmp_path, name):
    model = model_of(name, "eager")
    model.save_pretrained(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "ours", "megamoe")
    file = load_file(next((tmp_path / "ours").glob("*.safetensors")))
    w13 = file[next(n for n in file if "layers.0." in n and n.endswith("w13"))]
    first = experts_of(model)[0].gate_up_proj
    if name == "GptOss":
        first = torch.cat((first[..., 0::2], first[..., 1::2]), -1).mT
    assert torch.equal(w13, first)
    convert(tmp_path / "ours", tmp_path / "back", SAVED[name])
    assert_equal(model, tmp_path / "back")
    if name != "GptOss":
        convert(tmp_path / "saved", tmp_path / "fused", "hf-fused")
        assert_equal(model, tmp_path / "fused")


def filled(model):
    torch.manual_seed(0)
    for parameter in model.bfloat16().parameters():
        torch.nn.init.normal_(parameter, 0, 0.1)
    return model


def load(folder):
    return load_file(next(folder.glob("*.safetensors")))


def test_qwen3_vl_moe_as_it_is_published(tmp_path):
    """transformers turns transposed experts as it loads them, and saves them as it has them: under one model_type."""
    text = SMALL | {"moe_intermediate_size": 48, "num_experts": 6, "head_dim": 16}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    vision |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = filled(transformers.Qwen3VLMoeForConditionalGeneration(config))
    model.save_pretrained(tmp_path / "saved")
    assert "(hf-fused)" in convert(tmp_path / "saved", tmp_path / "published", "hf-transposed")[0]
    first = "model.language_model.layers.0.mlp.experts."
    assert load(tmp_path / "published")[f"{first}gate_up_proj"].shape == (6, 64, 96)
    assert_equal(model, tmp_path / "published")
    assert "(hf-transposed)" in convert(tmp_path / "published", tmp_path / "ours", "megamoe")[0]
    found = load(tmp_path / "ours")
    assert torch.equal(found[f"{first}w13"], experts_of(model)[0].gate_up_proj)
    assert torch.equal(found[f"{first}w2"], experts_of(model)[0].down_proj)
    convert(tmp_path / "ours", tmp_path / "back", "hf-fused")
    assert_equal(model, tmp_path / "back")


def test_llama4(tmp_path):
    """Its experts are transposed; its scores multiply what experts are given, which a layer has to be told."""
    sizes = SMALL | {"intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16}
    sizes |= {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    model = filled(transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes)))
    model.save_pretrained(tmp_path / "saved")
    assert "(hf-transposed)" in convert(tmp_path / "saved", tmp_path / "ours", "megamoe")[0]
    convert(tmp_path / "ours", tmp_path / "back", "hf-transposed")
    assert_equal(model, tmp_path / "back")
    moe, prefix = model.model.layers[1].feed_forward, "model.layers.1.feed_forward.experts."
    with torch.no_grad():
        x = rows(24)
        expected = moe(x)[0] - moe.shared_expert(x)
        scores, ids = moe.router(x)[0].max(1, keepdim=True)
    state = {
        name.removeprefix(prefix): tensor
        for name, tensor in load(tmp_path / "ours").items()
        if name.startswith(prefix)
    }
    for on_input in (True, False):
        layer = megamoe.MegaMoE(
            64, 48, 4, 1, backend="staged", max_tokens=32, apply_router_weight_on_input=on_input
        )
        layer.load_state_dict(state)
        with torch.no_grad():
            y = layer(x, ids, scores)
        if on_input:
            assert_close(y, expected, relative=0.03)
        else:  # what this sees
            assert compare(y, expected).relative > 0.1
