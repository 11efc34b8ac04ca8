"""How experts are stored: tensors, quantization formulas, and the cached FP8 copies."""
