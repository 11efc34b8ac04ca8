"""Read kernels that were compiled elsewhere and exported by `python -m megamoe.jit --export`. Needs no compiler.

The manifest has one entry per cubin: the key of its sources (its text, all our headers and our flags, by content) and
the hash of its bytes. A kernel of another source tree has another key, so it is never found. The exporter chose the
compiler and the versions of foreign headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe.core import env
from megamoe.core.errors import AbiMismatch, CompileError, ConfigError
from megamoe.jit import abi, cache, paths
from megamoe.jit.cubin import read_u32

PACKAGE = "megamoe_prebuilt"
MANIFEST = "manifest.json"
FORMAT = 1
MEND = f"export it again, chmod go-w, or unset MEGAMOE_PREBUILT (uninstall {PACKAGE})"


class NotPrebuilt(CompileError):
    """The folder of prebuilt kernels has none that was made from these sources."""


@dataclass(frozen=True)
class Entry:
    """A line of the manifest."""

    name: str
    sha256: str
    compiler: str
    log: str


def key_of(source: str, flags: Sequence[str]) -> str:
    """Return the key of a kernel: like the cache's, without a compiler's version."""
    return cache.content_key(source, flags=flags, compiler="prebuilt")


def sources() -> str:
    """Return the digest of all our headers."""
    return cache.content_key("", compiler="prebuilt")


def place() -> Path | None:
    """Return the folder in use: MEGAMOE_PREBUILT, else the package beside megamoe, else None."""
    if stated := env.get("MEGAMOE_PREBUILT"):
        return Path(stated).expanduser()
    return next((d for d in paths.package_dirs(PACKAGE) if (d / MANIFEST).exists()), None)


def lookup(source: str, name: str, flags: Sequence[str]) -> tuple[bytes, Entry] | None:
    """Return the cubin made from exactly this text, tree and flags, and its entry; None without a folder.

    Raises NotPrebuilt when the folder has none, ConfigError for a folder or file that is damaged or that others can
    write, AbiMismatch for a cubin that disagrees about the argument block.
    """
    folder = place()
    if folder is None:
        return None
    entry = _entries(folder).get(key_of(source, flags))
    if entry is None:
        kernel = name.removesuffix(".cu")
        raise NotPrebuilt(f"{folder} has no kernel {kernel} with these flags (made with --only?)")
    cubin = cache.read_guarded(folder, f"{entry.name}.cubin", MEND)
    if hashlib.sha256(cubin).hexdigest() != entry.sha256:
        raise ConfigError(f"{folder / entry.name}.cubin is damaged: {MEND}")
    _check_stamp(cubin, f"{folder / entry.name}.cubin")
    return cubin, entry


def _entries(folder: Path) -> dict[str, Entry]:
    """Return the entries of a folder of this source tree by key."""
    data = cache.read_guarded(folder, MANIFEST, MEND)
    try:
        found: dict[str, Any] = json.loads(data)
        made_from = f"{found['format']} {found['sources']}"
        entries = {key: Entry(**values) for key, values in found["kernels"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / MANIFEST} is damaged ({error!r}): {MEND}") from error
    if made_from != f"{FORMAT} {sources()}":
        raise NotPrebuilt(f"{folder} was made from other sources of megamoe than these")
    return entries


def _check_stamp(cubin: bytes, what: str) -> None:
    ours = {ctypes.sizeof(launch) for launch in abi.LAUNCHES.values()}
    stated = read_u32(cubin, "megamoe_args_bytes")  # None: a kernel without such an argument
    if stated is not None and stated not in ours:
        raise AbiMismatch(
            f"{what}: its argument has {stated} bytes there, {sorted(ours)} here: {MEND}"
        )


def check_target(folder: Path) -> None:
    """Raise ConfigError for a folder that --export cannot write."""
    usable = not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
    if not usable or not folder.absolute().parent.is_dir():
        raise ConfigError("--export", folder, "a new or empty folder in one that exists")


def write(folder: Path, flags: Sequence[str], kernels: Iterable[tuple[str, str, Any]]) -> None:
    """Write kernels and their manifest. The folder has another name until it is whole; others may read it.

    flags: of the compiler. kernels: name, source and CompileResult of each.
    """
    check_target(folder)
    entries = {}
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.absolute().parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        for name, source, made in kernels:
            _check_stamp(made.cubin, name)
            digest = hashlib.sha256(made.cubin).hexdigest()
            entry = Entry(name, digest, made.compiler, made.log)
            entries[key_of(source, flags)] = asdict(entry)
            (whole / f"{name}.cubin").write_bytes(made.cubin)
        manifest = {"format": FORMAT, "sources": sources(), "kernels": entries}
        (whole / MANIFEST).write_text(json.dumps(manifest, indent=1))
        (whole / "__init__.py").write_text('"""Kernels of megamoe, compiled."""\n')
        for path in whole.iterdir():
            path.chmod(0o644)
        whole.chmod(0o755)
        os.replace(whole, folder)
