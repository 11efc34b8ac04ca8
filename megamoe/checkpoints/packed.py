"""Write FP4 experts in the layouts in which models are published, from weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megamoe.checkpoints.conversion import SHARD_BYTES, finished_at_once
from megamoe.checkpoints.files import Output, folder_of, write
from megamoe.checkpoints.layouts import HF, LAYOUTS, Layout, per_expert
from megamoe.core.errors import ArgumentError
from megamoe.core.planes import by_plane
from megamoe.core.table import MXFP4, NVFP4
from megamoe.formats import mxfp4, nvfp4
from megamoe.formats.weights import ExpertWeights

_NVFP4 = Layout(
    "modelopt-nvfp4",  # as read_nvfp4() reads it
    per_expert(HF, {"codes": "weight", "groups": "weight_scale", "outer": "weight_scale_2"}),
    needs=("codes", "groups", "outer"),
)
TARGETS = {"gpt-oss-mxfp4": MXFP4, "deepseek-mxfp4": MXFP4, _NVFP4.name: NVFP4}
_FORMAT_BY_BLOCK_SCALES = {f.block_scales: f for f in TARGETS.values()}
_DTYPES = {
    **{torch.uint8: "U8", torch.int8: "I8", torch.float8_e8m0fnu: "F8_E8M0"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.float16: "F16"},
    **{torch.bfloat16: "BF16", torch.int64: "I64"},
}
_STORED = {name: dtype for dtype, name in _DTYPES.items()}


def write_packed(
    target: str | Path,
    modules: Mapping[str, ExpertWeights],
    to: str,
    *,
    others: Mapping[str, Tensor] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write packed experts, such as `layer.expert_weights().quantized(problem)`, to a new folder of safetensors files.

    Numbers and scales are only moved: reading gives the same bits. The folder has a temporary name until it is
    complete.

    Args:
        target: Folder to create.
        modules: All experts of each module, by the name before `.experts.`, such as "model.layers.3.mlp".
        to: "gpt-oss-mxfp4", "deepseek-mxfp4" or "modelopt-nvfp4".
        others: The model's other tensors, by name. Default: none.
        shard_bytes: Largest size of a file, unless a single tensor is larger. Default: 5 GB.

    Raises:
        ArgumentError: `to` is unknown or has no place for the weights, weights are not packed, a name occurs twice, the
            target exists, or the disk is full. Nothing was written then.
    """
    folder = folder_of("target", target)
    if to not in TARGETS:
        raise ArgumentError("to", repr(to), f"one of {', '.join(TARGETS)}")
    if not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ArgumentError("shard_bytes", shard_bytes, "at least 1")
    found = [_output(name, [t.detach]) for name, t in (others or {}).items()]
    for prefix, weights in modules.items():
        found += _of_module(prefix, weights, LAYOUTS.get(to, _NVFP4))
    outputs = {output.name: output for output in found}
    if twice := [o.name for o in found if outputs[o.name] is not o]:
        raise ArgumentError(f"tensor {twice[0]!r}", "to be written twice", "once")
    with finished_at_once(folder, sum(output.num_bytes for output in found)) as unfinished:
        write(unfinished, found, shard_bytes, lambda _: None)


def _output(name: str, pieces: list[Callable[[], Tensor]], stacked: bool = False) -> Output:
    """Return what is written, each piece read then. stacked: [pieces, ...], else there is one."""
    first = pieces[0]()
    if first.dtype not in _DTYPES:
        raise ArgumentError(f"{name}.dtype", first.dtype, f"one of {', '.join(map(str, _DTYPES))}")
    shape = (len(pieces), *first.shape) if stacked else tuple(first.shape)
    return Output(name, _DTYPES[first.dtype], shape, lambda: (piece().cpu() for piece in pieces))


def _of_module(prefix: str, weights: ExpertWeights, layout: Layout) -> Iterator[Output]:
    parts = _parts(prefix, weights, layout.name)
    gated, kinds = ("codes", "gate") in parts, {kind for kind, _ in parts}
    if lacking := [kind for kind in layout.needs if kind not in kinds]:
        raise ArgumentError(f"{lacking[0]} of {prefix}", None, f"there, as in {layout.name}")
    if left := kinds - {entry.kind for entry in layout.entries}:
        raise ArgumentError("to", layout.name, f"one with a place for {min(left)} of {prefix}")
    if not any(entry.held(gated) for entry in layout.entries):
        raise ArgumentError("to", layout.name, f"one for experts without gates: {prefix}")

    def read(kind: str, held: tuple[str, ...], n: int) -> Tensor:
        of_parts = [parts[kind, part][n] for part in held]
        joined = of_parts[0] if kind == "outer" else layout.join(of_parts, kind)
        return joined.view(_STORED[layout.types[kind]]) if kind in layout.types else joined

    for entry in layout.entries:
        held, name = entry.held(gated), f"{layout.stem(prefix + '.')}{entry.name}"
        if held and entry.kind in kinds:
            pieces = [partial(read, entry.kind, held, n) for n in range(len(weights.w2))]
            if entry.of_each:
                yield from (_output(name.format(n=n), [p]) for n, p in enumerate(pieces))
            else:
                yield _output(name, [*pieces], stacked=True)


def _parts(prefix: str, weights: ExpertWeights, to: str) -> dict[tuple[str, str], Tensor]:
    """Return tensors of all experts by kind and part, as layouts.py describes them; of NVFP4 groups and outer."""
    found: dict[tuple[str, str], Tensor] = {}
    inner = 2 * weights.w2.shape[-1]
    for packed, scale, bias, names in (
        (weights.w13, weights.w13_scale, weights.b13, ("gate", "up")),
        (weights.w2, weights.w2_scale, weights.b2, ("down",)),
    ):
        stored = None if scale is None else _FORMAT_BY_BLOCK_SCALES.get(scale.shape[-1])
        if scale is None or stored is not TARGETS[to]:
            have = "not packed" if stored is None else stored.name
            raise ArgumentError(f"weights of {prefix}", have, f"{TARGETS[to].name} for {to}")
        rows = packed.shape[1:-1].numel()
        planes = rows // inner if packed is weights.w13 else 1
        sizes = planes, rows // planes, 2 * packed.shape[-1]
        kinds = {"codes": by_plane(packed, planes)}
        if stored is MXFP4:
            kinds["powers"] = by_plane(mxfp4.plain_scales(scale, *sizes), planes)
        else:
            groups, kinds["outer"] = nvfp4.plain_scales(scale, *sizes)
            kinds["groups"] = by_plane(groups.view(torch.float8_e4m3fn), planes)
        if bias is not None:
            kinds["bias"] = bias.reshape(len(bias), planes, -1)
        for kind, tensor in kinds.items():
            found |= {(kind, name): tensor[:, i] for i, name in enumerate(names[-planes:])}
    return found
