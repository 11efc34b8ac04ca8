"""Provide grouped GEMMs without expert parallelism, fused with the other operations of an MLP of experts.

They run the layer's tiles under another driver (docs/ops.md): on Hopper GPUs one kernel each, elsewhere torch's
operations, and with MEGAMOE_BACKEND=emulate the kernel's source on CPU fibers. They support BF16 and FP8. Offsets are
those of torch's grouped_mm.
"""

from megamoe.ops.functions import (
    grouped_mlp,
    grouped_mm,
    grouped_mm_downproj,
    grouped_mm_dswiglu,
    grouped_mm_swiglu,
    grouped_mm_wgrad,
    quantize_rows,
    quantize_weights,
    scales_by_block,
)

__all__ = [
    "grouped_mlp",
    "grouped_mm",
    "grouped_mm_downproj",
    "grouped_mm_dswiglu",
    "grouped_mm_swiglu",
    "grouped_mm_wgrad",
    "quantize_rows",
    "quantize_weights",
    "scales_by_block",
]
