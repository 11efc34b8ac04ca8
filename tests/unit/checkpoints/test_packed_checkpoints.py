"""FP4 experts of trained layers are written as models are published, and read back to the same bits."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

import megamoe  # noqa: E402
from megamoe import ExpertWeights  # noqa: E402
from megamoe.checkpoints import convert, read_nvfp4, write_packed  # noqa: E402
from megamoe.core.errors import ArgumentError  # noqa: E402

HIDDEN, INTERMEDIATE, EXPERTS = 160, 96, 3
FORMATS = {"gpt-oss-mxfp4": "mxfp4", "deepseek-mxfp4": "mxfp4", "modelopt-nvfp4": "nvfp4"}
MODULES = [f"model.layers.{n}.mlp" for n in range(2)]
OTHERS = {"lm_head.weight": torch.arange(12.0).view(3, 4).bfloat16(), "step": torch.tensor(7)}


def trained(to, seed=0):
    """Return the problem and the packed weights of a layer after a step of training in bf16."""
    bias = to.startswith("gpt-oss")
    layer = megamoe.MegaMoE(
        HIDDEN, INTERMEDIATE, EXPERTS, 2, "alone", max_tokens=8, backend="staged", bias=bias,
        activation="swiglu_oai", init_seed=seed,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, HIDDEN, generator=draw).bfloat16()
    weights, ids = torch.rand(8, EXPERTS, generator=draw).topk(2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(x, ids, weights).float().square().mean().backward()
    optimizer.step()
    problem = replace(layer.problem, precision=f"bf16x{FORMATS[to]}")
    return problem, layer.expert_weights().quantized(problem)


def read(folder, module, to, tmp_path):
    """Read experts as a user does, who has another's checkpoint."""
    if to == "modelopt-nvfp4":
        return ExpertWeights.from_nvfp4(**read_nvfp4(folder, module, range(EXPERTS)))
    ours = tmp_path / "ours"
    if not ours.exists():
        convert(folder, ours, "megamoe")
    names = {}
    for path in ours.glob("*.safetensors"):
        names |= load_file(path)
    found = {n.rpartition(".")[2]: t for n, t in names.items() if n.startswith(f"{module}.")}
    return ExpertWeights(**found)


@pytest.mark.parametrize("to", FORMATS)
def test_read_back_to_the_same_bits(tmp_path, to):
    written = {module: trained(to, seed) for seed, module in enumerate(MODULES)}
    weights = {module: packed for module, (_, packed) in written.items()}
    folder = tmp_path / "published"
    write_packed(folder, weights, to, others=OTHERS, shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 4
    stored = {}
    for path in files:
        stored |= load_file(path)
    assert all(torch.equal(stored[name], value) for name, value in OTHERS.items())
    for module, (problem, packed) in written.items():
        found = read(folder, module, to, tmp_path)
        found.validate(problem)
        for name, value in packed.named().items():
            same = getattr(found, name).reshape(value.shape)
            assert torch.equal(same, value), name
        dense = found.dense(problem, torch.float32)
        assert torch.equal(dense.w13, packed.dense(problem, torch.float32).w13)
    assert not torch.equal(weights[MODULES[0]].w2, weights[MODULES[1]].w2)


def test_gpt_oss_loads_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from hf_models import experts_of, rows
    from hf_quantized import written_packed

    from megamoe.adapters import transformers as adapter

    source = written_packed(tmp_path)
    own = adapter.register(backend="staged", max_tokens=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, experts_implementation="megamoe"
    )
    from megamoe.adapters.transformers_weights import weights_of

    modules = {f"model.layers.{n}.mlp": weights_of(m) for n, m in enumerate(experts_of(model))}
    others = {n: t for n, t in model.state_dict().items() if ".experts." not in n}
    folder = tmp_path / "again"
    write_packed(folder, modules, "gpt-oss-mxfp4", others=others)
    (folder / "config.json").write_text((source / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="megamoe"
    )
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    weights, ids = torch.rand(4, 6).bfloat16().topk(2)
    made = [experts_of(m)[0](rows(4), ids, weights) for m in (model, again)]
    assert torch.equal(*made)
    own.close()


def test_what_no_layout_holds_is_refused_before_anything_is_written(tmp_path):
    _, packed = trained("deepseek-mxfp4")
    _, biased = trained("gpt-oss-mxfp4")
    _, nvfp4 = trained("modelopt-nvfp4")
    dense = ExpertWeights(torch.zeros(3, 192, 160), torch.zeros(3, 160, 96))
    ungated = replace(packed, w13=packed.w13[:, :96], w13_scale=packed.w13_scale[:, :1])
    folder = tmp_path / "new"
    for to, weights, message in (
        ("hf-fused", packed, "to is 'hf-fused', expected one of gpt-oss-mxfp4, deepseek-mxfp4"),
        ("deepseek-mxfp4", dense, "weights of m is not packed, expected mxfp4 for deepseek-mxfp4"),
        ("modelopt-nvfp4", packed, "weights of m is mxfp4, expected nvfp4 for modelopt-nvfp4"),
        ("gpt-oss-mxfp4", nvfp4, "weights of m is nvfp4, expected mxfp4 for gpt-oss-mxfp4"),
        ("gpt-oss-mxfp4", packed, "bias of m is None, expected there, as in gpt-oss-mxfp4"),
        ("deepseek-mxfp4", biased, "deepseek-mxfp4, expected one with a place for bias of m"),
        ("deepseek-mxfp4", ungated, "expected one for experts without gates: m"),
    ):
        with pytest.raises(ArgumentError, match=message):
            write_packed(folder, {"m": weights}, to)
    others = {"m.experts.0.w1.weight": torch.zeros(1)}
    with pytest.raises(ArgumentError, match="'m.experts.0.w1.weight' is to be written twice"):
        write_packed(folder, {"m": packed}, "deepseek-mxfp4", others=others)
    with pytest.raises(ArgumentError, match=r"x.dtype is torch.complex64, expected one of"):
        write_packed(folder, {}, "deepseek-mxfp4", others={"x": torch.zeros(1, dtype=torch.cfloat)})
    assert not list(tmp_path.iterdir())
    write_packed(folder, {"m": packed}, "deepseek-mxfp4")
    with pytest.raises(ArgumentError, match="expected a folder that does not exist yet"):
        write_packed(folder, {"m": packed}, "deepseek-mxfp4")


@pytest.mark.parametrize("to", FORMATS)
def test_broken_files_are_refused_by_name(tmp_path, to):
    _, packed = trained(to)
    folder = tmp_path / "whole"
    write_packed(folder, {"m": packed}, to, shard_bytes=4_000)
    files = sorted(folder.glob("*.safetensors"))
    scale = next(n for path in files for n in load_file(path) if "scale" in n and "2" not in n)
    holder = next(path for path in files if scale in load_file(path))
    contents, bits = load_file(holder), holder.read_bytes()

    def refused(message):
        with pytest.raises(ArgumentError, match=message):
            read(folder, "m", to, tmp_path)
        assert not (tmp_path / "ours").exists()

    holder.write_bytes(bits[:-1])
    refused(f"{holder.name} is unreadable")
    holder.unlink()
    refused(f"{holder.name} is unreadable")
    save_file({n: t for n, t in contents.items() if n != scale} | {"x": torch.zeros(1)}, holder)
    refused(f"{scale}' is named by the index, in none of its files|'x' is in a file of the index")
    save_file(contents | {scale: contents[scale][..., :-1].contiguous()}, holder)
    refused("shape is")
    holder.write_bytes(bits)
    found = read(folder, "m", to, tmp_path)
    assert torch.equal(found.w2.reshape(packed.w2.shape), packed.w2)
