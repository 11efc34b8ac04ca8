"""Checkpoints of experts, from one library's layout to another's: `python -m megamoe.checkpoints`. NVFP4's are read."""

from megamoe.checkpoints.conversion import convert
from megamoe.checkpoints.nvfp4 import read_nvfp4

__all__ = ["convert", "read_nvfp4"]
