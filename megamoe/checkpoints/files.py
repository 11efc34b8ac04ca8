"""Read tensors by name from any number of safetensors shards, and write shards piece by piece.

The safetensors library reads the files and validates them. It can only write whole shards from memory, but a tensor of
all experts may have tens of gigabytes. So this module writes the format itself: a length, a JSON header, the bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError, ConfigError

_NUMBERED = re.compile(r"(.*?)(\d{1,6})(-of-)(\d{1,6})\.safetensors")
INDEX = "model.safetensors.index.json"
_BITS = {
    **{"F4": 4, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8},
    **{"U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32},
    **{"U64": 64, "I64": 64, "F64": 64, "C64": 64},
}


def folder_of(name: str, given: object) -> Path:
    """Return a path. Raises ArgumentError for what is none."""
    if not isinstance(given, (str, Path)):
        raise ArgumentError(name, repr(given), "a folder")
    return Path(given)


class Source:
    """The tensors of a folder: those of its index, or without one those of all its *.safetensors.

    Raises ArgumentError for files that are missing, broken or outside of the folder, and for names that occur twice or
    that index and files do not agree on.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Source:
        with self._stack:
            named = self._index()
            names = sorted(set(named.values()) if named else self._files())
            if not names:
                raise ArgumentError("source", self._folder, "a folder of *.safetensors")
            for name in names:
                self._open(name)
            _check_index(named, self._file_of)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _files(self) -> list[str]:
        found = [path.name for path in self._folder.glob("*.safetensors")]
        for name in found:
            match = _NUMBERED.fullmatch(name)
            if match is None:
                continue
            for number in range(1, int(match[4]) + 1):
                other = f"{match[1]}{number:0{len(match[2])}}{match[3]}{match[4]}.safetensors"
                if other not in found:
                    raise ArgumentError(
                        str(self._folder / other), "missing", f"there beside {name}"
                    )
        return found

    def _index(self) -> dict[str, str]:
        """Return file by tensor, empty without an index."""
        path = self._folder / INDEX
        if not path.exists():
            return {}
        try:
            named = json.loads(path.read_text())["weight_map"]
            pairs = [(str(tensor), str(file)) for tensor, file in named.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                str(path), f"unreadable ({error!r})", "JSON with a weight_map"
            ) from error
        for tensor, file in pairs:
            if not file.endswith(".safetensors") or any(c in file for c in "/\\\0"):
                expected = f"the bare name of a .safetensors file in {self._folder}"
                raise ArgumentError(f"{path}: weight_map[{tensor!r}]", repr(file), expected)
        return dict(pairs)

    def _open(self, name: str) -> None:
        path = self._folder / name
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ConfigError(
                "safetensors is not installed: pip install 'megamoe[checkpoints]'"
            ) from error
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ArgumentError(str(path), f"unreadable ({error})", "a safetensors file") from error
        for tensor in file.offset_keys():
            if tensor in self._file_of:
                raise ArgumentError(f"tensor {tensor!r}", "in two files", "in one")
            self._file_of[tensor] = file

    @property
    def names(self) -> list[str]:
        """Return all names, file by file."""
        return list(self._file_of)

    def dtype(self, name: str) -> str:
        """Return the type as the format names it, such as "BF16"."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def tensor(self, name: str, expert: int | None = None) -> Tensor:
        """Read a tensor, or tensor[expert] and nothing else of it."""
        file = self._file_of[name]
        return file.get_tensor(name) if expert is None else file.get_slice(name)[expert]


def _check_index(named: dict[str, str], found: dict[str, Any]) -> None:
    for what, lacking in (
        ("named by the index, in none of its files", named.keys() - found.keys()),
        ("in a file of the index, not named by it", found.keys() - named.keys() if named else ()),
    ):
        if lacking:
            raise ArgumentError(f"tensor {min(lacking)!r}", what, "in both")


@dataclass(frozen=True)
class Output:
    """A tensor to write. pieces: returns its parts in the order of memory, each read when it is asked for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Return its size. Raises ArgumentError for a type of unknown size."""
        if self.dtype not in _BITS:
            raise ArgumentError(f"type of {self.name!r}", self.dtype, f"one of {', '.join(_BITS)}")
        return prod(self.shape) * _BITS[self.dtype] // 8


def write(
    folder: Path, outputs: list[Output], shard_bytes: int, written: Callable[[int], Any]
) -> None:
    """Write shards of at most `shard_bytes`, or of one tensor, and their index.

    written: called with the bytes of each piece.
    """
    shards = list(_shards(outputs, shard_bytes))
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file_of |= dict.fromkeys((output.name for output in shard), name)
        # Wide types first, as the library does, so that every tensor is aligned.
        _write_shard(folder / name, sorted(shard, key=lambda o: -_BITS[o.dtype]), written)
    total = sum(output.num_bytes for output in outputs)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    with open(folder / INDEX, "w") as file:
        json.dump(index, file, indent=2)
        _sync(file)


def _shards(outputs: list[Output], shard_bytes: int) -> Iterator[list[Output]]:
    shard: list[Output] = []
    held = 0
    for output in outputs:
        if shard and held + output.num_bytes > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(output)
        held += output.num_bytes
    if shard:
        yield shard


def _write_shard(path: Path, outputs: list[Output], written: Callable[[int], Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for output in outputs:
        begin, end = end, end + output.num_bytes
        entry = {"dtype": output.dtype, "shape": output.shape, "data_offsets": (begin, end)}
        header[output.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for output in outputs:
            before = file.tell()
            for piece in output.pieces():
                written(file.write(_bytes(piece)))
            if file.tell() - before != output.num_bytes:
                found = f"{file.tell() - before} bytes"
                raise ArgumentError(f"{output.name!r}", found, str(output.num_bytes))
        _sync(file)


def _bytes(piece: Tensor) -> memoryview:
    return piece.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _sync(file: Any) -> None:
    """Bring it to the disk, before a rename says that all is there."""
    file.flush()
    os.fsync(file.fileno())
