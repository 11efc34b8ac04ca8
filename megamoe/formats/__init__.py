"""How experts are stored: tensors, quantization formulas, and versions, by which copies follow."""
