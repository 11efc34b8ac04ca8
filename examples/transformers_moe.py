"""A small Qwen3-MoE model of Hugging Face transformers that trains and generates with megamoe's experts.

    pip install -e ".[hf]"
    python examples/transformers_moe.py

A published model needs one argument: AutoModelForCausalLM.from_pretrained(..., experts_implementation="megamoe").
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import megamoe.adapters.transformers as adapter

VOCABULARY, LENGTH = 128, 16


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = adapter.register(max_tokens=256)  # makes the name "megamoe" known to transformers
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation="megamoe"
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counting = torch.arange(3, 3 + LENGTH, device=device)
    for step in range(31):
        start = torch.randint(0, VOCABULARY - LENGTH - 3, (8, 1), device=device)
        tokens = counting + start  # each sequence counts upwards
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    model.eval()
    generated = model.generate(counting[None, :4], max_new_tokens=8, do_sample=False)
    print("generated:", generated[0].tolist())
    print(f"{experts.num_layers} layers ran with megamoe")
    experts.close()


if __name__ == "__main__":
    main()
