"""Run one call of the layer: validation, operators, gradients."""
