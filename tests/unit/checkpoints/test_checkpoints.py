"""Converters of experts between checkpoints' layouts: nothing but moved, all or nothing, or refused by name."""

import json
import re
import shutil
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch
from pages import programs

from megamoe.core.errors import ArgumentError
from megamoe.formats.weights import ExpertWeights

safetensors = pytest.importorskip("safetensors")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import megamoe  # noqa: E402
from megamoe import Problem  # noqa: E402
from megamoe.backends import reference  # noqa: E402
from megamoe.checkpoints import convert, files  # noqa: E402
from megamoe.checkpoints.__main__ import main  # noqa: E402
from megamoe.checkpoints.layouts import LAYOUTS  # noqa: E402
from megamoe.testing import assert_close, compare, make_inputs, make_weights  # noqa: E402

H, INNER, E = 160, 96, 3  # ragged last blocks of 128 rows and columns
PAIRS = {
    "plain": [
        *("hf-fused", "hf-per-expert", "mixtral", "hf-transposed"),
        *("megatron", "megatron-sequential", "megamoe"),
    ],
    "no gate": ["hf-fused", "hf-per-expert", "megatron", "megatron-sequential", "megamoe"],
    "biases": ["hf-transposed", "gpt-oss", "megatron", "megatron-sequential", "megamoe"],
    "scales": [
        *("deepseek-fp8", "minimax-fp8"),
        *("compressed-tensors-fp8-block", "mixtral-fp8-block", "megamoe"),
    ],
    "scales, no gate": ["deepseek-fp8", "compressed-tensors-fp8-block", "megamoe"],
    "scales of channels": ["compressed-tensors-fp8", "mixtral-fp8", "megamoe"],
    "scales of channels, no gate": ["compressed-tensors-fp8", "megamoe"],
    "mxfp4, biases": ["gpt-oss-mxfp4", "megamoe"],
}
HF, MIXTRAL = "gate_proj up_proj down_proj", "w1 w3 w2"
PROJECTIONS = {
    **dict.fromkeys(["hf-per-expert", "deepseek-fp8"], HF),
    **dict.fromkeys(["compressed-tensors-fp8", "compressed-tensors-fp8-block"], HF),
    **dict.fromkeys(["mixtral", "minimax-fp8", "mixtral-fp8", "mixtral-fp8-block"], MIXTRAL),
}
LAYERS = ("model.layers.0.mlp.", "model.layers.11.mlp.")
OTHERS = {
    "model.embed_tokens.weight": torch.arange(24.0).view(4, 6),
    "model.layers.0.mlp.gate.weight": torch.arange(6.0).view(2, 3).bfloat16(),
    "model.layers.0.mlp.shared_experts.gate_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3),
    "flag": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
    "other.w2": torch.ones(3),
}


def noise(*shape, dtype=torch.bfloat16):
    """Any bits, NaN, Inf and subnormals among them."""
    numbers = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return numbers.view(dtype)


def parts_of(content, dtypes=(torch.bfloat16,) * 2):
    """Return one expert: by kind, gate, up and down; `dtypes` of the first two and of down."""
    sizes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    if "no gate" in content:
        del sizes["gate"]
    dtype = {part: dtypes[part == "down"] for part in sizes}
    if "scales" in content:
        dtype = dict.fromkeys(sizes, torch.float8_e4m3fn)
    found = {"weight": {p: noise(*size, dtype=dtype[p]) for p, size in sizes.items()}}
    if "mxfp4" in content:
        shape = {p: (n, k // 32) for p, (n, k) in sizes.items()}
        found = {"codes": {p: noise(n, k // 2, dtype=torch.uint8) for p, (n, k) in sizes.items()}}
        found["powers"] = {p: noise(*n, dtype=torch.uint8) % 253 for p, n in shape.items()}
    if "biases" in content:
        found["bias"] = {p: noise(size[0], dtype=dtype[p]) for p, size in sizes.items()}
    if "scales" in content:
        shape = {p: [-(-n // 128) for n in size] for p, size in sizes.items()}
        if "channels" in content:
            shape = {p: [rows, 1] for p, (rows, _) in sizes.items()}
        found["scale"] = {p: noise(*n, dtype=torch.float32) for p, n in shape.items()}
    return found


def joined(kind, *parts):
    return torch.cat([kind[p] for p in parts if p in kind])


def alternating(kind):
    return torch.stack((kind["gate"], kind["up"]), 1).flatten(0, 1)


def hand_made(layout, experts):
    """What each layout is, written down once more, for one layer: name behind `experts.` -> tensor."""
    found, stack = {}, {}
    for n, expert in enumerate(experts):
        w, b, s = (expert.get(kind, {}) for kind in ("weight", "bias", "scale"))
        codes, powers = (expert.get(kind, {}) for kind in ("codes", "powers"))
        if layout in PROJECTIONS:
            end = "_scale_inv" if layout in ("deepseek-fp8", "minimax-fp8") else "_scale"
            for part, name in zip(("gate", "up", "down"), PROJECTIONS[layout].split(), strict=True):
                found |= {f"{n}.{name}.weight": of[part] for of in (w,) if part in of}
                found |= {f"{n}.{name}.weight{end}": of[part] for of in (s,) if part in of}
        elif layout.startswith("megatron"):
            for kind, of in (("weight", w), ("bias", b)):
                for linear, parts in (("1", ("gate", "up")), ("2", ("down",))):
                    grouped = f"linear_fc{linear}.{kind}{n}"
                    alone = f"local_experts.{n}.linear_fc{linear}.{kind}"
                    if of:
                        found[grouped if layout == "megatron" else alone] = joined(of, *parts)
        elif layout == "gpt-oss-mxfp4":
            for end, of in (("blocks", codes), ("scales", powers), ("bias", b)):
                whole = alternating(of), of["down"]
                if end == "blocks":
                    whole = (t.unflatten(-1, (-1, 16)) for t in whole)
                for side, tensor in zip(("gate_up", "down"), whole, strict=True):
                    stack.setdefault(f"{side}_proj_{end}", []).append(tensor)
        elif layout == "hf-transposed":
            stack.setdefault("gate_up_proj", []).append(joined(w, "gate", "up").T)
            stack.setdefault("down_proj", []).append(w["down"].T)
            if b:
                stack.setdefault("gate_up_proj_bias", []).append(joined(b, "gate", "up"))
                stack.setdefault("down_proj_bias", []).append(b["down"])
        elif layout == "gpt-oss":
            stack.setdefault("gate_up_proj", []).append(alternating(w).T)
            stack.setdefault("gate_up_proj_bias", []).append(alternating(b))
            stack.setdefault("down_proj", []).append(w["down"].T)
            stack.setdefault("down_proj_bias", []).append(b["down"])
        elif layout == "hf-fused":
            first = "gate_up_proj" if "gate" in w else "up_proj"
            stack.setdefault(first, []).append(joined(w, "gate", "up"))
            stack.setdefault("down_proj", []).append(w["down"])
        else:
            for letter, end, of in (("w", "", w or codes), ("b", "", b), ("w", "_scale", s)):
                if of:
                    up = joined(of, "gate", "up")
                    stack.setdefault(f"{letter}13{end}", []).append(up)
                    stack.setdefault(f"{letter}2{end}", []).append(of["down"])
            if codes:  # in the order that the layer's own reader gives them
                rows = [(joined(of, "gate", "up"), of["down"]) for of in (codes, powers)]
                read = ExpertWeights.from_mxfp4(*(t[None] for pair in rows for t in pair))
                stack.setdefault("w13_scale", []).append(read.w13_scale[0])
                stack.setdefault("w2_scale", []).append(read.w2_scale[0])
    return found | {name: torch.stack(each) for name, each in stack.items()}


def checkpoint(folder, layout, content="plain", *, shards=1, dtypes=(torch.bfloat16,) * 2, num=E):
    """Write a checkpoint of two layers, tensor by tensor in turn into `shards` files; return its tensors."""
    torch.manual_seed(0)
    tensors = dict(OTHERS)
    for layer in LAYERS:
        experts = [parts_of(content, dtypes) for _ in range(num)]
        of_layer = hand_made(layout, experts)
        tensors |= {f"{layer}experts.{n}": t.contiguous() for n, t in of_layer.items()}
    folder.mkdir()
    of = {"hf-transposed": "openai_privacy_filter" if "biases" in content else "llama4"}
    (folder / "config.json").write_text(json.dumps({"model_type": of.get(layout, "gpt_oss")}))
    save(folder, tensors, shards)
    return tensors


def save(folder, tensors, shards=1):
    for shard in range(shards):
        names = list(tensors)[shard::shards]
        save_file({n: tensors[n].clone() for n in names}, folder / f"part{shard}.safetensors")


def load(folder):
    """Read a folder through its index, with the library."""
    index = json.loads((folder / files.INDEX).read_text())["weight_map"]
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert {n for n, f in index.items() if f == path.name} == set(file.keys())
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == index.keys()
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor))
        assert torch.equal(a, b), name


# What reads a layout knows nothing of what writes one: each with ours, in both directions.
CASES = [
    (c, *pair)
    for c, names in PAIRS.items()
    for n in names[:-1]
    for pair in permutations((n, "megamoe"))
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that gives the folder and the tensors of a checkpoint in two files."""
    root, known = tmp_path_factory.mktemp("made"), {}

    def get(layout, content):
        folder = root / f"{layout} {content}"
        if folder not in known:
            known[folder] = checkpoint(folder, layout, content, shards=2)
        return folder, known[folder]

    return get


@pytest.mark.parametrize(("content", "here", "there"), CASES)
def test_every_pair(tmp_path, made, content, here, there):
    """Both directions of a pair are here, so that there and back gives the same bits."""
    convert(made(here, content)[0], tmp_path / "b", there, shard_bytes=80_000)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "b"), made(there, content)[1])
    config = (made(here, content)[0] / "config.json").read_bytes()
    assert (tmp_path / "b" / "config.json").read_bytes() == config


@pytest.mark.parametrize("there", ["hf-fused", "megatron", "megamoe"])
def test_types_stay(tmp_path, there):
    dtypes = torch.float32, torch.float16
    before = checkpoint(tmp_path / "a", "hf-per-expert", dtypes=dtypes)
    convert(tmp_path / "a", tmp_path / "b", there)
    assert {t.dtype for n, t in load(tmp_path / "b").items() if "experts." in n} >= set(dtypes)
    convert(tmp_path / "b", tmp_path / "c", "hf-per-expert")
    assert_same(load(tmp_path / "c"), before)


def test_one_expert_a_shard_and_one_expert_in_memory(tmp_path, monkeypatch):
    before = checkpoint(tmp_path / "a", "megamoe", shards=4)
    convert(tmp_path / "a", tmp_path / "b", "megatron-sequential", shard_bytes=1)
    shards = len(before) - 4 + 2 * 2 * E
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == shards
    pieces, as_bytes = [], files._bytes
    monkeypatch.setattr(files, "_bytes", lambda t: pieces.append(t.nbytes) or as_bytes(t))
    convert(tmp_path / "b", tmp_path / "c", "hf-fused")
    convert(tmp_path / "c", tmp_path / "d", "megamoe")
    assert_same(load(tmp_path / "d"), before)
    assert max(pieces) == 2 * INNER * H * 2


def test_a_layer_is_converted(tmp_path):
    """Under whatever name its module has."""
    layer = megamoe.MegaMoE(H, INNER, E, 2, backend="staged", init_seed=1)
    tensors = {f"net.moe.{name}": p.detach() for name, p in layer.named_parameters()}
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", tensors)
    convert(tmp_path / "a", tmp_path / "b", "hf-per-expert")
    found = load(tmp_path / "b")["net.moe.experts.2.gate_proj.weight"]
    assert torch.equal(found, layer.w13[2, :INNER])


def test_scales_in_bf16(tmp_path):
    """As some FP8 checkpoints have them: kept, and widened by the layer that loads them."""
    tensors = checkpoint(tmp_path / "a", "deepseek-fp8", "scales")
    tensors = {n: t.bfloat16() if n.endswith("_inv") else t for n, t in tensors.items()}
    save(tmp_path / "a", tensors)
    convert(tmp_path / "a", tmp_path / "b", "megamoe")
    found = load(tmp_path / "b")
    prefix = f"{LAYERS[0]}experts."
    state = {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}
    assert state["w13_scale"].dtype == torch.bfloat16
    layer = megamoe.MegaMoE(H, INNER, E, 2, precision="fp8", backend="staged")
    for _ in range(2):  # in place of masters, then into what it holds
        layer.load_state_dict(state)
        expected = {"s": state["w13_scale"].float()}
        assert_same({"s": layer.w13_scale}, expected)
    convert(tmp_path / "b", tmp_path / "c", "deepseek-fp8")
    assert_same(load(tmp_path / "c"), tensors)


def test_channels_as_they_are_published(tmp_path):
    """llm-compressor's FP8_DYNAMIC: scales in bf16. y is that of the numbers that they stand for, but for x and h."""
    masters = make_weights(Problem(H, INNER, E, 2))
    tensors = {}
    for n in range(E):
        parts = {
            "gate": masters.w13[n, :INNER],
            "up": masters.w13[n, INNER:],
            "down": masters.w2[n],
        }
        for part, w in parts.items():
            scale = (w.float().abs().amax(1, keepdim=True) / 448).bfloat16()
            name = f"{LAYERS[0]}experts.{n}.{part}_proj.weight"
            tensors[name] = (w.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale
    (tmp_path / "a").mkdir()
    save(tmp_path / "a", tensors)
    convert(tmp_path / "a", tmp_path / "b", "megamoe")
    found = {n.removeprefix(f"{LAYERS[0]}experts."): t for n, t in load(tmp_path / "b").items()}

    def numbers(part):
        names = [f"{LAYERS[0]}experts.{n}.{part}_proj.weight" for n in range(E)]
        return torch.stack([tensors[n].float() * tensors[f"{n}_scale"].float() for n in names])

    problem = Problem(H, INNER, E, 2, max_tokens=32, precision="fp8_channel")
    layer = megamoe.MegaMoE(
        H, INNER, E, 2, precision="fp8_channel", max_tokens=32, backend="staged"
    )
    layer.load_state_dict(found)
    dense = layer.expert_weights().dense(problem, torch.float32)
    assert torch.equal(dense.w13, torch.cat([numbers("gate"), numbers("up")], 1))
    assert torch.equal(dense.w2, numbers("down"))
    given = make_inputs(problem, 32)
    call = [given.x], [given.topk_ids], [given.topk_weights]
    exact = reference.forward(problem, *call, [dense], rounding="none")["y"][0]
    with torch.no_grad():
        y = layer(given.x, given.topk_ids, given.topk_weights)
        assert_close(y, exact, relative=0.05)
        # A fault that this sees: up multiplied by gate's scales
        layer.w13_scale[:, INNER:].copy_(layer.w13_scale[:, :INNER].roll(1, 1) * 2)
        assert compare(layer(*(each[0] for each in call)), exact).relative > 0.1
    # Scales without a second dimension, and of groups along K, are no channels.
    for shape in ((INNER,), (INNER, 2)):
        other = {n: torch.ones(shape) if n.endswith("_scale") else t for n, t in tensors.items()}
        save(tmp_path / "a", other)
        refuse(
            tmp_path / "a", "megamoe", r"(gate_proj.weight_scale F32 |_scale.shape is )\[", tmp_path
        )


def refuse(source, to, message, tmp_path, **options):
    """The conversion is refused and nothing is left."""
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match=message):
        convert(source, tmp_path / "target", to, **options)
    assert sorted(tmp_path.iterdir()) == before


E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNEL = E4M3 | {"strategy": "channel", "dynamic": False, "observer": "minmax"}
TOKEN = E4M3 | {"strategy": "token", "dynamic": True}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": CHANNEL, "input_activations": TOKEN}
    },
}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def of_group(**changes):
    """FP8_DYNAMIC with another scheme."""
    return {"config_groups": {"group_0": FP8_DYNAMIC["config_groups"]["group_0"] | changes}}


def beside(*schemes):
    """FP8_DYNAMIC with schemes of these targets, W8A16, beside its own."""
    other = [{"targets": [target], "weights": CHANNEL} for target in schemes]
    groups = FP8_DYNAMIC["config_groups"] | {f"group_{n}": s for n, s in enumerate(other, 1)}
    return {"config_groups": groups}


SCHEME = r"quantization_config.config_groups.group_0"
RECIPES = {  # of experts by channel: what the recipe has instead, and what the error says; None: accepted
    "as published": ({}, None),
    "another scheme elsewhere": (beside("re:.*self_attn.*"), None),
    "weights alone": (of_group(input_activations=None), rf"{SCHEME}.input_activations is None"),
    "a calibrated scale": (
        of_group(input_activations=E4M3 | {"strategy": "tensor", "dynamic": False}),
        rf"{SCHEME}.input_activations is .*'tensor', 'dynamic': False.*, expected .*'token'",
    ),
    "a scale for all tokens": (
        of_group(input_activations=E4M3 | {"strategy": "tensor", "dynamic": True}),
        rf"{SCHEME}.input_activations is .*'tensor'",
    ),
    "integers": (of_group(input_activations=TOKEN | {"type": "int"}), "'type': 'int'"),
    "integers, unsaid": (of_group(input_activations={"strategy": "token"}), "'type': 'int'"),
    "rows with zero points": (
        of_group(input_activations=TOKEN | {"symmetric": False}),
        "'symmetric': False",
    ),
    "blocks": (of_group(weights=CHANNEL | {"strategy": "block"}), rf"{SCHEME}.weights is .*block"),
    "rounded results": (of_group(output_activations=TOKEN), rf"{SCHEME}.output_activations is "),
    "experts by a pattern": (beside(r"re:.*experts\.\d+\."), r"group_1.input_activations is None"),
    "an expert by its name": (
        beside("re:.*attn.*", "model.layers.11.mlp.experts.2.down_proj"),
        "group_2.input_activations is None",
    ),
    "no scheme": (
        of_group(targets=["re:.*attn.*"]),
        r"config_groups, targets is .*attn.*, expected one of ",
    ),
    "no groups": ({"config_groups": []}, "expected one of model.layers.0.mlp.experts.0.gate_proj"),
    "a scheme by its name": (
        {"config_groups": FP8_DYNAMIC["config_groups"] | {"W8A16": ["re:.*experts.*"]}},
        r"config_groups is .*'W8A16': \['re:.*expected schemes",
    ),
    # compressed-tensors takes the pattern that is first in alphabetical order, vLLM that of the first group.
    "two patterns": (
        {
            "config_groups": {
                "group_0": FP8_DYNAMIC["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]},
                "group_1": {"targets": ["re:.*experts.*"], "weights": CHANNEL},
            }
        },
        "group_1.input_activations is None",
    ),
    "two of a class": (beside("Linear"), "group_1.input_activations is None"),
    "names that are no list": ({"ignore": "lm_head"}, "ignore is 'lm_head', expected a list of"),
    "targets that are no list": (of_group(targets=5), "group_0.targets is 5, expected a list of"),
    "rotated rows": (
        {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}},
        "transform_config is .*hadamard.*, expected none",
    ),
    "said to be nothing": (
        {"transform_config": {}, "sparsity_config": {}, "kv_cache_scheme": None},
        None,
    ),
    "experts ignored": (
        {"ignore": ["re:.*mlp.experts.*"]},
        "quantization_config.ignore is 're:.*mlp.experts.*', expected none that names model.layers",
    ),
    "one projection ignored": (
        {"ignore": ["lm_head", "model.layers.11.mlp.experts.1.up_proj"]},
        "ignore is 'model.layers.11.mlp.experts.1.up_proj'",
    ),
    "no pattern": (of_group(targets=["re:*"]), r"group_0.targets is 're:\*' .*regular expression"),
    "bounded scales": (
        {"quant_method": "fbgemm_fp8"},
        "quant_method is 'fbgemm_fp8', expected 'com",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_the_recipe_of_channels(tmp_path, case):
    """config.json says how rows are rounded; only what a layer of fp8_channel does is taken."""
    changes, message = RECIPES[case]
    places = ("quantization_config", "compression_config", "text_config", "thinker_config")
    checkpoint(tmp_path / "a", "compressed-tensors-fp8", "scales of channels")
    path = tmp_path / "a" / "config.json"
    for place in places if case in ("as published", "rotated rows") else places[:1]:
        recipe = FP8_DYNAMIC | changes
        config = {
            "text_config": {"text_config": {"quantization_config": recipe}},
            "thinker_config": {"thinker_config": {"text_config": {"quantization_config": recipe}}},
        }.get(place, {place: recipe})
        path.write_text(json.dumps(config))
        if message is None:
            convert(tmp_path / "a", tmp_path / place, "megamoe")
            # Its recipe stays beside it, and is right for what it has become.
            convert(tmp_path / place, tmp_path / f"{place} back", "compressed-tensors-fp8")
        else:
            said = message.replace("quantization_config", r"\w+_config")
            refuse(tmp_path / "a", "megamoe", rf"{re.escape(str(path))}: .*{said}", tmp_path)


def test_a_recipe_of_experts_without_gates_names_no_gate(tmp_path):
    found = checkpoint(tmp_path / "a", "compressed-tensors-fp8", "scales of channels")
    save(tmp_path / "a", {n: t for n, t in found.items() if "gate_proj" not in n})
    path = tmp_path / "a" / "config.json"
    for targets, accepted in ((["re:.*(up|down)_proj$"], True), (["re:.*up_proj$"], False)):
        recipe = FP8_DYNAMIC | of_group(targets=targets)
        path.write_text(json.dumps({"quantization_config": recipe}))
        if accepted:
            convert(tmp_path / "a", tmp_path / "b", "megamoe")
        else:
            refuse(tmp_path / "a", "megamoe", "expected one of .*down_proj", tmp_path)


def test_targets_that_are_many_names(tmp_path):
    """Recipes of several schemes may name every module; a refusal does not repeat them all."""
    checkpoint(tmp_path / "a", "compressed-tensors-fp8", "scales of channels")
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(3000)]
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps({"quantization_config": FP8_DYNAMIC | of_group(targets=names)}))
    with pytest.raises(ArgumentError, match="config_groups, targets is .*q_proj") as caught:
        convert(tmp_path / "a", tmp_path / "b", "megamoe")
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"fmt": "e4m3", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]}, None),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', expected 'dynamic'"),
        (
            {"weight_block_size": [64, 128]},
            r"weight_block_size is \[64, 128\], expected \[128, 128\]",
        ),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        (
            {"quant_method": "modelopt"},
            "quant_method is 'modelopt', expected 'fp8', for model.layers.0",
        ),
    ],
)
def test_the_recipe_of_blocks(tmp_path, changes, message):
    checkpoint(tmp_path / "a", "deepseek-fp8", "scales")
    config = {"quantization_config": DEEPSEEK | changes}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    if message is not None:
        refuse(tmp_path / "a", "megamoe", f"quantization_config.{message}", tmp_path)
        return
    convert(tmp_path / "a", tmp_path / "b", "megamoe")
    # Experts that are no FP8 have no recipe.
    checkpoint(tmp_path / "c", "hf-fused")
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "c" / "config.json")
    convert(tmp_path / "c", tmp_path / "d", "megamoe")


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (MXFP4, None),
        (
            {"quant_method": "quark"},
            "quant_method is 'quark', expected 'mxfp4', for model.layers.0",
        ),
        (MXFP4 | {"modules_to_not_convert": ["experts"]}, "modules_to_not_convert is 'experts'"),
    ],
)
def test_the_recipe_of_mxfp4(tmp_path, recipe, message):
    """Others have its names and other rows, such as e4m3."""
    checkpoint(tmp_path / "a", "gpt-oss-mxfp4", "mxfp4, biases")
    config = {"model_type": "gpt_oss", "quantization_config": recipe}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    if message is not None:
        refuse(tmp_path / "a", "megamoe", f"quantization_config.{message}", tmp_path)
        return
    convert(tmp_path / "a", tmp_path / "b", "megamoe")
    convert(tmp_path / "b", tmp_path / "c", "gpt-oss-mxfp4")


def test_rotated_rows_of_bf16(tmp_path):
    """Weights that no recipe quantizes may still be made for rows that it rotates."""
    checkpoint(tmp_path / "a", "hf-per-expert")
    transposed = {"config_groups": {"R4": {"type": "hadamard"}}}
    config = {"quantization_config": FP8_DYNAMIC | {"transform_config": transposed}}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    refuse(tmp_path / "a", "hf-fused", "transform_config is .*hadamard.*, expected none", tmp_path)


REFUSED = [  # content, source, target
    ("scales", "deepseek-fp8", "hf-fused", "to is hf-fused, .* scales of e4m3 weights of model.layers.0"),
    ("scales", "megamoe", "hf-per-expert", "scales of e4m3 weights .*: deepseek-fp8, minimax-fp8, .*megamoe"),
    ("biases", "gpt-oss", "hf-fused", "biases of model.layers.0.mlp.experts .*: hf-transposed, gpt-oss, .*megatron"),
    ("biases", "megatron", "mixtral", "biases"),
    ("no gate", "hf-fused", "hf-transposed", "experts without gates"),
    ("plain", "hf-fused", "gpt-oss", "to is gpt-oss, expected one without biases"),
    ("plain", "hf-fused", "deepseek-fp8", "to is deepseek-fp8, expected one without scales"),
    ("no gate", "hf-fused", "mixtral", "experts without gates"),
    ("mxfp4, biases", "gpt-oss-mxfp4", "gpt-oss", "MXFP4 numbers of .*: deepseek-mxfp4, gpt-oss-mxfp4, megamoe"),
    ("mxfp4, biases", "megamoe", "megatron", "MXFP4 numbers"),
    ("biases", "gpt-oss", "gpt-oss-mxfp4", "weights of model.layers.0.mlp.experts"),
    ("plain", "hf-fused", "fused", "to is 'fused', expected one of hf-fused, "),
]  # fmt: skip


@pytest.mark.parametrize(("content", "here", "there", "message"), REFUSED)
def test_no_place_in_the_target(tmp_path, made, content, here, there, message):
    refuse(made(here, content)[0], there, message, tmp_path)


def first(name):
    return f"{LAYERS[0]}experts.{name}"


def without(*names):
    return lambda tensors: [tensors.pop(first(name)) for name in names]


def changed(name, change):
    def apply(tensors):
        tensors[first(name)] = change(tensors[first(name)]).contiguous()

    return apply


def renamed(old, new):
    def apply(tensors):
        tensors[first(new)] = tensors.pop(first(old))

    return apply


def both_transposed(tensors):
    for name in ("gate_up_proj", "down_proj"):
        changed(name, lambda t: t.mT)(tensors)


def no_experts(tensors):
    for name in ("gate_up_proj", "down_proj"):
        changed(name, lambda t: t[:0])(tensors)


def added(name, tensor):
    return lambda tensors: tensors.update({LAYERS[0] + name: tensor})


BF16, FP8 = "hf-per-expert plain", "deepseek-fp8 scales"
EXPERT_1 = [f"1.{part}_proj.weight" for part in ("gate", "up", "down")]
BROKEN = [  # layout and content, what becomes of the tensors, what the error says
    (BF16, without(*EXPERT_1), "'model.layers.0.mlp.experts.1.gate_proj.weight' is missing"),
    (BF16, without("1.gate_proj.weight"), "1.gate_proj.weight' is missing, .* expert 1 of 3"),
    (BF16, without(*(f"{n}.gate_proj.weight" for n in (0, 2))), "0.gate_proj.weight' is missing"),
    ("hf-fused plain", without("down_proj"), "layout of model.layers.0.mlp.experts is .* BF16"),
    (FP8, without("2.up_proj.weight_scale_inv"), "2.up_proj.weight_scale_inv' is missing"),
    ("megamoe scales", without("w13_scale", "w2_scale"), "is F8_E4M3, expected BF16 or"),
    ("megamoe scales", without("w2_scale"), "experts.w2_scale' is missing, expected the scale in"),
    ("megatron biases", without("linear_fc2.bias0"), "linear_fc2.bias0' is missing"),
    ("mixtral plain", changed("2.w3.weight", lambda t: t[:-1]), r"2.w3.weight.shape is \[95, 160"),
    ("hf-fused plain", changed("gate_up_proj", lambda t: t.mT), r"shape is \[3, 160, 192\]"),
    ("hf-fused plain", both_transposed, r"\[3, 160, 192\].*expected hf-transposed of model_type"),
    ("gpt-oss biases", changed("down_proj", lambda t: t.mT), r"\[3, 160\], expected \[3, 96\]"),
    ("megamoe plain", changed("w13", lambda t: t.flatten(0, 1)), "w13.shape is"),
    ("megamoe plain", changed("w2", lambda t: t[0, 0, 0]), r"w2.shape is \[\]"),
    ("hf-fused plain", no_experts, "above 0"),
    (BF16, changed("1.up_proj.weight", torch.Tensor.float), "expected F32, as other experts"),
    (FP8, changed("0.up_proj.weight_scale_inv", torch.Tensor.double), "F64, expected F32"),
    (FP8, changed("0.up_proj.weight", torch.Tensor.bfloat16), "BF16, expected F8_E4M3"),
    (BF16, renamed("0.up_proj.weight", "0.up_proj.bias"), r"layout is .*experts.\*.up_proj.bias"),
    ("hf-fused plain", added("experts.gate_up_proj_bias", torch.ones(E, 192)), "is missing"),
    ("mixtral plain", renamed("0.w1.weight", "expert_0.fc1.weight"), r"expert_\*.fc1.weight BF16"),
    ("hf-fused plain", added("experts.w13", torch.ones(E, 192, H)), "layout of .*w13 F32"),
    ("megamoe plain", changed("w13", lambda t: t.view(torch.uint8)), "w13 U8 .*w2 BF16"),
    ("gpt-oss-mxfp4 mxfp4, biases", without("down_proj_scales"), "down_proj_scales' is missing"),
    ("gpt-oss-mxfp4 mxfp4, biases", without("down_proj_bias"), "down_proj_bias' is missing"),
    ("gpt-oss-mxfp4 mxfp4, biases", changed("down_proj_blocks", lambda t: t[..., :8]), "shape is"),
    ("megamoe mxfp4, biases", changed("w2", lambda t: t[..., :40]), r"w2.shape is \[3, 160, 40\]"),
    ("megamoe mxfp4, biases", changed("w13_scale", lambda t: t[:, :1]), "w13_scale.shape is"),
    ("megamoe plain", added("w13", torch.ones(E, 192, H)), "there beside"),
]


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_broken_sources(tmp_path, made, case):
    kind, change, message = BROKEN[case]
    tensors = dict(made(*kind.split(" ", 1))[1])
    change(tensors)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "gpt_oss"}')
    save(tmp_path / "a", tensors)
    refuse(tmp_path / "a", "megamoe", message, tmp_path)


def test_no_experts_at_all(tmp_path):
    (tmp_path / "a").mkdir()
    refuse(tmp_path / "a", "megamoe", r"expected a folder of \*.safetensors", tmp_path)
    refuse(tmp_path / "b", "megamoe", "expected a folder", tmp_path)
    save(tmp_path / "a", OTHERS)
    refuse(tmp_path / "a", "megamoe", "embed_tokens.weight F32 .*, expected tensors of", tmp_path)


@pytest.mark.parametrize(
    "config", [{"num_experts": 4}, {"text_config": {"n_routed_experts": 4}, "num_experts": None}]
)
def test_the_last_experts_are_missed(tmp_path, made, config):
    shutil.copytree(made("hf-per-expert", "plain")[0], tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    message = (
        "number of experts of model.layers.0.mlp.experts .* is 3, expected 4, .*n.*_experts of"
    )
    refuse(tmp_path / "a", "megamoe", message, tmp_path)


def test_gpt_oss_has_to_be_said(tmp_path):
    """The same names and shapes, rows of gate and up not alternating, are other models'."""
    before = checkpoint(tmp_path / "a", "gpt-oss", "biases")
    expected = "openai_privacy_filter or gpt-oss of model_type gpt_oss in config.json"
    for text in ('{"model_type": "gpt_oss_2"}', '{"model_type": ["gpt_oss"]}', "{}"):
        (tmp_path / "a" / "config.json").write_text(text)
        refuse(tmp_path / "a", "megamoe", expected, tmp_path)
    (tmp_path / "a" / "config.json").unlink()
    refuse(tmp_path / "a", "megamoe", expected, tmp_path)
    convert(tmp_path / "a", tmp_path / "b", "megamoe", source_layout="gpt-oss")
    convert(tmp_path / "b", tmp_path / "c", "gpt-oss")
    assert_same(load(tmp_path / "c"), before)
    options = {"source_layout": "hf-fused"}
    refuse(tmp_path / "a", "megamoe", "layout of .* expected hf-fused", tmp_path, **options)
    (tmp_path / "a" / "config.json").write_text("[]")
    refuse(tmp_path / "a", "megamoe", "config.json is a list, expected a JSON object", tmp_path)


def halves_exchanged(t):
    return torch.cat(t.chunk(2, -1)[::-1], -1)


def in_turn(t):
    return torch.stack(t.chunk(2, -1), -1).flatten(-2)


FAULTS = {  # intermediate size, what becomes of a tensor
    "gate is up": (96, "gate_up_proj", halves_exchanged),
    "in turn": (96, "gate_up_proj", in_turn),
    "square, as it is": (H // 2, "gate_up_proj", lambda t: t.mT),
    "square down, as it is": (H, "down_proj", lambda t: t.mT),
}


@pytest.mark.parametrize(
    ("model_type", "fault"),
    [("qwen3_vl_moe", None), *(("llama4", fault) for fault in [None, *FAULTS])],
)
def test_transposed_experts(tmp_path, monkeypatch, model_type, fault):
    """Llama 4's, and Qwen3-VL-MoE's, whose newer files are not transposed: shapes say it where one matrix is square."""
    for inner in (96, H // 2, H) if fault is None else FAULTS[fault][:1]:
        monkeypatch.setattr(sys.modules[__name__], "INNER", inner)
        expected = checkpoint(tmp_path / f"ours {inner}", "megamoe")
        for layout in ("hf-transposed", "hf-fused"):
            a, b = (tmp_path / f"{name} {layout} {inner}" for name in "ab")
            tensors = checkpoint(a, layout)
            if fault is not None:
                _, name, change = FAULTS[fault]
                tensors[first(name)] = change(tensors[first(name)])
            save(a, {n: t.contiguous() for n, t in tensors.items()})
            (a / "config.json").write_text(json.dumps({"model_type": model_type}))
            lines = convert(a, b, "megamoe")
            assert [layout in line for line in lines] == [True, True]
            found = load(b)
            pairs = [(found[first(w)], expected[first(w)]) for w in ("w13", "w2")]
            same = [torch.equal(*(t.view(torch.int16) for t in pair)) for pair in pairs]
            assert all(same) == (fault is None)
            convert(b, tmp_path / f"c {layout} {inner}", layout)
            assert_same(load(tmp_path / f"c {layout} {inner}"), tensors)


def test_transposed_experts_have_to_be_said(tmp_path):
    """Shapes do not say that columns of gate and up are not in turn."""
    before = checkpoint(tmp_path / "a", "hf-transposed")
    for text in ('{"model_type": "gpt_oss"}', '{"text_config": {"model_type": "llama4"}}', "{}"):
        (tmp_path / "a" / "config.json").write_text(text)
        message = "expected hf-transposed of model_type llama4, llama4_text, qwen3_vl_moe"
        refuse(tmp_path / "a", "megamoe", message, tmp_path)
    convert(tmp_path / "a", tmp_path / "b", "hf-fused", source_layout="hf-transposed")
    convert(tmp_path / "b", tmp_path / "c", "hf-transposed")
    assert_same(load(tmp_path / "c"), before)
    for folder, layout in (("a", "hf-fused"), ("b", "hf-transposed")):
        options = {"source_layout": layout}
        refuse(tmp_path / folder, "megamoe", rf"shape is .*\({layout}\)", tmp_path, **options)
    refuse(tmp_path / "a", "megamoe", "expected gpt-oss", tmp_path, source_layout="gpt-oss")


def indexed(folder, change=lambda files_of: files_of):
    files_of = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            files_of |= dict.fromkeys(file.keys(), path.name)
    (folder / files.INDEX).write_text(json.dumps({"weight_map": change(files_of)}))


def test_a_folder_of_links_and_what_is_beside(tmp_path, made):
    """As the hub's cache has it: files are links to others elsewhere."""
    folder, _ = made("hf-per-expert", "plain")
    a = tmp_path / "a"
    a.mkdir()
    for path in folder.iterdir():
        (a / path.name).symlink_to(path)
    indexed(a)
    for name in ("tokenizer.model", "pytorch_model.bin.index.json", "other.bin", "chat.jinja"):
        (a / name).write_text(name)
    (a / "folder.json").mkdir()
    convert(a, tmp_path / "b", "hf-fused")
    assert_same(load(tmp_path / "b"), made("hf-fused", "plain")[1])
    beside = {p.name for p in (tmp_path / "b").iterdir() if p.suffix != ".safetensors"}
    assert beside == {"chat.jinja", "config.json", "tokenizer.model", files.INDEX}
    assert not any(p.is_symlink() for p in (tmp_path / "b").iterdir())


HOSTILE = {
    "../a/part0.safetensors": r"weight_map\['flag'\] is '../a/part0.safetensors', expected the bare name",
    "/etc/x.safetensors": "expected the bare name",
    "..\\x.safetensors": "expected the bare name",
    "config.json": "expected the bare name",
    "gone.safetensors": "gone.safetensors is unreadable",
}


@pytest.mark.parametrize("file", HOSTILE)
def test_an_index_names_files_of_its_folder(tmp_path, file):
    checkpoint(tmp_path / "a", "hf-fused", shards=2)
    indexed(tmp_path / "a", lambda files_of: files_of | {"flag": file})
    refuse(tmp_path / "a", "megamoe", HOSTILE[file], tmp_path)


def test_index_and_files_agree(tmp_path):
    a = tmp_path / "a"
    checkpoint(a, "hf-fused", shards=2)
    indexed(a, lambda files_of: {n: f for n, f in files_of.items() if n != "flag"})
    refuse(a, "megamoe", "'flag' is in a file of the index, not named by it", tmp_path)
    indexed(a, lambda files_of: files_of | {"more": "part0.safetensors"})
    refuse(a, "megamoe", "'more' is named by the index, in none", tmp_path)
    for text in ("{", "[]", '{"weight_map": 3}'):
        (a / files.INDEX).write_text(text)
        refuse(a, "megamoe", "index.json is unreadable", tmp_path)
    (a / files.INDEX).unlink()
    shutil.copyfile(a / "part0.safetensors", a / "model-00002-of-00003.safetensors")
    refuse(a, "megamoe", "model-00001-of-00003.safetensors is missing", tmp_path)
    shutil.copyfile(a / "part0.safetensors", a / "model-00001-of-00003.safetensors")
    refuse(a, "megamoe", "model-00003-of-00003.safetensors is missing", tmp_path)
    for number in (1, 2):
        (a / f"model-0000{number}-of-00003.safetensors").unlink()
    shutil.copyfile(a / "part0.safetensors", a / "again.safetensors")
    refuse(a, "megamoe", "in two files", tmp_path)
    indexed(
        a, lambda files_of: files_of
    )  # names one of them: the other is no part of the checkpoint
    index = json.loads((a / files.INDEX).read_text())["weight_map"]
    index = {n: f.replace("again", "part0") for n, f in index.items()}
    (a / files.INDEX).write_text(json.dumps({"weight_map": index}))
    convert(a, tmp_path / "b", "megamoe")
    whole = (a / "part1.safetensors").read_bytes()
    (a / "part1.safetensors").write_bytes(whole[:-1])
    refuse(a, "megamoe", "part1.safetensors is unreadable", tmp_path)


def test_a_target_is_whole_or_not_there(tmp_path, monkeypatch):
    a, target = tmp_path / "a", tmp_path / "target"
    checkpoint(a, "hf-fused")
    target.mkdir()
    with pytest.raises(ArgumentError, match="target, expected a folder that does not exist yet"):
        convert(a, target, "megamoe")
    target.rmdir()
    refuse(a, "megamoe", "shard_bytes is 0", tmp_path, shard_bytes=0)
    as_bytes, left = files._bytes, []

    def failing(piece):
        left.append([p.name for p in tmp_path.iterdir()])
        if len(left) == 4:
            raise KeyboardInterrupt
        return as_bytes(piece)

    monkeypatch.setattr(files, "_bytes", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(a, target, "megamoe")
    assert all(any("unfinished" in name for name in names) for names in left)
    assert not any("target" in names for names in left)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 9))
    refuse(a, "megamoe", "where 9 bytes are free", tmp_path)


def test_names_that_would_meet(tmp_path):
    tensors = checkpoint(tmp_path / "a", "hf-fused")
    tensors["x.w13"], tensors["x.w2"] = tensors[first("gate_up_proj")], tensors[first("down_proj")]
    tensors["x.experts.w13"] = tensors["x.w13"]
    save(tmp_path / "a", tensors)
    refuse(tmp_path / "a", "megatron", "there beside", tmp_path)


@pytest.mark.parametrize("tqdm", [True, False])
def test_command(tmp_path, capsys, monkeypatch, tqdm):
    if not tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    checkpoint(tmp_path / "a", "hf-per-expert")
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--to", "megamoe"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "model.layers.11.mlp.experts (hf-per-expert): 3 experts, hidden 160" in said
    assert main(arguments) == 1
    assert "megamoe.checkpoints: target is" in capsys.readouterr().err


def test_the_page(tmp_path, monkeypatch):
    """Its table names all layouts, its command runs, and its program loads what that wrote, in FP8, too."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "adapters.md").read_text()
    page = page[page.index("## Checkpoints in other layouts") :]
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(LAYOUTS)
    (command,) = re.findall(r"^python -m megamoe\.checkpoints (.*)$", page, re.MULTILINE)
    (program,) = programs("docs/adapters.md", "checkpoints")
    source, target, *options = command.split()
    sizes = {"hidden": H, "intermediate": INNER, "num_experts": E, "top_k": 2}
    for content, layout, precision in (
        ("plain", "hf-per-expert", "bf16"),
        ("scales", "deepseek-fp8", "fp8"),
        ("scales of channels", "compressed-tensors-fp8", "fp8_channel"),
        ("mxfp4, biases", "gpt-oss-mxfp4", "bf16xmxfp4"),
    ):
        (tmp_path / content).mkdir()
        monkeypatch.chdir(tmp_path / content)
        experts = checkpoint(Path(source), layout, content)
        assert main([source, target, *options]) == 0
        kind = {"precision": precision, "bias": "biases" in content}
        kind |= sizes | {"backend": "staged"}
        names = {}
        assert "(2048, 768, 128, 8, " in program
        small = program.replace("(2048, 768, 128, 8, ", f"(**{kind}, group=")
        exec(compile(small, "adapters.md", "exec"), names)
        layer = names["layer"]
        for n in range(E):
            if "mxfp4" in content:
                up = experts[f"{LAYERS[0]}experts.gate_up_proj_blocks"][n, 1::2].flatten(1)
            else:
                up = experts[f"{LAYERS[0]}experts.{n}.up_proj.weight"]
            assert_same({"up": layer.w13[n, INNER:].detach()}, {"up": up})


def granite(experts):
    made = {
        "input_linear.weight": torch.stack([joined(e["weight"], "gate", "up") for e in experts]),
        "output_linear.weight": torch.stack([e["weight"]["down"] for e in experts]),
    }
    return {f"model.layers.1.block_sparse_moe.{name}": t for name, t in made.items()}


def step3(experts):
    return {
        f"model.layers.1.moe.{part}_proj.weight": torch.stack([e["weight"][part] for e in experts])
        for part in ("gate", "up", "down")
    }


def deepseek_mxfp4(experts):
    found = {}
    for n, expert in enumerate(experts):
        for part, name in zip(("gate", "up", "down"), MIXTRAL.split(), strict=True):
            place = f"layers.1.ffn.experts.{n}.{name}"
            found[f"{place}.weight"] = expert["codes"][part].view(torch.int8)
            found[f"{place}.scale"] = expert["powers"][part].view(torch.float8_e8m0fnu)
    return found


@pytest.mark.parametrize(
    ("layout", "make", "content", "others", "config"),
    [
        ("granite", granite, "plain", {"model.layers.0.mlp.input_linear.weight": (6, 4)}, {}),
        ("step3", step3, "plain", {"model.layers.0.moe.gate_proj.weight": (6, 4)}, {}),
        ("deepseek-mxfp4", deepseek_mxfp4, "mxfp4", {}, {"quantization_config": {"quant_method": "fp8"}}),
    ],
)  # fmt: skip
def test_names_of_their_own(tmp_path, layout, make, content, others, config):
    """To ours and back: the same names, types and bits. A dense module of such a name is not experts."""
    experts = [parts_of(content) for _ in range(E)]
    tensors = make(experts) | {name: noise(*shape) for name, shape in others.items()}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    assert f"({layout}): {E} experts" in convert(tmp_path / "a", tmp_path / "b", "megamoe")[0]
    ours = load(tmp_path / "b")
    kind = "codes" if content == "mxfp4" else "weight"
    w13 = next(t for name, t in ours.items() if name.endswith("experts.w13"))
    expected = torch.stack([joined(e[kind], "gate", "up") for e in experts])
    assert torch.equal(w13.view(torch.uint8), expected.view(torch.uint8))
    convert(tmp_path / "b", tmp_path / "c", layout)
    back = load(tmp_path / "c")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_layout_behind_a_name_is_not_written_elsewhere(tmp_path):
    checkpoint(tmp_path / "a", "hf-fused")
    refuse(tmp_path / "a", "granite", "to is granite, expected one with a place for", tmp_path)
