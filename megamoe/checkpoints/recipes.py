"""What config.json says of FP8 experts: names and shapes of tensors do not say how the rows beside them are rounded.

A layer multiplies e4m3 weights with rows that it quantizes as they come (docs/numerics.md). Weights that were made for
other rows, such as bf16 or those of a scale that was calibrated, would be multiplied in silence with other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megamoe.checkpoints.experts import Experts
from megamoe.core.errors import ArgumentError
from megamoe.core.table import SCALE_GROUP

_KEYS = ("quantization_config", "compression_config")  # the second of older files
# What a recipe means that leaves these out.
_UNSAID = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
_UNSAID |= {"activation_scheme": "dynamic", "fmt": "e4m3"}
# compressed-tensors', of experts by channel.
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_SCHEME: dict[str, dict[str, Any] | None] = {
    "weights": _E4M3 | {"strategy": "channel", "dynamic": False},
    "input_activations": _E4M3 | {"strategy": "token", "dynamic": True},
    "output_activations": None,
}
# DeepSeek's and Qwen's own. With a scale_fmt of ue8m0 weights have powers of two, which fp32 holds.
_BLOCKWISE = {"weight_block_size": [SCALE_GROUP] * 2, "activation_scheme": "dynamic", "fmt": "e4m3"}
_METHODS = {"scale": "fp8", "channels": "compressed-tensors"}  # by the kind of scales
_CLASS = "Linear"  # that a projection is, as targets name it
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def check_recipes(modules: list[Experts], config: dict[str, Any], file: Path) -> None:
    """Raise ArgumentError where a config.json says that FP8 experts are not what a layer computes. Silence is accepted.

    config: what is in `file`, for messages.
    """
    text = config.get("text_config")
    places = {"": config, "text_config.": text if isinstance(text, dict) else {}}
    for place, key in ((place, key) for place in places for key in _KEYS):
        if (recipe := places[place].get(key)) is not None:
            for experts in modules:
                for kind in _METHODS.keys() & experts.kinds:
                    _check(f"{file}: {place}{key}", recipe, experts, kind)


def _check(name: str, recipe: Any, experts: Experts, kind: str) -> None:
    said = recipe.get("quant_method") if isinstance(recipe, dict) else recipe
    if said != _METHODS[kind]:
        _refuse(f"{name}.quant_method", said, repr(_METHODS[kind]), experts)
    if kind == "scale":
        for key, value in _BLOCKWISE.items():
            found = recipe.get(key, _UNSAID.get(key))
            if found != value:
                _refuse(f"{name}.{key}", found, repr(value), experts)
        return
    _check_ignored(f"{name}.ignore", recipe.get("ignore") or (), experts)
    groups = recipe.get("config_groups")
    schemes = (
        {k: v for k, v in groups.items() if isinstance(v, dict)} if isinstance(groups, dict) else {}
    )
    for of in sorted({_group_of(name, schemes, module, experts) for module in _modules(experts)}):
        for part, expected in _SCHEME.items():
            found = schemes[of].get(part)
            if expected is not None and isinstance(found, dict):
                found = {key: found.get(key, _UNSAID.get(key)) for key in expected}
            if found != expected:
                _refuse(f"{name}.config_groups.{of}.{part}", found, str(expected), experts)


def _modules(experts: Experts) -> list[str]:
    """Return the names of the experts' projections, as recipes have them."""
    names = _PROJECTIONS if experts.gated else _PROJECTIONS[1:]
    return [f"{experts.prefix}experts.{n}.{p}" for n in range(experts.num) for p in names]


def _check_ignored(name: str, ignored: Iterable[object], experts: Experts) -> None:
    exact = set(map(str, ignored))
    patterns = [text for text in exact if text.startswith("re:")]
    for module in _modules(experts):
        for text in (*patterns, *({module, _CLASS} & exact)):
            if _rank(name, text, module) is not None:
                _refuse(name, text, f"none that names {module}, which is e4m3", experts)


def _group_of(name: str, schemes: dict[str, Any], module: str, experts: Experts) -> str:
    """Return the group of a module: of more than one that whose target names it most closely."""
    found = [
        (rank, of)
        for of, scheme in schemes.items()
        for target in scheme.get("targets") or ()
        if (rank := _rank(f"{name}.config_groups.{of}.targets", target, module)) is not None
    ]
    if not found:
        seen = {of: scheme.get("targets") for of, scheme in schemes.items()}
        _refuse(f"{name}.config_groups, targets", seen, f"one of {module}", experts)
    return min(found, key=lambda pair: pair[0])[1]


def _rank(name: str, target: object, module: str) -> int | None:
    """Return how closely a target names a module, least is closest: its name, a pattern, its class; None: not."""
    text = str(target)
    if not text.startswith("re:"):
        return {module: 0, _CLASS: 2}.get(text)
    try:
        return 1 if re.match(text[3:], module) else None
    except re.error as error:
        raise ArgumentError(name, f"{text!r} ({error})", "a regular expression") from error


def _refuse(name: str, value: object, expected: str, experts: Experts) -> None:
    raise ArgumentError(name, repr(value), f"{expected}, for {experts}")
