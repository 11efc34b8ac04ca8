"""The least that a layer can cost a rank under uniform routing: time of its GEMMs, bytes of memory and of links."""

import math

from megamoe.core.table import PRECISIONS, Format, by_precision
from megamoe.testing.shapes import Shape

# Limits of an H200 as measured (docs/measurements.md): what a perfect implementation could not beat.
GEMM_TFLOPS = by_precision({"fp8": 1300.0, "bf16": 745.0})
HBM_BYTES_PER_US = 4.3e6
NVLINK_BYTES_PER_US = 340e3
BF16_BYTES = 2
PRODUCTS = {"bf16": ("bf16", BF16_BYTES), "e4m3": ("fp8", 1)}  # rate, bytes of an operand
OF_WEIGHTS = {"bf16": BF16_BYTES, "main_grad": 8}  # bytes of a gradient; fp32: and read


def bytes_per_number(stored: Format) -> float:
    """Return the bytes of a number in this format, with its share of the scales."""
    scales = 0.0
    if stored.scale_block is not None:
        height, width = stored.scale_block
        scales = stored.block_scales * stored.scale_dtype.itemsize / (height * width)
    return stored.bytes / stored.packed + scales


class Load:
    """GEMM time in us, bytes of memory and bytes of links of one rank."""

    def __init__(self, shape: Shape, tokens: int, ranks: int) -> None:
        self.shape, self.tokens, self.rows = shape, tokens, tokens * shape.top_k
        h, i, e, k = shape.hidden, shape.intermediate, shape.num_experts, shape.top_k
        self.planes = shape.matrices - 1
        local = e / ranks
        hit = local * (1 - (1 - 1 / e) ** (tokens * ranks * k))  # experts that get a row at all
        self.hit_weights = hit * (self.planes + 1) * h * i
        self.weights = local * (self.planes + 1) * h * i
        # A token crosses once for each other rank that holds one of its experts, and its partial comes back.
        misses = math.prod((e - local - n) / (e - n) for n in range(k)) if e - local >= k else 0.0
        self.crossings = tokens * (ranks - 1) * (1 - misses)

    def forward(self, precision: str) -> tuple[float, float, float]:
        h, i, stored = self.shape.hidden, self.shape.intermediate, PRECISIONS[precision]
        gemm = self.shape.flops(self.tokens) / (GEMM_TFLOPS[precision] * 1e6)
        # Written and read once each: the row pool, h and the bf16 rows of the second GEMM.
        row = h * stored.x.bytes + i * stored.h.bytes + h * BF16_BYTES
        memory = self.hit_weights * bytes_per_number(stored.w) + 2 * self.rows * row
        return gemm, memory, self.crossings * (h * stored.x.bytes + h * BF16_BYTES)

    def train(self, precision: str) -> tuple[float, float, float]:
        """A forward that saves also writes the pre-activations."""
        gemm, memory, links = self.forward(precision)
        saved = self.rows * self.planes * self.shape.intermediate * BF16_BYTES
        return gemm, memory + saved, links

    def backward(
        self, precision: str, gradients: str | None, passes: int = 1, products: str = "bf16"
    ) -> tuple[float, float, float]:
        """passes: for which gradients of weights are written once. products: what these multiply."""
        h, i, stored = self.shape.hidden, self.shape.intermediate, PRECISIONS[precision]
        rates = [GEMM_TFLOPS["bf16" if stored.packed else precision]]
        rate_of_weights, operand = PRODUCTS[products]
        rates += [GEMM_TFLOPS[rate_of_weights]] * (gradients in OF_WEIGHTS)
        gemm = sum(self.shape.flops(self.tokens) / (rate * 1e6) for rate in rates)
        # Written and read once each: rows of dy, x, dx, dgu and hs; read: gu. FP8: rows of dy and dgu besides.
        row = h * BF16_BYTES + (2 * h + (self.planes + 1) * i) * operand
        if stored.x.scaled:
            row += (h + self.planes * i) * stored.x.bytes
        memory = self.hit_weights * stored.w.bytes + self.rows * (
            2 * row + self.planes * i * BF16_BYTES
        )
        of_each = OF_WEIGHTS.get(gradients or "", 0)
        memory += self.weights * of_each / passes
        return gemm, memory, self.crossings * h * (stored.x.bytes + BF16_BYTES)

    def quantize(self) -> tuple[float, float, float]:
        return 0.0, self.weights * (BF16_BYTES + PRECISIONS["fp8"].w.bytes), 0.0
