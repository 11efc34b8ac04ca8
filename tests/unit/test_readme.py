"""The README's Python runs as it stands, but for sizes and, where there is no GPU, the device."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
ON_CPU = {
    '"cuda"': '"cpu"',
    "torch.cuda.set_device": "int",
    '"nccl"': '"gloo"',
    "7168": "64",
    "2048": "48",
    "256": "8",
    "8192": "16",
}
TORCHRUN = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
}


def block(words):
    (found,) = [text for text in BLOCKS if words in text]
    return found


def on_cpu(text):
    for word, other in ON_CPU.items():
        text = text.replace(word, other)
    return text


@pytest.mark.parametrize("words", ['backend="staged"', "init_process_group"])
def test_the_examples_run(words):
    code = on_cpu(block(words)) + "\nassert y.shape == x.shape and y.isfinite().all()"
    environment = {**TORCHRUN, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_dense_routing_becomes_routes():
    torch.manual_seed(0)
    routing_map = torch.rand(50, 8) < 0.25
    routing_map[routing_map.sum(1) > 3] = False
    probs, top_k = torch.rand(50, 8), 3
    names = {"probs": probs, "routing_map": routing_map, "top_k": top_k}
    exec(block("routing_map"), names)
    ids, weights = names["topk_ids"], names["topk_weights"]
    dense = torch.zeros(50, 9).scatter_(1, ids.where(ids >= 0, 8), weights)[:, :8]
    assert torch.equal(dense, probs * routing_map)
    assert torch.equal((ids >= 0).sum(1), routing_map.sum(1))
