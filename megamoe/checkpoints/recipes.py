"""What config.json says of FP8 experts: names and shapes of tensors do not say how the rows beside them are rounded.

A layer multiplies e4m3 weights with rows that it quantizes as they come (docs/numerics.md). Weights that were made for
other rows, such as bf16 or those of a scale that was calibrated, would be multiplied in silence with other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megamoe.checkpoints.experts import Experts
from megamoe.core.errors import ArgumentError
from megamoe.core.table import SCALE_GROUP

_KEYS = ("quantization_config", "compression_config")  # the second of older files
# What a recipe means that leaves these out.
_UNSAID = {
    **{"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False},
    **{"activation_scheme": "dynamic", "fmt": "e4m3"},
}
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
_SHOWN = 500  # characters of a value in messages: targets may be all modules
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def check_recipes(modules: list[Experts], config: dict[str, Any], file: Path) -> None:
    """Raise ArgumentError where a config.json says that FP8 experts are not what a layer computes. Silence is accepted.

    config: what is in `file`, for messages.
    """
    for place, recipe in _recipes(config):
        for experts in modules:
            for kind in _METHODS.keys() & experts.kinds:
                _check(f"{file}: {place}", recipe, experts, kind)


def _recipes(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Return every recipe and where it stands: in models of several parts also in the configuration of one of them."""
    for key, value in config.items():
        if key in _KEYS and value is not None:
            yield place + key, value
        elif isinstance(value, dict):
            yield from _recipes(value, f"{place}{key}.")


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
    if (turned := recipe.get("transform_config")) not in (None, {}, {"config_groups": {}}):
        _refuse(
            f"{name}.transform_config", turned, "none: rows are multiplied as they are", experts
        )
    ignored = _Targets(f"{name}.ignore", recipe.get("ignore"), experts)
    for module in _modules(experts):
        if (found := ignored.naming(module)) is not None:
            _refuse(ignored.name, found[1], f"none that names {module}, which is e4m3", experts)
    schemes = recipe.get("config_groups") or {}
    if not isinstance(schemes, dict) or not all(isinstance(s, dict) for s in schemes.values()):
        _refuse(f"{name}.config_groups", schemes, "schemes by the names of their groups", experts)
    for of in sorted(_groups_of(f"{name}.config_groups", schemes, experts)):
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


def _groups_of(name: str, schemes: dict[str, Any], experts: Experts) -> set[str]:
    """Return the groups of the experts' modules: for each those whose targets name it most closely.

    Who loads a checkpoint takes one of several that are as close, by an order that is not the same everywhere.
    """
    every = {
        of: _Targets(f"{name}.{of}.targets", scheme.get("targets"), experts)
        for of, scheme in schemes.items()
    }
    groups = set()
    for module in _modules(experts):
        ranks = {of: f[0] for of, t in every.items() if (f := t.naming(module)) is not None}
        if not ranks:
            seen = {of: scheme.get("targets") for of, scheme in schemes.items()}
            _refuse(f"{name}, targets", seen, f"one of {module}", experts)
        groups |= {of for of, rank in ranks.items() if rank == min(ranks.values())}
    return groups


class _Targets:
    """What a list in a recipe names: modules, their class, and by patterns, which begin with "re:"."""

    def __init__(self, name: str, given: Any, experts: Experts) -> None:
        self.name = name
        if not isinstance(given, list | None) or not all(isinstance(t, str) for t in given or ()):
            _refuse(name, given, "a list of names", experts)
        patterns = {text for text in given or () if text.startswith("re:")}
        self._exact = set(given or ()) - patterns
        self._patterns = {text: self._compiled(text) for text in sorted(patterns)}

    def naming(self, module: str) -> tuple[int, str] | None:
        """Return how closely a module is named, least is closest, and by what: its name, a pattern, its class."""
        if module in self._exact:
            return 0, module
        for text, pattern in self._patterns.items():
            if pattern.match(module):
                return 1, text
        return (2, _CLASS) if _CLASS in self._exact else None

    def _compiled(self, text: str) -> re.Pattern[str]:
        try:
            return re.compile(text[3:])
        except re.error as error:
            expected = "a regular expression"
            raise ArgumentError(self.name, f"{text!r} ({error})", expected) from error


def _refuse(name: str, value: object, expected: str, experts: Experts) -> None:
    text = repr(value)
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    raise ArgumentError(name, shown, f"{expected}, for {experts}")
