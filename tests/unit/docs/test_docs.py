"""The documents: generated tables are fresh, links and file names exist, lines are short."""

import ast
import contextlib
import inspect
import io
import re
import sys
import tokenize
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
from programs import ROOT, tool

import megamoe
from bench import api_reference as reference
from megamoe.jit import grouped
from megamoe.jit.grouped import ACTIVATIONS, PRODUCTS, grouped_variants

CSRC = ROOT / "csrc" / "megamoe"
MAX_COLUMNS = 120
MAX_WORDS = 25_700  # of prose: what is generated between markers is not counted
PLACES = ("bench", "csrc", "docs", "examples", "jit", "megamoe", "tests", "tools")
SUFFIXES = (".py", ".h", ".cuh", ".cu", ".cpp")
SOURCES = sorted(p for f in PLACES for p in (ROOT / f).rglob("*") if p.suffix in SUFFIXES)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *CSRC.rglob("*.md")])

LINK = re.compile(r"\]\(([^)\s]+)\)")
SUFFIX = r"\.(?:md|py|h|cuh|cpp|cu|c|sh|toml|txt)\b"
# with a known suffix (protocol/edges.h, args.h), or below a folder of ours (csrc/megamoe/roles/)
NAME = re.compile(rf"[\w.*-]+(?:/[\w.*-]+)*{SUFFIX}|\b(?:{'|'.join(PLACES)})/[\w./*-]*\w/?")
# Words that look like names of files and are none: formats, modules, other projects' headers, packages' parts.
NO_FILES = re.compile(r"torch\.\w+|megamoe\.\w+|sitecustomize\.py")


@lru_cache(maxsize=1)
def basenames():
    found = {path.name for place in PLACES for path in (ROOT / place).rglob("*")}
    return found | {path.name for path in ROOT.iterdir()}


def exists(name, document):
    """A path from the root, the document or csrc/megamoe, of sources from csrc too, * as in a shell; or a bare name."""
    if "/" not in name and "*" not in name:
        return name in basenames()
    bases = (ROOT, document.parent, CSRC, *([] if document.suffix == ".md" else [CSRC.parent]))
    return any(list(base.glob(name.rstrip("/"))) for base in bases)


def missing_links(text, document):
    targets = [t.split("#")[0] for t in LINK.findall(text) if not re.match(r"[a-z]+:", t)]
    return [t for t in targets if t and not (document.parent / t).exists()]


def missing_files(text, document):
    """Return what code spans and code blocks name and is not there. Outputs below out/ need not be."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    names = {n for c in code for n in NAME.findall(c) if not NO_FILES.match(n)}
    return sorted(n for n in names if not n.startswith(("out/", "/")) and not exists(n, document))


BEFORE = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)  # a statement


def comments(path):
    """Return what the comments and docstrings of a source say."""
    text = path.read_text()
    if path.suffix != ".py":
        return "\n".join(re.findall(r"//(.*)", text))
    found, begins = [], True  # a statement, as a docstring does
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (begins and token.type == tokenize.STRING):
            found.append(token.string)
        begins = token.type in BEFORE or (begins and token.type in (tokenize.COMMENT, tokenize.NL))
    return "\n".join(found)


def missing_places(text, source):
    """Return what comments name and is not there: files, and headings or bold leads behind the name of a guide."""
    flat = " ".join(re.sub(r"^\s*(#|//)", "", line).strip() for line in text.splitlines())
    names = set(re.findall(rf"(?<![\w/.:<-])[\w.*-]+(?:/[\w.*-]+)*{SUFFIX}", flat))
    found = {n for n in names if not NO_FILES.match(n) and not n.startswith(("out/", "OUT/"))}
    missing = [n for n in found if not exists(n, source)]
    for page, heading in re.findall(r"(?<![\w/])(docs/\w+\.md),? \"([^\"]+)\"", flat):
        if (ROOT / page).exists():
            lead = rf"^(#+ |\*\*){re.escape(heading)}\.?(\*\*|$)"
            if not re.search(lead, (ROOT / page).read_text().replace("`", ""), re.MULTILINE):
                missing.append(f'{page}, "{heading}"')
    return sorted(missing)


def long_lines(text):
    return [i for i, line in enumerate(text.splitlines(), 1) if len(line) > MAX_COLUMNS]


def gen_docs(*arguments):
    """Return the exit code and what was printed. In this process: starting one costs seconds."""
    said, argv = io.StringIO(), ["gen_docs.py", *map(str, arguments)]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(said):
        code = tool("gen_docs").main()
    return code, said.getvalue()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_and_file_names_exist(document):
    text = document.read_text()
    assert not missing_links(text, document)
    assert not missing_files(text, document)


def test_comments_name_what_exists():
    assert len(SOURCES) > 300
    # Of Python, those with something missing anywhere: to find comments in them takes longer.
    found = [p for p in SOURCES if p.suffix != ".py" or missing_places(p.read_text(), p)]
    missing = {str(p.relative_to(ROOT)): missing_places(comments(p), p) for p in found}
    assert not {name: places for name, places in missing.items() if places}


def test_comments_that_lost_what_they_name_are_seen(tmp_path):
    source = CSRC / "layout" / "args.h"
    said = 'rows may be wider, see formats/words.h,\n// formats/format.h and docs/tuning.md, "Gone\n// away"'
    assert missing_places(said, source) == ['docs/tuning.md, "Gone away"', "formats/words.h"]
    assert not missing_places('docs/fp4.md, "Expanded once, in memory", docs/*.md', source)
    planted = tmp_path / "a.py"
    planted.write_text('"""As tests/gone.py."""\n\n\ndef f():\n    x = "b/text.py"  # c/gone.h\n')
    assert missing_places(comments(planted), planted) == ["c/gone.h", "tests/gone.py"]
    planted = tmp_path / "a.cuh"
    planted.write_text('#include "a/gone.h"\nint x;  // docs/gone.md\n')
    assert missing_places(comments(planted), planted) == ["docs/gone.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_lines_are_short(document):
    assert not long_lines(document.read_text())


def unknown_decisions(text, decisions):
    """Return the cited numbers, "(0013)" or "0004, 0014", that are no heading of decisions.md."""
    numbers = re.findall(r"^### (\d{4}) ", decisions, re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 0
    cited = set(re.findall(r"(?<![\w.+-])00\d\d(?![\w.])", text))
    replaced = re.findall(r"replaces (\d{4})", decisions)
    return sorted(cited - set(numbers) - set(replaced))


def test_cited_decisions_exist():
    decisions = (ROOT / "docs" / "decisions.md").read_text()
    sources = [p for s in (".h", ".cuh", ".cu") for p in CSRC.rglob(f"*{s}")]
    cited = {str(p): unknown_decisions(p.read_text(), decisions) for p in [*DOCUMENTS, *sources]}
    assert not {name: numbers for name, numbers in cited.items() if numbers}
    assert unknown_decisions("see 0013, (0098) and 0099", decisions) == ["0098", "0099"]


def test_generated_tables_are_fresh():
    assert gen_docs("--check")[0] == 0


@pytest.mark.parametrize(
    ("document", "part", "fresh", "changed"),
    [
        ("README.md", "environment", "`MEGAMOE_LOG` | `warning`", "`MEGAMOE_LOG` | `error`"),
        ("docs/api.md", "api", "    max_tokens: int = 8192,", "    max_tokens: int = 4096,"),
        ("docs/measurements.md", "mxfp4", "| 372 | 503 |", "| 371 | 503 |"),
    ],
)
def test_a_stale_part_is_seen(document, part, fresh, changed, tmp_path):
    text = (ROOT / document).read_text()
    assert fresh in text
    stale = tmp_path / Path(document).name
    stale.write_text(text.replace(fresh, changed))
    code, said = gen_docs("--check", "--file", stale)
    assert code == 1
    assert f"'{part}' is stale" in said
    assert gen_docs("--file", stale)[0] == 0
    assert stale.read_text() == text


def test_each_grouped_kernel_is_named_where_kernels_are_exported():
    """Who exports some kernels for machines without a compiler has to know which a layer or an operator loads."""
    assert {v.product for v in grouped_variants()} == {*PRODUCTS}
    table = (ROOT / "docs" / "ops.md").read_text().partition("grouped- stage ")[2]
    named = set(re.findall(r"(?<![\w`])-[a-z0-9_-]+", table.partition("```")[0]))
    parts = grouped._OPERANDS, grouped._OUTPUTS, grouped._KINDS, grouped._ORDERS
    kinds = {f"-{kind}" for kind in ACTIVATIONS}
    assert named - kinds == {name for part in parts for name in part if name}
    readme = re.findall(r"grouped-(kept-[a-z0-9-]+)", (ROOT / "README.md").read_text())
    assert {*readme} == {name for name in PRODUCTS if name.startswith("kept-")}


def test_the_reference_has_what_python_sees():
    """It is made from sources alone; names and arguments are those of the imported package."""
    found = reference.exported()
    assert {*found, "__version__"} == set(megamoe.__all__)
    for name, node in found.items():
        if not reference.is_error(node):
            seen = inspect.signature(getattr(megamoe, name)).parameters
            stated = [re.match(r"\W*(\w+)", a) for a in reference.arguments(node)]
            assert [s[1] for s in stated if s] == list(seen), name


def undescribed(name, node):
    """Return the calls of a public name that take arguments and have no `Args:`; methods of ours alone are listed."""
    calls = {name: node}
    if isinstance(node, ast.ClassDef):
        methods = reference.definitions(node).items()
        calls |= {f"{name}.{n}": m for n, m in methods if n not in reference.INNER}
    sections = {n: reference.sections(call) for n, call in calls.items()}
    return [n for n, call in calls.items() if reference.names(call) and "Args" not in sections[n]]


def test_docstrings_describe_each_argument():
    """Methods of adapters are free: the library that calls them defines their arguments."""
    packages = [reference.exported(f"megamoe{p}") for p in ("", ".ops", ".checkpoints")]
    public = {name: node for found in packages for name, node in found.items()}
    assert len(public) > 35
    listed = {name: node for name, node in public.items() if not reference.is_error(node)}
    assert not [call for name, node in listed.items() for call in undescribed(name, node)]
    planted = ast.parse(
        'def f(a, *, b=1, **c):\n    """Add.\n\n    Args:\n        a: One.\n    """'
    ).body[0]
    assert undescribed("f", ast.parse('def f(a):\n    """Add."""').body[0]) == ["f"]
    with pytest.raises(SystemExit, match="takes .'a', 'b', '..c'., its docstring has .'a'."):
        reference.details(planted)


def words(text):
    """Return the number of words outside of code blocks and generated parts; rules and bars of tables are none."""
    apart = r"^```.*?^```$|<!-- ([\w-]+): begin.*?<!-- \1: end -->"
    prose = re.sub(apart, "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(1 for word in prose.split() if re.search(r"\w", word))


def test_the_guides_stay_short():
    """A page that grows takes words from another: what was tried, and when, is in the history."""
    guides = [p for p in DOCUMENTS if p.stem != "api" and not p.is_relative_to(CSRC)]
    assert sum(words(p.read_text()) for p in guides) <= MAX_WORDS
    assert words("One two.\n\n```\nthree\n```\n\n| four | -> |\n|---|---|\n") == 3


def reading_list():
    """Return the files that README says to read, in its order."""
    text = (ROOT / "README.md").read_text().partition("\n## Read the code\n")[2]
    items = re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
    return [ROOT / name for item in items for name in re.findall(r"`([^`]+)`", item)]


def test_the_reading_list_is_as_short_as_it_says():
    lines = sum(len(path.read_text().splitlines()) for path in reading_list())
    said = re.search(r"about ([\d,]+) lines", (ROOT / "README.md").read_text())[1]
    assert len(reading_list()) == 11
    assert lines <= 2500
    assert abs(lines - int(said.replace(",", ""))) < 100


def test_planted_mistakes_are_seen():
    document = ROOT / "docs" / "architecture.md"
    text = "[a](protocol.md) [b](gone.md#x) [c](https://example.org/gone.md)\n" + "x" * 121
    assert missing_links(text, document) == ["gone.md"]
    assert long_lines(text) == [2]
    text = "`csrc/megamoe/roles/`, `roles/load.cuh`, `args.h`, `tools/gone.py --x`, `gone.h`, `jit/gone/`"
    assert missing_files(text, document) == ["gone.h", "jit/gone/", "tools/gone.py"]
