"""Provide symmetric memory: the window of a group of ranks, and its allocators."""
