"""Convert checkpoints of experts between libraries' layouts (`python -m megamoe.checkpoints`); read and write FP4."""

from megamoe.checkpoints.conversion import convert
from megamoe.checkpoints.nvfp4 import read_nvfp4
from megamoe.checkpoints.packed import write_packed

__all__ = ["convert", "read_nvfp4", "write_packed"]
