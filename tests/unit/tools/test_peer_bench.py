"""tools/peer_bench.py with a stand-in for DeepGEMM: y agrees, a fault is told, a missing checkout is named."""

import pytest
from programs import run

# What DeepGEMM's Python says of its arguments: gate and up by eights, scales by blocks of 128, ids on every rank's own.
STAND_IN = """
from types import SimpleNamespace
import torch

def get_symm_buffer_for_sm90_mega_moe(group, experts, most, top_k, hidden, intermediate):
    assert group.size() == 1
    f8 = torch.float8_e4m3fn
    x, x_sf = torch.zeros(most, hidden, dtype=f8), torch.zeros(most, hidden // 128)
    ids = torch.zeros(most, top_k, dtype=torch.int64)
    return SimpleNamespace(x=x, x_sf=x_sf, topk_idx=ids, topk_weights=torch.zeros(most, top_k))

def transform_weights_for_mega_moe_sm90(l1, l2):
    w, sf = l1
    gate, up = (half.unflatten(1, (-1, 8)) for half in w.chunk(2, dim=1))
    return (torch.stack([gate, up], 2).flatten(1, 3), sf), l2

def matrices(w, sf):
    return w.float() * sf.repeat_interleave(128, 1).repeat_interleave(128, 2)

def fp8_mega_moe(y, l1, l2, b):
    pairs = l1[0].unflatten(1, (-1, 2, 8))
    w1 = matrices(torch.cat([pairs[:, :, n].flatten(1, 2) for n in (0, 1)], 1), l1[1])
    w2, n = matrices(*l2), len(y)
    x = b.x[:n].float() * b.x_sf[:n].repeat_interleave(128, 1)
    total = torch.zeros(y.shape)
    for token, ids in enumerate(b.topk_idx[:n].tolist()):
        for route, e in enumerate(ids):
            gate, up = (w1[e] @ x[token]).chunk(2)
            out = w2[e] @ (torch.nn.functional.silu(gate) * up)
            total[token] += out * b.topk_weights[token, route] * FACTOR
    y.copy_(total)
"""
COMMAND = (
    "peer_bench.py --cpu --ranks 1 --backend staged --hidden 256 --intermediate 128 --experts 8 --top-k 2 "
    "--local-experts-of 2 --tokens 3 40 --samples 1 --mode cool clean --deepgemm"
)


@pytest.mark.parametrize(("factor", "code"), [("1.0", 0), ("1.2", 1)])
def test_agreement_and_a_fault_are_told(tmp_path, factor, code):
    package = tmp_path / "deep_gemm"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.replace("FACTOR", factor))
    done = run(*COMMAND.split(), tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    rows = [line.split(",") for line in done.stdout.splitlines() if line.startswith("qwen3-30b*")]
    kernels = ["megamoe", "DeepGEMM", "DeepGEMM with copies"]
    expected = [[t, m, k] for t in ("3", "40") for m in ("cool", "clean") for k in kernels]
    assert [[row[2], row[4], row[5]] for row in rows] == expected
    assert {row[3] for row in rows if row[2] == "40"} == {"4"}  # of four experts
    assert all(float(row[6]) > 0 for row in rows)
    assert all((float(row[7]) > 0.06) == bool(code) for row in rows)


def test_a_folder_without_deepgemm_is_named(tmp_path):
    done = run(*COMMAND.split(), tmp_path)
    assert done.returncode != 0
    assert f"--deepgemm {tmp_path}: expected a checkout with the folder deep_gemm" in done.stderr
