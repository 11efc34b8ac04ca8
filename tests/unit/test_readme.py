"""The README's routing of other systems, as it stands there."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_dense_routing_becomes_routes():
    torch.manual_seed(0)
    routing_map = torch.rand(50, 8) < 0.25
    routing_map[routing_map.sum(1) > 3] = False
    probs, top_k = torch.rand(50, 8), 3
    names = {"probs": probs, "routing_map": routing_map, "top_k": top_k}
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    (code,) = [text for text in blocks if "routing_map" in text]
    exec(code, names)
    ids, weights = names["topk_ids"], names["topk_weights"]
    dense = torch.zeros(50, 9).scatter_(1, ids.where(ids >= 0, 8), weights)[:, :8]
    assert torch.equal(dense, probs * routing_map)
    assert torch.equal((ids >= 0).sum(1), routing_map.sum(1))
