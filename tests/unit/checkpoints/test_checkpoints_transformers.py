"""transformers loads what the converters wrote, and they read what it saved: the same model, bit by bit."""

import pytest
import torch

pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")
from hf_models import experts_of, model_of  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megamoe.checkpoints import convert  # noqa: E402

SAVED = {"Qwen3Moe": "hf-per-expert", "Mixtral": "mixtral", "GptOss": "gpt-oss"}


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_equal(model, folder):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
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
