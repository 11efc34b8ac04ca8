"""Help tests, here and in other projects: inputs, comparison, and starting ranks."""

from megamoe.testing.compare import Comparison, assert_close, compare, rounding_step, same_bits
from megamoe.testing.inputs import (
    OVERLOADED,
    ROUTINGS,
    SKEWED,
    Inputs,
    make_inputs,
    make_routing,
    make_weights,
)
from megamoe.testing.launch import backend_of, gpu_of, launch

__all__ = [
    "OVERLOADED",
    "ROUTINGS",
    "SKEWED",
    "Comparison",
    "Inputs",
    "assert_close",
    "backend_of",
    "compare",
    "gpu_of",
    "launch",
    "make_inputs",
    "make_routing",
    "make_weights",
    "rounding_step",
    "same_bits",
]
