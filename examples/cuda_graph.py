"""Serve with one CUDA graph: captured once, replayed with other tokens, routes and token counts.

    python examples/cuda_graph.py  # needs a Hopper GPU

docs/serving.md explains the rules, and how to capture over several ranks.
"""

import torch

import megamoe

MAX_TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 2048, 768, 128, 8


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("cuda_graph.py needs a GPU")
    torch.manual_seed(0)
    layer = megamoe.MegaMoE(
        HIDDEN,
        INTERMEDIATE,
        EXPERTS,
        TOP_K,
        precision="fp8",
        max_tokens=MAX_TOKENS,
        device="cuda",
    ).requires_grad_(False)
    layer.prepare()  # compiles, allocates and quantizes

    # The graph reads and writes these tensors: each step copies its inputs into them.
    x = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.zeros(MAX_TOKENS, TOP_K, dtype=torch.int64, device="cuda")
    weights = torch.zeros(MAX_TOKENS, TOP_K, device="cuda")
    num_tokens = torch.zeros(1, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer(x, ids, weights, num_tokens_device=num_tokens, out=y)

    for tokens in (1, 17, MAX_TOKENS):
        batch = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        scores = torch.randn(tokens, EXPERTS, device="cuda").softmax(-1)
        batch_weights, batch_ids = scores.topk(TOP_K)
        x[:tokens], ids[:tokens], weights[:tokens] = batch, batch_ids, batch_weights
        num_tokens.fill_(tokens)
        graph.replay()
        with torch.no_grad():
            eager = layer(batch, batch_ids, batch_weights)
        print(f"{tokens} tokens: equal to an eager call: {torch.equal(y[:tokens], eager)}")
    layer.close()


if __name__ == "__main__":
    main()
