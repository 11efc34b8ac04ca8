"""Checkpoints of experts, from one library's layout to another's: `python -m megamoe.checkpoints`."""

from megamoe.checkpoints.conversion import convert

__all__ = ["convert"]
