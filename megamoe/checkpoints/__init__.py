"""Checkpoints of experts, from one library's layout to another's: `python -m megamoe.checkpoints`."""

from megamoe.checkpoints.conversion import convert
from megamoe.checkpoints.layouts import LAYOUTS

__all__ = ["LAYOUTS", "convert"]
