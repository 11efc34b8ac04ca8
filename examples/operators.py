"""The grouped GEMMs of the layer as operators, without expert parallelism: an MLP of experts in BF16 and FP8.

    python examples/operators.py

On a Hopper GPU each operator is one kernel. On a CPU it runs PyTorch's operations.
"""

import torch
from torch.nn import functional

from megamoe import ops

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 128, 8, 2


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.randn(TOKENS, HIDDEN).bfloat16()
    # Weights are [experts, in, out], gate columns and then up columns. The kernel reads them contiguous in `in`, so
    # they are transposed views of [experts, out, in].
    w_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5
    w_down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5
    w_up, w_down = w_up.bfloat16().mT.requires_grad_(), w_down.bfloat16().mT.requires_grad_()
    weights, ids = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)

    # The operators take rows sorted by expert, and where the rows of each expert end.
    order = ids.flatten().argsort(stable=True)
    rows = tokens[order // TOP_K]
    ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).int()

    y = ops.grouped_mlp(rows, w_up, w_down, "swiglu", offs=ends)
    fp8 = ops.grouped_mlp(rows, w_up, w_down, "swiglu", offs=ends, recipe="blockwise")

    expected = torch.empty_like(y)
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        gate, up = (rows[begin:end] @ w_up[expert]).chunk(2, dim=-1)
        expected[begin:end] = (functional.silu(gate) * up) @ w_down[expert]
        begin = end
    for name, result in (("BF16", y), ("FP8", fp8)):
        error = (result - expected).norm() / expected.norm()
        print(f"{name}: relative error {error.item():.4f}")

    # Back to tokens: each token's rows, times its routing weights.
    scaled = y.float() * weights.flatten()[order, None]
    combined = torch.zeros(TOKENS, HIDDEN).index_add(0, order // TOP_K, scaled)
    combined.square().mean().backward()
    print(f"gradients: w_up {w_up.grad.norm().item():.4f}, w_down {w_down.grad.norm().item():.4f}")


if __name__ == "__main__":
    main()
