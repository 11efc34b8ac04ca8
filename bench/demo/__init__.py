"""tools/train_step.py: a small language model that trains over the ranks, and what it has to equal."""
