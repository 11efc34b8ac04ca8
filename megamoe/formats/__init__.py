"""Define how experts are stored: their tensors, the quantization formulas, and versions of tensors."""
