"""Provide grouped GEMMs without expert parallelism, fused with the other operations of an MLP of experts.

They run the layer's tiles under another driver (docs/ops.md): on Hopper GPUs one kernel each, elsewhere torch's
operations, and with MEGAMOE_BACKEND=emulate the kernel's source on CPU fibers. They support BF16 and FP8. Names and
arguments are those of torch.nn.functional where torch has them.
"""

from megamoe.ops.functions import (
    grouped_mlp,
    grouped_mm,
    grouped_mm_act,
    grouped_mm_dact,
    grouped_mm_wgrad,
    quantize,
    scaled_grouped_mm,
)
from megamoe.ops.machines import sm_margin

__all__ = [
    "grouped_mlp",
    "grouped_mm",
    "grouped_mm_act",
    "grouped_mm_dact",
    "grouped_mm_wgrad",
    "quantize",
    "scaled_grouped_mm",
    "sm_margin",
]
