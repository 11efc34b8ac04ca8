"""Convert a checkpoint from one layout of experts to another. The target folder appears complete or not at all."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megamoe.checkpoints.experts import Experts, find
from megamoe.checkpoints.files import Output, Source, folder_of, write
from megamoe.checkpoints.layouts import LAYOUTS, Entry, Layout
from megamoe.checkpoints.recipes import CONFIG, MODELOPT, check_recipes
from megamoe.core.errors import ArgumentError

SHARD_BYTES = 5 * 10**9
_COPIED_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")  # config, tokenizer

_WORDS = {
    **{"weight": "weights", "bias": "biases", "scale": "scales of e4m3 weights"},
    "channels": "scales of e4m3 channels",
    **{"codes": "MXFP4 numbers", "powers": "MXFP4 scales"},
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    source_layout: str | None = None,
    dynamic_activations: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> list[str]:
    """Convert the experts of a checkpoint to another layout, in a new folder.

    Numbers are moved and never computed: dtypes stay the same, and only one expert of one tensor is in memory at a
    time. Other tensors, configuration and tokenizer files are copied. The folder has a temporary name until it is
    complete.

    Args:
        source: Folder of safetensors files.
        target: Folder to create.
        to: Name of the layout, one of megamoe.checkpoints.layouts.LAYOUTS.
        source_layout: Layout of the source. Default: detected from names and shapes. Transposed experts without
            config.json need it.
        dynamic_activations: True: also accept matrices whose activations have one calibrated scale (input_scale), and
            drop that scale, because a layer computes one per token. Default: False.
        shard_bytes: Largest size of a file, unless a single tensor is larger. Default: 5 GB.
        progress: True: show a progress bar if tqdm is installed. Default: False.

    Returns:
        For each module one line with its name, layout and sizes.

    Raises:
        ArgumentError: The source is incomplete, has no known layout, or its FP8 recipe (config.json) is not a layer's;
            `to` cannot hold a tensor; the target exists; or the disk is full. Nothing was written then.
    """
    source, target = folder_of("source", source), folder_of("target", target)
    for name, value in (("to", to), ("source_layout", source_layout)):
        if value not in (*LAYOUTS, None) or (name, value) == ("to", None):
            raise ArgumentError(name, repr(value), f"one of {', '.join(LAYOUTS)}")
    if shard_bytes < 1:
        raise ArgumentError("shard_bytes", shard_bytes, "at least 1")
    if not source.is_dir():
        raise ArgumentError("source", source, "a folder")
    with Source(source) as tensors:
        configs = {name: _config(source / name) for name in (CONFIG, MODELOPT)}
        modules = find(tensors, source_layout, configs[CONFIG].get("model_type"))
        _check_numbers(modules, configs[CONFIG])
        check_recipes(modules, configs, source, LAYOUTS[to], dynamic_activations)
        outputs = _outputs(tensors, modules, LAYOUTS[to])
        total = sum(output.num_bytes for output in outputs)
        with finished_at_once(target, total) as folder, _bar(total, progress) as written:
            for path in sorted(source.iterdir()):
                # Another index is not copied, because its files are not.
                copied = path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json")
                if copied and path.is_file():
                    shutil.copyfile(path, folder / path.name)
            write(folder, outputs, shard_bytes, written)
    return [
        f"{m}: {m.num} experts, hidden {m.hidden}, intermediate {m.intermediate}, "
        f"{'gated' if m.gated else 'not gated'}, {', '.join(sorted(m.kinds))}"
        for m in modules
    ]


def _config(path: Path) -> dict[str, Any]:
    """Return a file of configuration, empty without one."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ArgumentError(str(path), f"unreadable ({error!r})", "JSON") from error
    if not isinstance(found, dict):
        raise ArgumentError(str(path), f"a {type(found).__name__}", "a JSON object")
    return found


def _check_numbers(modules: list[Experts], config: dict[str, Any]) -> None:
    """Raise ArgumentError if config.json has another number of experts: names do not show a missing last one."""
    said = dict(_numbers(config))
    for experts in modules if said else ():
        if experts.num not in said:
            key = " or ".join(f"{num}, {place} of {CONFIG}" for num, place in said.items())
            raise ArgumentError(f"number of experts of {experts}", experts.num, key)


def _numbers(config: dict[str, Any], place: str = "") -> Iterator[tuple[int, str]]:
    """Yield the numbers of experts in a configuration and its parts, and where they are."""
    for key, value in config.items():
        if key in _NUM_EXPERTS and isinstance(value, int):
            yield value, place + key
        elif isinstance(value, dict):
            yield from _numbers(value, f"{place}{key}.")


def _outputs(source: Source, modules: list[Experts], layout: Layout) -> list[Output]:
    """Return the tensors to write, each module at the place of its first tensor. Raise ArgumentError on conflicts."""
    module_of = {name: module for module in modules for name in module.names.values()}
    outputs: dict[str, Output] = {}
    done = set()
    for name in source.names:
        module = module_of.get(name)
        if module is None:
            read = partial(map, source.tensor, [name])
            found = [Output(name, source.dtype(name), source.shape(name), read)]
        elif module.prefix in done:
            continue
        else:
            done.add(module.prefix)
            found = list(_of_module(module, layout))
        for output in found:
            if output.name in outputs:
                raise ArgumentError(f"tensor {output.name!r}", "to be written twice", "once")
            outputs[output.name] = output
    return list(outputs.values())


def _of_module(experts: Experts, layout: Layout) -> Iterator[Output]:
    if (expected := _wanted(experts, layout)) is not None:
        raise ArgumentError("to", layout.name, f"one {expected}")
    for entry, parts in experts.entries(layout):
        shape = experts.shape(layout, entry, parts)
        dtype = layout.types.get(entry.kind, experts.dtypes[entry.kind, parts[0]])
        for n in range(experts.num) if entry.of_each else (None,):
            name = f"{layout.stem(experts.prefix)}{entry.name.format(n=n)}"
            numbers = range(experts.num) if n is None else (n,)
            read = partial(_of_experts, experts, layout, entry, parts, numbers)
            yield Output(name, dtype, shape, read)


def _wanted(experts: Experts, layout: Layout) -> str | None:
    """Return which layout is wanted instead of one without a place for a tensor, or that needs another; None: this."""
    if layout.per_matrix_scale:
        return f"with a scale of each row, or each block: {layout.name} is only read"
    if not experts.prefix.endswith(layout.module_prefix):
        return f"with a place for {experts}"
    if left := sorted(experts.kinds - layout.kinds - {"rows"}):
        places = ", ".join(name for name, other in LAYOUTS.items() if left[0] in other.kinds)
        return f"with a place for {_WORDS[left[0]]} of {experts}: {places}"
    for kind in layout.needs:
        if kind not in experts.kinds:
            return f"without {_WORDS[kind]}, as {experts} has none"
    entries = experts.entries(layout)
    if "up" not in {part for _, parts in entries for part in parts}:
        return f"with a place for experts without gates: {experts}"
    for entry, parts in entries:
        dtypes = {part: experts.dtypes[entry.kind, part] for part in parts}
        if len(set(dtypes.values())) > 1:
            return f"that does not join {dtypes} of {experts}"
    return None


def _of_experts(
    experts: Experts, layout: Layout, entry: Entry, parts: tuple[str, ...], numbers: Iterable[int]
) -> Iterator[Tensor]:
    for n in numbers:
        yield layout.join([experts.read(entry.kind, part, n) for part in parts], entry.kind)


@contextmanager
def finished_at_once(target: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` at the end and deleted after an error."""
    if target.exists() or target.is_symlink():
        raise ArgumentError("target", target, "a folder that does not exist yet")
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise ArgumentError(
            "target", f"{target}, where {free} bytes are free", f"{num_bytes} bytes"
        )
    folder = target.parent / f".{target.name}.unfinished-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        yield folder
        if target.exists():  # rename() would replace an empty one
            raise ArgumentError(
                "target", f"{target}, made meanwhile", "a folder that does not exist"
            )
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[int], Any]]:
    """Yield a function that receives the number of bytes of each piece written."""
    try:
        from tqdm import tqdm
    except ImportError:
        wanted = False
    if not wanted:
        yield lambda _: None
        return
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        yield bar.update
