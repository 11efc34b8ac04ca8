"""Store build results in a folder, by content key. It is safe for many processes and for a crash at any moment.

The result is published last, by a rename, so a file with its final name is complete. One process builds; the others
wait for its file lock and then find the result. The ranks of one machine share a compilation in the same way. The files
are executed, so the folder is created for its owner alone, and a folder that others can write is rejected.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megamoe.core import env
from megamoe.core.errors import ConfigError
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


UNMAPPED = 65534  # the owner, inside a user namespace, of what root owns outside


def _owned(info: os.stat_result) -> bool:
    return info.st_uid in (os.geteuid(), 0)


def _private_group(gid: int) -> bool:
    """Whether the user is alone in the group, as with umask 002 on most distributions."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _doubt(info: os.stat_result, is_parent: bool, installed: bool = False) -> str | None:
    """Return why somebody else could put a file behind a path, or None.

    installed: by a package manager, which follows umask 002 like everything else of this user.
    """
    if not (_owned(info) or (is_parent and info.st_uid == UNMAPPED)):
        return f"belongs to user {info.st_uid}, not to {os.geteuid()}"
    writers = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    lenient = is_parent or installed
    if lenient and writers == stat.S_IWGRP and _private_group(info.st_gid):
        writers = 0
    if is_parent and info.st_mode & stat.S_ISVTX:
        writers = 0  # as in /tmp: they cannot rename what is not theirs
    return f"can be written by others (mode {info.st_mode & 0o7777:o})" if writers else None


def secure(folder: Path) -> Path:
    """Make the folder; return its real path. Raise ConfigError when others could put code into it.

    As ssh does it: the folder and its parents belong to this user or to root, and nobody else may write there.
    """

    def refusal(path: Path, why: str) -> ConfigError:
        return ConfigError(
            f"the cache folder {folder} holds code that is executed, but {path} {why}: mend that "
            f"(empty the cache, chmod go-w {path}), or set MEGAMOE_CACHE_DIR to a folder of your own"
        )

    try:
        real = folder.resolve()
        real.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [(path, os.stat(path)) for path in (real, *real.parents)]
    except OSError as error:
        raise refusal(folder, f"cannot be used ({error})") from error
    for path, info in found:
        if (why := _doubt(info, is_parent=path != real)) is not None:
            raise refusal(path, why)
    return real


def read_guarded(folder: Path, name: str, mend: str) -> bytes:
    """Return a file of a folder that somebody else made. Raise ConfigError when others could have written it.

    mend: what to do about it. The rule is that of `secure`; a private group may write, as package managers leave it.
    """
    try:
        path = folder.resolve() / name
        found = [(path, os.lstat(path))]
        found += [(parent, os.stat(parent)) for parent in path.parents]
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder / name} cannot be used ({error}): {mend}") from error
    if not stat.S_ISREG(found[0][1].st_mode):
        raise ConfigError(f"{path} is not a regular file: {mend}")
    for place, info in found:
        is_parent = place not in (path, path.parent)
        if (why := _doubt(info, is_parent, installed=True)) is not None:
            raise ConfigError(f"{path} holds code that is executed, but {place} {why}: {mend}")
    return data


def _publish(temporary: Path, final: Path) -> None:
    os.chmod(temporary, 0o600)  # whatever umask the compiler ran under
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, final)


def _load(result: Path, notes: Path) -> dict[str, Any] | None:
    """Return the notes of a whole result that is ours, or None."""
    try:
        info = os.lstat(result)
        if not (stat.S_ISREG(info.st_mode) and _owned(info)):
            return None  # left from a time when others could write here: built again, in its place
        found = json.loads(notes.read_text())
        if info.st_size == found["bytes"] > 0:
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
    folder = secure(directory or env.cache_dir())
    result, notes = folder / f"{key}{suffix}", folder / f"{key}{suffix}.json"
    found = _load(result, notes)
    if found is not None:
        return result, found
    from filelock import FileLock  # needed by builds only, and slow to import

    with FileLock(folder / f"{key}.lock", mode=0o600):
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
