"""A folder of build results, keyed by content: safe for many processes, and for a crash at any moment.

The result is published last, by a rename; so a file that exists under its final name is whole. One process builds, the
others wait for its file lock and then find the result (that is also how the ranks of one machine share a compilation).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megamoe import env
from megamoe.jit import paths

Builder = Callable[
    [Path], dict[str, Any]
]  # writes the result to the given path, returns notes about it


def content_key(
    source: str,
    *,
    flags: Sequence[str] = (),
    compiler: str = "",
    csrc: Path | None = None,
    extra_files: Sequence[Path] = (),
) -> str:
    """Return the key of a build: its text, the contents of all our headers, the compiler, the flags.

    flags: without include folders; where a file lies must not matter, what it says does.
    extra_files: other files whose contents matter, by name and content.
    """
    root = csrc or paths.CSRC
    digest = hashlib.sha256()

    def add(*parts: str | bytes) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)

    add(source, compiler, *flags)
    for path in paths.headers(root):
        add(path.relative_to(root).as_posix(), path.read_bytes())
    for path in extra_files:
        add(path.name, path.read_bytes())
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def _publish(temporary: Path, final: Path) -> None:
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, final)


def _load(result: Path, notes: Path) -> dict[str, Any] | None:
    """Return the notes of a whole result, or None."""
    try:
        found = json.loads(notes.read_text())
        if result.stat().st_size == found["bytes"] > 0:
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def fetch(
    key: str, suffix: str, build: Builder, directory: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Return the file of `key` and its notes; call `build` when there is none.

    suffix: ".cubin", ".so", ...
    """
    folder = directory or env.cache_dir()
    result, notes = folder / f"{key}{suffix}", folder / f"{key}{suffix}.json"
    found = _load(result, notes)
    if found is not None:
        return result, found
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{key}.lock"):
        found = _load(result, notes)  # another process built it while this one waited
        if found is not None:
            return result, found
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
            new_result, new_notes = Path(scratch) / f"out{suffix}", Path(scratch) / "notes.json"
            found = dict(build(new_result))
            found["bytes"] = new_result.stat().st_size
            if not found["bytes"]:
                raise RuntimeError(f"the build of {key}{suffix} left an empty file")
            new_notes.write_text(json.dumps(found))
            _publish(new_notes, notes)
            _publish(new_result, result)
    return result, found
