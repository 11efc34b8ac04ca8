"""Convert checkpoints of experts between libraries' layouts (`python -m megamoe.checkpoints`), and read NVFP4."""

from megamoe.checkpoints.conversion import convert
from megamoe.checkpoints.nvfp4 import read_nvfp4

__all__ = ["convert", "read_nvfp4"]
