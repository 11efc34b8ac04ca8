"""Provide MegaMoE, the module with its own weights, and what its training loop needs."""
