"""Read NVFP4 experts that ModelOpt or compressed-tensors wrote, from safetensors files with one tensor per matrix."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.checkpoints.files import Source, folder_of
from megamoe.checkpoints.layouts import HF, MIXTRAL
from megamoe.core.errors import ArgumentError

# Behind a projection's name: numbers, a scale for 16 of them, one for the matrix, and whether that divides.
_WRITERS = (
    ("weight", "weight_scale", "weight_scale_2", False),  # ModelOpt
    ("weight_packed", "weight_scale", "weight_global_scale", True),  # compressed-tensors
)
_PROJECTIONS = HF.split(), MIXTRAL.split()
_DTYPES = ("U8", "F8_E4M3", "F32")
_LEFT = ("input_scale", "input_global_scale")  # of activations, which stay bf16


def read_nvfp4(folder: str | Path, module: str, experts: Iterable[int]) -> dict[str, Any]:
    """Read experts of one module: pass the result to `ExpertWeights.from_nvfp4(**read_nvfp4(...))`.

    Scales of activations are not read, because rows stay bf16. Experts without gates have planes = 1.

    Args:
        folder: Folder of safetensors files.
        module: The name before `.experts.0.`, such as "model.layers.3.mlp".
        experts: Numbers of the experts to read, usually those of one rank.

    Returns:
        The arguments of from_nvfp4(), by name.

    Raises:
        ArgumentError: A tensor is missing, has another dtype or shape than that of the first expert, or is one that a
            layer does not support: a bias, or a scale by which AWQ multiplies x.
    """
    numbers = list(experts) if isinstance(experts, Iterable) else []
    if not numbers or not all(isinstance(n, int) for n in numbers):
        raise ArgumentError("experts", experts, "numbers, at least one")
    with Source(folder_of("folder", folder)) as source:
        prefix = f"{module}.experts."
        (*ends, inverse), names = _found(source, f"{prefix}{numbers[0]}.")
        read = {f"{name}.{end}" for name in names for end in (*ends, *_LEFT)}
        _check_rest(source, prefix, numbers, read)
        *ups, down = [_read(source, prefix, numbers, n, ends) for n in names]
    if ups[0][0].shape != ups[-1][0].shape or ups[0][1].shape != ups[-1][1].shape:
        shapes = [list(t.shape[1:]) for codes, scales, _ in ups for t in (codes, scales)]
        raise ArgumentError(
            f"shapes of {names[0]} and {names[1]} in {prefix[:-1]}", shapes, "alike"
        )
    planes = [torch.stack(each, 1) for each in zip(*ups, strict=True)]
    codes, scales, outer = planes
    w2, s2, o2 = down
    pairs = {"scales": (scales, s2), "outer": (outer, o2)}
    return {"w13": codes, "w2": w2, **pairs, "inverse": inverse, "planes": len(ups)}


def _found(source: Source, expert: str) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return how the numbers and scales of an expert are named, and its projections, gate first if it has one."""
    known = set(source.names)
    for writer in _WRITERS:
        for gate, *others in _PROJECTIONS:
            if all(f"{expert}{name}.{end}" in known for name in others for end in writer[:3]):
                gated = any(f"{expert}{gate}.{end}" in known for end in writer[:3])
                return writer, ((gate,) if gated else ()) + tuple(others)
    seen = sorted(name for name in known if name.startswith(expert))[:6]
    expected = " or ".join(f"{expert}up_proj.{{{', '.join(w[:3])}}}" for w in _WRITERS)
    raise ArgumentError(f"tensors of {expert[:-1]}", seen, expected)


def _check_rest(source: Source, prefix: str, numbers: list[int], read: set[str]) -> None:
    """Raise ArgumentError for tensors of these experts that are not read."""
    experts = set(map(str, numbers))
    for name in source.names:
        number, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number in experts and rest not in read:
            expected = "none that from_nvfp4() has no place for: " + ", ".join(sorted(read))
            raise ArgumentError(f"tensor {name!r}", "there", expected)


def _read(
    source: Source, prefix: str, numbers: list[int], projection: str, ends: list[str]
) -> list[Tensor]:
    """Return codes [L, N, K/2] and scales [L, N, K/16], bytes, and [L] fp32 of one projection."""
    known, found = set(source.names), []
    for end, dtype in zip(ends, _DTYPES, strict=True):
        tensors: list[Tensor] = []
        for number in numbers:
            name = f"{prefix}{number}.{projection}.{end}"
            if name not in known:
                raise ArgumentError(f"tensor {name!r}", "missing", "there, as of other experts")
            if source.dtype(name) != dtype:
                raise ArgumentError(f"{name}.dtype", source.dtype(name), dtype)
            tensor = source.tensor(name)
            tensor = tensor if end == ends[2] else tensor.view(torch.uint8)
            if tensors and tensor.shape != tensors[0].shape:
                expected = f"{list(tensors[0].shape)}, as expert {numbers[0]} has it"
                raise ArgumentError(f"{name}.shape", list(tensor.shape), expected)
            tensors.append(tensor)
        found.append(torch.stack(tensors))
    codes, scales, outer = found
    if outer.numel() != len(numbers):  # [] of ModelOpt, [1] of compressed-tensors
        name = f"{prefix}{numbers[0]}.{projection}.{ends[2]}"
        raise ArgumentError(f"{name}.shape", list(outer.shape[1:]), "[] or [1]")
    return [codes, scales, outer.flatten()]
