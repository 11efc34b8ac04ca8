"""What the transformers adapter reads in an experts module: its activation, its weights."""

import pytest

from megamoe.config import Activation
from megamoe.errors import ConfigError

transformers = pytest.importorskip("transformers", minversion="5.20")
import torch  # noqa: E402
from hf_models import experts_of, model_of  # noqa: E402

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
