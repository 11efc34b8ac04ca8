"""The programs of docs/training.md run as written, one after the other, on two ranks."""

import re
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import megamoe
from megamoe.testing import launch

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "training.md"
SECTION = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(rank, folder):
    torch.manual_seed(0)
    names = {"device": "cpu", "compiler": "aot_eager", "folder": folder}
    made = megamoe.MegaMoE
    megamoe.MegaMoE = partial(made, backend="staged", max_tokens=32, init_seed=1)
    sections = SECTION.findall(DOCUMENT.read_text())
    for code in sections:
        exec(compile(code, str(DOCUMENT), "exec"), names)
    net, alone, ranks = names["net"], names["alone"], names["ranks"]
    begin, held = net.moe.problem.expert_begin(), net.moe.problem.num_local_experts()
    same = torch.equal(alone.moe.w13[begin : begin + held], net.moe.w13)
    moments = names["other"].state[alone.moe.w13]["exp_avg"]
    own = names["optimizer"].state[net.moe.w13]["exp_avg"]
    return {
        "sections": len(sections),
        "total_norm": float(names["total_norm"]),
        "loss": float(names["loss"]),
        "loaded": same and torch.equal(moments[begin : begin + held], own) and bool(own.any()),
        "group": (dist.get_world_size() == ranks, net.moe.problem.ep_size),
        "experts": list(names["distributed"].moe.w13.shape),
    }


def test_programs_run(tmp_path):
    results = launch(run, 2, str(tmp_path), timeout_s=120)
    for found in results:
        assert found["sections"] == 17  # those of GPUs are run by tests/gpu/test_training_gpu.py
        assert found["loaded"]
        assert found["group"] == (True, 2)
        assert found["experts"] == [6, 96, 64]
        assert 0 < found["loss"] < 10
        assert found["total_norm"] > 0
        assert found["total_norm"] == results[0]["total_norm"]
