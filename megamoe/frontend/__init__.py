"""What users call: the function, the operators with gradients, the module."""
