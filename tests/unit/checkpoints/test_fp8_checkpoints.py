"""FP8 experts as they are published: what is read stands for the numbers that the format's own formula gives."""

import copy
import json
from itertools import product

import pytest
import torch

from megamoe.core.errors import ArgumentError

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

import megamoe  # noqa: E402
from megamoe import Problem  # noqa: E402
from megamoe.checkpoints import convert  # noqa: E402
from megamoe.checkpoints.__main__ import main  # noqa: E402

H, INNER, E = 160, 320, 3  # two and three blocks of 128, the last ones ragged
MOE = "language_model.model.layers.3.block_sparse_moe."
HF, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SIZES = ((INNER, H), (INNER, H), (H, INNER))

E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = E4M3 | {"strategy": "token", "dynamic": True}
GROUP = E4M3 | {"strategy": "group", "group_size": 128, "dynamic": True, "observer": None}
STATIC = E4M3 | {"strategy": "tensor", "dynamic": False}
OF_TENSOR = STATIC | {"block_structure": None, "group_size": None}
OF_CHANNEL = OF_TENSOR | {"strategy": "channel"}
OF_BLOCK = OF_TENSOR | {"strategy": "block", "block_structure": [128, 128]}


def compressed(weights, rows, **changes):
    """What llm-compressor writes, of a model of text and vision."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*visual.*", "vision_tower.layers.0.fc1"],
        "config_groups": {"group_0": group | {"output_activations": None}},
        "transform_config": {},
    } | changes


MINIMAX = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
VISION = MINIMAX | {
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.visual.merger.linear_fc1", "mlp.gate"],
}
AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
BLOCKS, CHANNELS, ALIKE = (128, 128), (1, 10**6), (10**6, 10**6)  # rows and columns of a scale
PUBLISHED = {  # layout, projections, numbers of a scale, its name and type, recipe
    "MiniMax-M2": ("minimax-fp8", MIXTRAL, BLOCKS, "scale_inv", torch.float32, MINIMAX),
    "Qwen3-VL": ("deepseek-fp8", HF, BLOCKS, "scale_inv", torch.bfloat16, VISION),
    "FP8_BLOCK": (
        *("compressed-tensors-fp8-block", HF, BLOCKS, "scale", torch.bfloat16),
        compressed(OF_BLOCK, GROUP),
    ),
    "FP8_BLOCK of w1": (
        *("mixtral-fp8-block", MIXTRAL, BLOCKS, "scale", torch.float32),
        compressed(OF_BLOCK, GROUP),
    ),
    "FP8_DYNAMIC of w1": (
        *("mixtral-fp8", MIXTRAL, CHANNELS, "scale", torch.bfloat16),
        compressed(OF_CHANNEL, TOKEN),
    ),
    "FP8": ("tensor-fp8", HF, ALIKE, "scale", torch.bfloat16, compressed(OF_TENSOR, STATIC)),
    "AutoFP8": ("mixtral-tensor-fp8", MIXTRAL, ALIKE, "scale", torch.float32, AUTO),
    "ModelOpt": ("mixtral-tensor-fp8", MIXTRAL, ALIKE, "scale", torch.float32, MODELOPT),
}


def published(case):
    """Return a release's tensors, what they stand for in fp64 by part and expert, and its config.json."""
    layout, names, (rows, columns), end, dtype, recipe = PUBLISHED[case]
    torch.manual_seed(0)
    tensors, numbers = {f"{MOE}gate.weight": torch.ones(E, H)}, {}
    for n in range(E):
        for part, (name, (height, width)) in enumerate(zip(names, SIZES, strict=True)):
            grid = -(-height // rows), -(-width // columns)
            scale = (torch.rand(grid) * 0.01 + 1e-3).to(dtype)
            codes = (torch.randn(height, width) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            of_row, of_column = (
                torch.arange(k) // b for k, b in ((height, rows), (width, columns))
            )
            numbers[part, n] = codes.double() * scale.double()[of_row][:, of_column]
            if rows > 128:  # one of a matrix: [] of AutoFP8 and ModelOpt, [1] of compressed-tensors
                scale = scale.reshape([1] if case == "FP8" else [])
                tensors[f"{MOE}experts.{n}.{name}.input_scale"] = torch.rand(scale.shape) + n
            tensors[f"{MOE}experts.{n}.{name}.weight"] = codes
            tensors[f"{MOE}experts.{n}.{name}.weight_{end}"] = scale
    config = {"text_config": {"num_local_experts": E}, "vision_config": {"depth": 2}}
    inside = config["text_config"] if case == "FP8_BLOCK" else config
    inside["quantization_config"] = copy.deepcopy(recipe)
    return tensors, numbers, config


def write(folder, tensors, config):
    folder.mkdir()
    names = list(tensors)
    for shard in range(2):
        save_file({n: tensors[n] for n in names[shard::2]}, folder / f"{shard}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def read(tmp_path, case, tensors, config, **options):
    """Return what a layer has in fp32 of a converted release: gate, up and down of all experts."""
    write(tmp_path / "a", tensors, config)
    (line,) = convert(tmp_path / "a", tmp_path / "b", "megamoe", **options)
    assert f"({PUBLISHED[case][0]}): {E} experts" in line
    state = {}
    for file in (tmp_path / "b").glob("*.safetensors"):
        state |= {n.removeprefix(f"{MOE}experts."): t for n, t in load_file(file).items()}
    del state[f"{MOE}gate.weight"]
    precision = "fp8" if PUBLISHED[case][2] == BLOCKS else "fp8_channel"
    layer = megamoe.MegaMoE(H, INNER, E, 2, precision=precision, backend="staged")
    layer.load_state_dict(state)
    problem = Problem(H, INNER, E, 2, precision=precision)
    dense = layer.expert_weights().dense(problem, torch.float32)
    return dense.w13[:, :INNER], dense.w13[:, INNER:], dense.w2


def agree(found, numbers):
    """Whether each number is the format's, rounded to fp32 once."""
    places = ((p, n) for p in range(3) for n in range(E))
    return all(torch.equal(found[p][n], numbers[p, n].float()) for p, n in places)


def of_other_rows(tensors, names, end):
    name = f"{MOE}experts.1.{names[1]}.weight_{end}"
    tensors[name] = tensors[name].roll(1, 0) if tensors[name].ndim == 2 else tensors[name] * 2


def exchanged(tensors, names, end):
    for kind in ("weight", f"weight_{end}"):
        one, other = (f"{MOE}experts.2.{name}.{kind}" for name in names[:2])
        tensors[one], tensors[other] = tensors[other], tensors[one]


def of_another_expert(tensors, names, end):
    one, other = (f"{MOE}experts.{n}.{names[2]}.weight_{end}" for n in (0, 2))
    tensors[one], tensors[other] = tensors[other], tensors[one]


def inverse(tensors, names, end):
    for name in [n for n in tensors if n.endswith(f"weight_{end}")]:
        tensors[name] = 1 / tensors[name]


FAULTS = [of_other_rows, exchanged, of_another_expert, inverse]
WITH_FAULTS = (
    "MiniMax-M2",
    "FP8_DYNAMIC of w1",
    "FP8",
)  # scales of blocks, of channels and of matrices


@pytest.mark.parametrize(
    ("case", "fault"),
    [*((case, None) for case in PUBLISHED), *product(WITH_FAULTS, FAULTS)],
)
def test_the_formats_own_numbers(tmp_path, case, fault):
    tensors, numbers, config = published(case)
    if fault is not None:
        fault(tensors, PUBLISHED[case][1], PUBLISHED[case][3])
    found = read(tmp_path, case, tensors, config, dynamic_activations=PUBLISHED[case][2] is ALIKE)
    assert agree(found, numbers) == (fault is None)


def refuse(tmp_path, message, tensors, config, to="megamoe", **options):
    write(tmp_path / "a", tensors, config)
    with pytest.raises(ArgumentError, match=message):
        convert(tmp_path / "a", tmp_path / "b", to, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


ONLY_ROWS = "input_scale' is 'there', expected no calibrated one, or dynamic_activations"


@pytest.mark.parametrize("case", ["FP8", "AutoFP8", "ModelOpt"])
def test_calibrated_rows_have_to_be_said(tmp_path, case):
    """A layer's rows have scales of their own: never without a word of the user, whatever of it is left to see."""
    tensors, _, config = published(case)
    refuse(tmp_path / "1", ONLY_ROWS, tensors, config)
    refuse(tmp_path / "2", ONLY_ROWS, tensors, {})
    without = {n: t for n, t in tensors.items() if not n.endswith("input_scale")}
    said = "activation_scheme is 'static'|input_activations is .*'tensor'|quant_algo is 'FP8'"
    refuse(tmp_path / "3", said, without, config)
    lacking = {n: t for n, t in tensors.items() if n != f"{MOE}experts.1.w2.input_scale"}
    if lacking.keys() != tensors.keys():
        refuse(
            tmp_path / "4", "w2.input_scale' is missing", lacking, config, dynamic_activations=True
        )


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for n in range(1, 9):
        (tmp_path / str(n)).mkdir()


def test_dynamic_rows_of_matrices_with_one_scale(tmp_path):
    """AutoFP8 without calibration; and compressed-tensors' with a scale for each token, or, said, for all of them."""
    tensors, numbers, config = published("AutoFP8")
    tensors = {n: t for n, t in tensors.items() if not n.endswith("input_scale")}
    config["quantization_config"] = AUTO | {"activation_scheme": "dynamic"}
    assert agree(read(tmp_path / "1", "AutoFP8", tensors, config), numbers)
    config["quantization_config"] = compressed(OF_TENSOR, TOKEN)
    assert agree(read(tmp_path / "2", "AutoFP8", tensors, config), numbers)
    config["quantization_config"] = compressed(OF_TENSOR, STATIC | {"dynamic": True})
    refuse(tmp_path / "3", "input_activations is .*'tensor'", tensors, config)
    assert agree(
        read(tmp_path / "4", "AutoFP8", tensors, config, dynamic_activations=True), numbers
    )
    config["quantization_config"] = compressed(OF_TENSOR, None)  # W8A16
    refuse(tmp_path / "5", "input_activations is None", tensors, config, dynamic_activations=True)
    config["quantization_config"] = AUTO | {"weight_block_size": [128, 128]}
    refuse(tmp_path / "6", "weight_block_size is", tensors, config, dynamic_activations=True)
    config["quantization_config"] = MODELOPT | {"quant_algo": "MIXED_PRECISION"}
    refuse(tmp_path / "7", "quant_algo is 'MIXED", tensors, config, dynamic_activations=True)


def test_the_command_says_dynamic_activations(tmp_path, capsys):
    tensors, _, config = published("AutoFP8")
    write(tmp_path / "a", tensors, config)
    command = [str(tmp_path / "a"), str(tmp_path / "b"), "--to", "megamoe"]
    assert main(command) == 1
    assert "or dynamic_activations (--dynamic-activations)" in capsys.readouterr().err
    assert main([*command, "--dynamic-activations"]) == 0
    kept = {n for path in (tmp_path / "b").glob("*.safetensors") for n in load_file(path)}
    assert kept == {f"{MOE}gate.weight"} | {
        f"{MOE}experts.{n}" for n in ("w13", "w2", "w13_scale", "w2_scale")
    }


def test_dynamic_activations_is_of_matrices_with_one_scale(tmp_path):
    """Others were not made for one scale of all tokens: there it would hide a fault."""
    recipes = {"FP8_BLOCK of w1": OF_BLOCK, "FP8_DYNAMIC of w1": OF_CHANNEL}
    for n, (case, weights) in enumerate(recipes.items(), 1):
        tensors, _, config = published(case)
        config["quantization_config"] = compressed(weights, STATIC)
        refuse(
            tmp_path / str(n),
            "activations is .*'tensor'",
            tensors,
            config,
            dynamic_activations=True,
        )


TARGETS = [  # release, target, what the error says: the recipe stays beside what is written
    ("MiniMax-M2", "mixtral-fp8-block", "quant_method is 'fp8', expected 'compressed-tensors'"),
    (
        "FP8_BLOCK",
        "deepseek-fp8",
        "quant_method is 'compressed-tensors', expected 'fp8', .* as deepseek-fp8",
    ),
    ("FP8", "compressed-tensors-fp8", "weights is .*'tensor'.* as compressed-tensors-fp8"),
    ("AutoFP8", "mixtral-fp8", "quant_method is 'fp8', expected 'compressed-tensors'"),
    ("AutoFP8", "tensor-fp8", "to is tensor-fp8, expected one with a scale of each row"),
    ("MiniMax-M2", "mixtral-fp8", "quant_method is 'fp8'"),
]


@pytest.mark.parametrize(("case", "to", "message"), TARGETS)
def test_a_target_that_the_recipe_is_wrong_for(tmp_path, case, to, message):
    tensors, _, config = published(case)
    dynamic_activations = PUBLISHED[case][2] is ALIKE
    refuse(tmp_path / "1", message, tensors, config, to, dynamic_activations=dynamic_activations)


def test_names_of_mixtral_in_recipes(tmp_path):
    """Patterns are held against the names that the checkpoint has, not against those of other models."""
    tensors, _, config = published("FP8_DYNAMIC of w1")
    recipe = config["quantization_config"]
    recipe["config_groups"]["group_1"] = {
        "targets": [r"re:.*experts\.\d+\.w2$"],
        "weights": OF_CHANNEL,
    }
    refuse(tmp_path / "1", "group_1.input_activations is None", tensors, config)
    del recipe["config_groups"]["group_1"]
    recipe["ignore"] = ["re:.*w3"]
    refuse(tmp_path / "2", "ignore is 're:.*w3'", tensors, config)
    recipe["ignore"] = ["re:.*gate_proj"]  # of a shared expert
    read(tmp_path / "3", "FP8_DYNAMIC of w1", tensors, config)


GATE_UP_DOWN = r"mlp\.experts\.[0-9]+\.(gate|up|down)_proj$"
W8A16 = {"weights": OF_CHANNEL, "input_activations": None}
NAMED = [  # what a group of a scheme that is no layer's names, and whether that is experts of MOE
    (rf"re:.*{GATE_UP_DOWN}", True),  # llm-compressor's names of Mixtral's experts
    (rf"re:model\.language_model\.layers\.3\.{GATE_UP_DOWN}", True),
    ("model.language_model.layers.3.block_sparse_moe.experts.1.w3", True),
    ("model.language_model.layers.3.mlp.experts.1.up_proj", True),
    (rf"re:.*\.layers\.4\.{GATE_UP_DOWN}", False),
    ("re:.*vision_model.*", False),
    (r"re:.*shared_experts\..*", False),
    ("model.layers.4.mlp.experts.1.up_proj", False),
]


@pytest.mark.parametrize(("target", "experts"), NAMED)
@pytest.mark.parametrize("first", [True, False])
def test_recipes_with_names_of_another_tree(tmp_path, target, experts, first):
    """Where a checkpoint was renamed as it was saved, a scheme of its class would be taken for the experts' own."""
    tensors, _, config = published("FP8_DYNAMIC of w1")
    groups = config["quantization_config"]["config_groups"]
    other = groups["a" if first else "z"] = W8A16 | {"targets": [target]}
    if not experts:
        read(tmp_path / "1", "FP8_DYNAMIC of w1", tensors, config)
        return
    refuse(tmp_path / "1", "[az].input_activations is None", tensors, config)
    # And the other way: all experts are named, and the class is another's.
    if target.startswith("re:"):
        groups["group_0"]["targets"], other["targets"] = [target], ["Linear"]
        read(tmp_path / "2", "FP8_DYNAMIC of w1", tensors, config)
        # Who has one of the names takes one scheme, who has another the other.
        groups["group_0"]["targets"], other["targets"] = [r"re:.*experts\.\d+\.w\d$"], [target]
        refuse(tmp_path / "3", "[az].input_activations is None", tensors, config)


@pytest.mark.parametrize(
    ("skipped", "refused"),
    [
        ("model.visual", False),
        ("gate", False),
        (f"{MOE}gate", False),
        ("experts", True),
        ("language_model", True),
        (f"{MOE}experts.1.w3", True),
        (f"{MOE}experts.1", True),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
def test_e4m3_experts_that_are_said_to_be_none(tmp_path, key, skipped, refused):
    for n, case in enumerate(("MiniMax-M2", "Qwen3-VL"), 1):
        tensors, _, config = published(case)
        config["quantization_config"] = MINIMAX | {key: [skipped]}
        if refused and (n == 1 or not skipped.endswith("w3")):
            refuse(tmp_path / str(n), f"{key} is '{skipped}'", tensors, config)
        else:  # "gate" is no part of gate_proj
            read(tmp_path / str(n), case, tensors, config)


def test_a_recipe_of_modelopt_beside(tmp_path):
    """Older checkpoints of ModelOpt have no quantization_config in config.json."""
    tensors, _, config = published("MiniMax-M2")
    del config["quantization_config"]
    write(tmp_path / "a", tensors, config)
    path = tmp_path / "a" / "hf_quant_config.json"
    for said in ({"quant_algo": "FP8_PB_WO"}, {"quant_algo": None}, 3):
        path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
        with pytest.raises(ArgumentError, match="hf_quant_config.json: quantization"):
            convert(tmp_path / "a", tmp_path / "b", "megamoe")
    path.unlink()
    convert(tmp_path / "a", tmp_path / "b", "megamoe")


TOWERS = [  # where experts are, and whether that is in the vision tower, or may be
    ("model.language_model.layers.3.mlp.", False),
    ("language_model.model.layers.3.feed_forward.", False),
    ("model.visual.blocks.3.mlp.", True),
    ("vision_tower.encoder.layers.3.mlp.", True),
    ("vpm.vision_model.layers.3.mlp.", True),
    ("model.layers.3.mlp.vision_moe.", True),
]


@pytest.mark.parametrize(("prefix", "vision"), TOWERS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_recipe_of_the_vision_tower_alone(tmp_path, prefix, vision, transposed):
    """It says nothing of the language model's experts; a part of any other name does, and the whole does."""
    tensors, _, config = published("Qwen3-VL")
    tensors = {name.replace(MOE, prefix): tensor for name, tensor in tensors.items()}
    other = compressed(OF_CHANNEL, None)
    key, message = "quantization_config", "quant_method is 'compressed-tensors', expected 'fp8'"
    if transposed:
        other["transform_config"] = {"config_groups": {"R4": {"type": "hadamard"}}}
        message = "transform_config is .*hadamard"
    said = {"vision_config": {key: other}}
    nested = {"thinker_config": {"vision_config": {"backbone": {key: other}}}}
    for n, parts in enumerate((said, nested), 1):
        if vision:
            refuse(tmp_path / str(n), rf"vision_config.*\.{key}.{message}", tensors, config | parts)
        else:
            write(tmp_path / str(n) / "a", tensors, config | parts)
            convert(tmp_path / str(n) / "a", tmp_path / str(n) / "b", "megamoe")
    for n, parts in enumerate(({"vision": {key: other}}, {key: other}), 3):
        refuse(tmp_path / str(n), f"{key}.{message}", tensors, config | parts)


def shaped(part, change):
    def apply(tensors, name):
        tensors[name(part)] = change(tensors[name(part)]).contiguous()

    return apply


HOSTILE = {  # release, what becomes of its tensors, what the error says
    "a scale of blocks among those of channels": (
        "FP8_DYNAMIC of w1",
        shaped("1.w3.weight_scale", lambda t: t[:3, :].repeat(1, 2)),
        "layout of .*experts is .*weight_scale",
    ),
    "a scale of a matrix among those of blocks": (
        "FP8_BLOCK of w1",
        shaped("1.w3.weight_scale", lambda t: t[:1, 0]),
        "layout of .*experts is .*weight_scale",
    ),
    "a scale of channels without a second dimension": (
        "FP8_DYNAMIC of w1",
        shaped("1.w3.weight_scale", lambda t: t[:, 0]),
        "layout of .*experts is ",
    ),
    "blocks that lie the other way": (
        "MiniMax-M2",
        shaped("0.w1.weight_scale_inv", lambda t: t.T),
        r"w1.weight_scale_inv.shape is \[2, 3\], expected \[3, 2\]",
    ),
    "no scale of one matrix": (
        "FP8_BLOCK",
        lambda tensors, name: tensors.pop(name("2.down_proj.weight_scale")),
        "2.down_proj.weight_scale' is missing",
    ),
    "no scale of one matrix, one scale each": (
        "AutoFP8",
        lambda tensors, name: tensors.pop(name("2.w2.weight_scale")),
        "2.w2.weight_scale' is missing",
    ),
    "no scales at all": (
        "MiniMax-M2",
        lambda tensors, name: [
            tensors.pop(key) for key in list(tensors) if key.endswith("_scale_inv")
        ],
        "dtype is F8_E4M3, expected BF16",
    ),
    "scales of both names": (
        "MiniMax-M2",
        lambda tensors, name: tensors.update({name("0.w1.weight_scale"): torch.ones(3, 2)}),
        "layout of .*experts is ",
    ),
    "zero points": (
        "FP8_BLOCK",
        lambda tensors, name: tensors.update(
            {name("0.up_proj.weight_zero_point"): torch.ones(3, 2)}
        ),
        "up_proj.weight_zero_point F32",
    ),
    "one expert of other numbers": (
        "MiniMax-M2",
        shaped("1.w3.weight", lambda t: t.view(torch.uint8)),
        "w3.weight U8",
    ),
    "scales that are powers": (
        "MiniMax-M2",
        shaped("1.w3.weight_scale_inv", lambda t: t.to(torch.float8_e8m0fnu)),
        "F8_E8M0, expected F32",
    ),
    "names of two models": (
        "MiniMax-M2",
        lambda tensors, name: tensors.update(
            {name("1.up_proj.weight"): tensors.pop(name("1.w3.weight"))}
        ),
        "layout of .*experts is ",
    ),
    "the last expert is nowhere": (
        "MiniMax-M2",
        lambda tensors, name: [
            tensors.pop(key) for key in list(tensors) if key.startswith(name("2."))
        ],
        "is 2, expected 3, text_config.num_local_experts",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_would_be_read_wrong(tmp_path, what):
    case, change, message = HOSTILE[what]
    tensors, _, config = published(case)
    change(tensors, lambda name: f"{MOE}experts.{name}")
    refuse(tmp_path / "1", message, tensors, config, dynamic_activations=True)
