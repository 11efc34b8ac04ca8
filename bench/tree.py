"""What tells one tree from another, with git or without: a hash of everything that a measurement runs."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "csrc", "jit", "megamoe", "tools")


def tree_hash(root: Path) -> str:
    """Return 12 hex digits of names and bytes of all sources, as they lie there now.

    A machine that got a copy of the tree has no git, and a commit says nothing of changes on top of it.
    """
    found = hashlib.sha1()
    for path in sorted(p for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()):
        name = path.relative_to(root)
        if "__pycache__" in name.parts or any(part.startswith(".") for part in name.parts):
            continue
        data = path.read_bytes()
        found.update(f"{name.as_posix()}\0{len(data)}\0".encode())
        found.update(data)
    return found.hexdigest()[:12]
