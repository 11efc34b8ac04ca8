"""Tiny models of transformers, one for each layout and activation of experts, with random weights."""

import copy

import torch
import transformers
from pages import programs

SMALL = {
    **{"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
}
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 6, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "GptOss": {"num_local_experts": 6, "head_dim": 16},  # transposed, interleaved, biases, clamp
    "DeepseekV3": {
        "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
    "Qwen2Moe": {
        "moe_intermediate_size": 48, "num_experts": 6, "shared_expert_intermediate_size": 32
    },
    "Olmoe": {"num_experts": 6},
    "Glm4Moe": {
        "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16,
    },
    "NemotronH": {  # relu2, no gate
        "moe_intermediate_size": 48, "n_routed_experts": 6, "n_shared_experts": 1, "head_dim": 16,
        "moe_shared_expert_intermediate_size": 32, "layers_block_type": ["moe", "attention"],
        "n_group": 1, "topk_group": 1,
    },
    "Gemma4Text": {  # tanh-GELU
        "moe_intermediate_size": 48, "num_experts": 6, "top_k_experts": 2, "head_dim": 16,
        "enable_moe_block": True, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "AriaText": {"moe_num_experts": 6, "moe_topk": 2},  # transposed
    "DeepseekV4": {"moe_intermediate_size": 48, "num_local_experts": 6, "head_dim": 16},  # clamp
    "MiniMaxM3VLText": {"num_local_experts": 6},  # clamp as GPT-OSS's, not interleaved
}  # fmt: skip
ALL_EXPERTS = {  # every token takes every expert, so that no rounding changes a route
    "Qwen3Moe": {"num_experts_per_tok": 6},
    "GptOss": {"num_experts_per_tok": 6},
    "DeepseekV3": {"num_experts_per_tok": 8, "topk_group": 2},
}


def model_of(name, implementation, **changed):
    """Return a bf16 model in training mode; equal weights for equal arguments."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | MODELS[name] | changed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


def experts_of(model):
    """Return the experts' modules."""
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "has_gate")]


def eager_copy(module):
    """Return the module with its own experts."""
    eager = copy.deepcopy(module)
    eager.config._experts_implementation = "eager"
    return eager


def routes(num_tokens, num_experts, top_k=2, seed=1):
    """Return topk_weights in bf16 and topk_ids."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_tokens, num_experts, generator=generator).softmax(-1)
    weights, ids = scores.topk(top_k)
    return weights.bfloat16(), ids


def rows(num_tokens, width=64, seed=3):
    """Return [T, H] bf16."""
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def token_ids(*shape):
    """Return input ids without special ones."""
    return torch.randint(3, 128, shape, generator=torch.Generator().manual_seed(2))


def snippets(folder):
    """Return the programs of docs/adapters.md as they run here: on CPUs, two ranks, the model of a folder."""
    text = "\0".join(programs("docs/adapters.md", "hf"))
    smaller = {"Qwen/Qwen3-30B-A3B": str(folder), '"cuda"': '"cpu"', "_size=8": "_size=2"}
    smaller["max_tokens=8192"] = 'max_tokens=64, backend="staged"'
    for large, small in smaller.items():
        assert large in text
        text = text.replace(large, small)
    return text.split("\0")
