"""tools/train_hf.py: a Qwen3-MoE of transformers with our experts and with its own."""
