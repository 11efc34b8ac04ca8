"""NVFP4 experts are read out of others' folders, all of them or none, and what is missing is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pages import programs

pytest.importorskip("safetensors")
from nvfp4_cases import PROBLEM, checkpoint, plainly  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from megamoe import ExpertWeights  # noqa: E402
from megamoe.checkpoints import read_nvfp4  # noqa: E402
from megamoe.core.errors import ArgumentError  # noqa: E402

NAMES = {
    "ModelOpt": ("weight", "weight_scale", "weight_scale_2"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
}


GATE_OF_0 = [f"0.gate_proj.{end}" for end in (*NAMES["ModelOpt"], "input_scale")]


def foreign(writer: str) -> dict[str, torch.Tensor]:
    """Return a module's tensors behind `experts.`, those of activations among them."""
    found = {}
    for n in range(4):
        for i, (name, rows, width) in enumerate(
            (("gate_proj", 96, 160), ("up_proj", 96, 160), ("down_proj", 160, 96))
        ):
            (w,), (s,), o = (t for t in checkpoint(1, rows, width, seed=10 * n + i))
            of_matrix = o.reshape(()) if writer == "ModelOpt" else 1 / o
            ends = dict(zip(NAMES[writer], (w, s, of_matrix), strict=True))
            found |= {f"{n}.{name}.{end}": t for end, t in ends.items()}
            found[f"{n}.{name}.input_scale"] = torch.tensor(1.0)
    return found


@pytest.mark.parametrize("writer", ["ModelOpt", "compressed-tensors"])
def test_checkpoints_of_others(tmp_path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    """The program of docs/adapters.md reads them: two experts of a rank, gate and up with scales of their own."""
    program = "\n".join(programs("docs/adapters.md", "nvfp4"))
    program = program.replace("7168, 2048, 256, 8,", '160, 96, 4, 2, backend="staged", group=')
    tensors, module = foreign(writer), "model.layers.3.mlp"
    folder = tmp_path / "DeepSeek-R1-NVFP4"
    folder.mkdir()
    save_file({f"{module}.experts.{n}": t for n, t in tensors.items()}, folder / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(program, names)
    layer = names["layer"]
    dense = layer.expert_weights().dense(layer.problem, torch.float32)
    packed, scale, outer = NAMES[writer]
    for n in range(4):
        for projection, rows in (("gate_proj", dense.w13[n, :96]), ("up_proj", dense.w13[n, 96:]),
                                 ("down_proj", dense.w2[n])):  # fmt: skip
            w, s, o = (tensors[f"{n}.{projection}.{end}"] for end in (packed, scale, outer))
            factor = o if writer == "ModelOpt" else 1 / o
            assert torch.equal(rows, plainly(w, s).float() * factor)
    again = ExpertWeights.from_nvfp4(**read_nvfp4("DeepSeek-R1-NVFP4-new", module, range(4)))
    assert torch.equal(again.dense(layer.problem, torch.float32).w13, dense.w13)
    layer.close()


def test_experts_that_lack_something_are_refused_by_name(tmp_path) -> None:
    for change, experts, message in (
        ({"2.up_proj.weight_scale_2": None}, range(4), "tensor 'm.experts.2.up_proj.weight_scale_2' is missing"),
        ({"0.down_proj.weight_scale": None}, range(4), r"tensors of m.experts.0 is \['m.experts.0.down_proj.input"),
        ({"0.gate_proj.weight": None}, range(4), "'m.experts.0.gate_proj.weight' is missing"),
        ({"1.up_proj.weight": torch.zeros(96, 80)}, range(4), "1.up_proj.weight.dtype is F32, expected U8"),
        ({"1.up_proj.weight_scale": torch.zeros(96, 10).to(torch.uint8)}, range(4), "dtype is U8, expected F8_E4M3"),
        ({"3.up_proj.weight": torch.zeros(95, 80).to(torch.uint8)}, range(4), r"shape is \[95, 80\], expected"),
        ({"0.up_proj.weight_scale_2": torch.ones(2)}, range(1), r"shape is \[2\], expected \[\] or"),
        ({"3.up_proj.weight": torch.zeros(64, 80).to(torch.uint8)}, range(3, 4), "gate_proj and up_proj"),
        ({"3.up_proj.weight_scale": torch.zeros(96, 5).to(torch.float8_e4m3fn)}, range(3, 4), "gate_proj and up_proj"),
        ({}, range(3, 6), "tensor 'm.experts.4.gate_proj.weight' is missing"),
        ({}, range(7, 8), r"tensors of m.experts.7 is \[\]"),
        ({}, [], "experts is .*, expected numbers, at least one"),
        ({}, 3, "experts is 3, expected numbers"),
        ({}, "01", "experts is 01, expected numbers"),
        ({"1.up_proj.bias": torch.ones(96)}, range(4), "tensor 'm.experts.1.up_proj.bias' is there, expected none"),
        ({"0.up_proj.pre_quant_scale": torch.ones(160)}, range(2), "'m.experts.0.up_proj.pre_quant_scale' is there"),
        (dict.fromkeys(GATE_OF_0), range(4), "tensor 'm.experts.1.gate_proj.input_scale' is there"),
    ):  # fmt: skip
        made = {n: t for n, t in (foreign("ModelOpt") | change).items() if t is not None}
        save_file({f"m.experts.{n}": t for n, t in made.items()}, tmp_path / "m.safetensors")
        with pytest.raises(ArgumentError, match=message):
            read_nvfp4(tmp_path, "m", experts)


def test_experts_without_gates_have_one_plane(tmp_path) -> None:
    made = {n: t for n, t in foreign("ModelOpt").items() if "gate" not in n}
    save_file({f"m.experts.{n}": t for n, t in made.items()}, tmp_path / "m.safetensors")
    problem = replace(PROBLEM, activation="relu2", bias=False)
    w = ExpertWeights.from_nvfp4(**read_nvfp4(tmp_path, "m", range(4)))
    w.validate(problem)
    dense = w.dense(problem, torch.float32)
    numbers = plainly(made["2.up_proj.weight"], made["2.up_proj.weight_scale"]).float()
    assert torch.equal(dense.w13[2], numbers * made["2.up_proj.weight_scale_2"])
