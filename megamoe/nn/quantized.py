"""Validate quantized weights that replace a module's bf16 masters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Problem
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.core.table import Format
from megamoe.formats.weights import check_tensor, expected_weights

QUANTIZED = ("w13", "w2", "w13_scale", "w2_scale")


def check_taken(problem: Problem, stored: Format, given: Mapping[str, Tensor]) -> None:
    """Raise ConfigError if the layer stores another format, ArgumentError if a tensor does not fit it."""
    if problem.formats.w != stored:
        expected = f"one whose weights are {stored.name}, not {problem.formats.w.name}"
        raise ConfigError("precision", repr(problem.precision), expected)
    expected_of = expected_weights(problem)
    if not isinstance(given["w13"], Tensor):
        raise ArgumentError("w13", type(given["w13"]).__name__, "a tensor")
    for name, tensor in given.items():
        check_tensor(name, tensor, *expected_of[name], device=given["w13"].device)


_MASTERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_state(
    problem: Problem, state_dict: Mapping[str, Any], prefix: str, holds: torch.dtype
) -> None:
    """Raise ArgumentError for quantized weights without scales, which load_state_dict would silently cast.

    holds: the dtype of the layer's w13 now.
    """
    stored = problem.formats.w
    expected = f"bf16 masters, or {stored.dtype} with scales" if stored.scaled else "bf16 masters"
    given = {name: state_dict.get(prefix + name) for name in ("w13", "w2")}
    for name, tensor in given.items():
        if tensor is None or (tensor.dtype in _MASTERS and holds in _MASTERS):
            continue
        key, scale = f"{prefix}{name}", f"{prefix}{name}_scale"
        if tensor.dtype in _MASTERS:
            expected = f"{holds} with scales, which the layer holds: make a new layer for masters"
            raise ArgumentError(f"{key} of the state dict", tensor.dtype, expected)
        if not (stored.scaled and tensor.dtype == stored.dtype):
            raise ArgumentError(f"{key} of the state dict", tensor.dtype, expected)
        if state_dict.get(scale) is None:
            expected = f"{stored.scale_dtype}, since {key} is {stored.dtype}"
            raise ArgumentError(f"{scale} of the state dict", None, expected)
        if holds in _MASTERS and any(t is None or t.dtype != tensor.dtype for t in given.values()):
            dtypes = {n: None if t is None else t.dtype for n, t in given.items()}
            raise ArgumentError(f"{prefix}w13 and w2 of the state dict", dtypes, "of one dtype")
