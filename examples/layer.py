"""One MoE layer in one process: forward, backward and optimizer steps.

    python examples/layer.py

On a Hopper GPU the layer is one kernel launch. On a CPU it runs PyTorch's matmuls.
"""

import torch
from torch import nn

import megamoe

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 128, 64, 8, 2


class Block(nn.Module):
    """A router and its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = megamoe.MegaMoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, max_tokens=TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x.float()).softmax(-1)
        topk_weights, topk_ids = probabilities.topk(TOP_K)
        return x + self.experts(x, topk_ids=topk_ids, topk_weights=topk_weights)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = Block().to(device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=5e-3)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    target = x.roll(1, dims=-1)
    for step in range(41):
        loss = (block(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:2}: loss {loss.item():.3f}")
    print("tokens per expert:", block.experts.statistics().tokens_per_expert.tolist())
    block.experts.close()


if __name__ == "__main__":
    main()
