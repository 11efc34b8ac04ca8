"""MegaMoE, the module, and what its training loop needs."""
