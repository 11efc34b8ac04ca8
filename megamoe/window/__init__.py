"""Symmetric memory: the window of a group of ranks, and who allocates it."""
