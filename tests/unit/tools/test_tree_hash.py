"""bench/tree.py: every CSV names the tree that ran, not the commit that it came from."""

import shutil

from programs import ROOT, start

from bench.tree import FOLDERS, tree_hash


def copy_of(folder, change=None):
    """Return a tree of a file in each folder, some with names or bytes of their own."""
    files = {
        "bench/e.py": "e",
        "csrc/megamoe/a.cuh": "a",
        "jit/b.py": "b",
        "megamoe/formats/c.py": "c",
        "tools/d.py": "d",
    }
    for name, text in (files | (change or {})).items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def test_the_hash_is_of_names_and_bytes_of_all_sources(tmp_path):
    first = tree_hash(copy_of(tmp_path / "first"))
    assert len(first) == 12
    assert int(first, 16)
    same = {"docs/x.md": "text", "tools/__pycache__/d.pyc": "?", "out/y.csv": "1", ".git/HEAD": ""}
    assert tree_hash(copy_of(tmp_path / "same", same)) == first
    changes = [
        {name: "other"} for name in ("bench/e.py", "csrc/megamoe/a.cuh", "jit/b.py", "tools/d.py")
    ]
    changes += [{"megamoe/formats/c.py": "other"}, {"megamoe/new.py": ""}, {"csrc/x/y.h": "z"}]
    changes += [{"jit/b.py": None, "jit/renamed.py": "b"}, {"tools/d.py": None, "jit/d.py": "d"}]
    changes += [{"csrc/megamoe/a.cuh": "b"}, {"jit/b.py": "", "megamoe/formats/c.py": "bc"}]
    found = [tree_hash(copy_of(tmp_path / str(i), c)) for i, c in enumerate(changes)]
    assert len({first, *found}) == 1 + len(changes)


def test_a_table_names_changes_on_top_of_a_commit_and_a_copy_without_git(tmp_path):
    """In the first line of a table: a copy of the working tree, then the same with one line more."""
    titles = []
    for name in ("copy", "changed"):
        here = tmp_path / name
        for folder in FOLDERS:
            shutil.copytree(
                ROOT / folder, here / folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        if name == "changed":
            with (here / "csrc" / "megamoe" / "protocol" / "edges.h").open("a") as file:
                file.write("// another line\n")
        code = "from bench.tables import header; print(header())"
        done = start(["-c"], code, [here])
        assert done.returncode == 0, done.stderr
        titles.append(done.stdout)
        assert f"tree {tree_hash(here)}: " in titles[-1]
    assert f"tree {tree_hash(ROOT)}: " in titles[0]
    assert f"tree {tree_hash(ROOT)}: " not in titles[1]
