"""Generate the reference of docs/api.md from Google-style docstrings.

It reads source files and imports none of them, so the libraries of the adapters need not be installed.
"""

import ast
import re
import textwrap
from collections.abc import Iterator

from bench.tree import ROOT

WIDTH = 120
# Names without an underscore that only other modules of megamoe call.
INNER = {"cells", "extra_repr", "handle", "is_open", "needs_close", "of", "of_backend", "of_cells"}
INNER |= {"of_last", "together", "without_pool"}

# A class, and the base classes whose methods are listed with its own.
PARTS = {
    "MegaMoELayer": (("megamoe.adapters.library_layer", "LibraryModule"),),
    "MegaRoutedExperts": (("megamoe.adapters.library_layer", "LibraryModule"),),
}

SECTION = re.compile(r"^(Args|Returns|Raises):\n", re.MULTILINE)

Definition = ast.ClassDef | ast.FunctionDef


def parse(module: str) -> ast.Module:
    """Return the syntax of a module, `megamoe.core.config`; of a package, its __init__.py."""
    path = ROOT / module.replace(".", "/")
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def definitions(tree: ast.Module | ast.ClassDef) -> dict[str, Definition]:
    """Return the public classes and functions of a module or class."""
    found = [n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
    return {n.name: n for n in found if n.name == "__call__" or not n.name.startswith("_")}


def exported(package: str = "megamoe") -> dict[str, Definition]:
    """Return a package's __all__: name -> definition."""
    tree = parse(package)
    sources = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    homes = {alias.name: str(n.module) for n in sources for alias in n.names}
    stated = [
        n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    names = [name for name in ast.literal_eval(stated[0].value) if name != "__version__"]
    return {name: definitions(parse(homes[name]))[name] for name in names}


def adapters() -> list[str]:
    """Return the modules that users import; a part of one has an underscore in its name."""
    files = sorted((ROOT / "megamoe" / "adapters").glob("*.py"))
    return [f"megamoe.adapters.{file.stem}" for file in files if "_" not in file.stem]


def decorators(node: Definition) -> set[str]:
    return {re.split(r"[.(]", ast.unparse(d))[0] for d in node.decorator_list}


def is_error(node: Definition) -> bool:
    return isinstance(node, ast.ClassDef) and any("Error" in ast.unparse(b) for b in node.bases)


def arguments(node: Definition) -> list[str]:
    """Return what a call takes, with types and defaults; of a class, its constructor or its fields."""
    if isinstance(node, ast.ClassDef):
        made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not made:
            fields = (n for n in node.body if isinstance(n, ast.AnnAssign))
            return [ast.unparse(n) for n in fields]
        return arguments(made[0])[1:]
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    found = [argument(*pair) for pair in zip(plain, defaults, strict=True)]
    if args.vararg:
        found.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        found.append("*")
    found += [argument(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{ast.unparse(args.kwarg)}"] if args.kwarg else [])


def names(node: Definition) -> list[str]:
    """Return the names of what a call takes, without self."""
    bound = isinstance(node, ast.FunctionDef) and "staticmethod" not in decorators(node)
    found = [re.split(r"[:= ]", text)[0] for text in arguments(node) if text != "*"]
    return [name for n, name in enumerate(found) if n or not bound or name not in ("self", "cls")]


def argument(arg: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(arg)
    value = ast.unparse(default).replace("'", '"')
    return ast.unparse(arg) + (" = " if arg.annotation else "=") + value


def signature(name: str, node: Definition) -> str:
    """Return the call as a block of code, one argument a line where it is long."""
    given = arguments(node)
    returned = node.returns if isinstance(node, ast.FunctionDef) else None
    result = f" -> {ast.unparse(returned)}" if returned else ""
    line = f"{name}({', '.join(given)}){result}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {a},\n" for a in given) + f"){result}"
    return f"```python\n{line}\n```"


def flat(text: str) -> str:
    return " ".join(text.split())


def sections(node: Definition) -> dict[str, list[str]]:
    """Return a docstring's items by section; section "" holds its first paragraph."""
    text = ast.get_docstring(node)
    if text is None:
        raise SystemExit(f"docs/api.md: {node.name} has no docstring")
    head, *rest = SECTION.split(text)
    found = {"": [flat(head.split("\n\n")[0])]}
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        items = re.split(r"\n(?! )", textwrap.dedent(body).strip())
        found[title] = [flat(text) for text in items]
    return found


def summary(node: Definition) -> str:
    return sections(node)[""][0]


def details(node: Definition, indent: str = "") -> list[str]:
    """Return list items: each argument, what is returned, what is raised."""
    found = sections(node)
    items = [text.partition(": ") for text in found.get("Args", ())]
    described = [name for name, _, _ in items]
    if "Args" in found and described != (taken := names(node)):
        raise SystemExit(f"docs/api.md: {node.name} takes {taken}, its docstring has {described}")
    listed = [wrapped(f"{indent}- `{name}`: {text}", indent + "  ") for name, _, text in items]
    if "Returns" in found:
        listed.append(wrapped(f"{indent}- Returns: {' '.join(found['Returns'])}", indent + "  "))
    for text in found.get("Raises", ()):
        name, _, reason = text.partition(": ")
        listed.append(wrapped(f"{indent}- Raises `{name}`: {reason}", indent + "  "))
    return listed


def wrapped(text: str, indent: str = "") -> str:
    fill = textwrap.TextWrapper(
        WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return fill.fill(text)


def item(head: str, text: str) -> str:
    return wrapped(f"- `{head}`: {text}", "  ")


def methods(node: ast.ClassDef) -> Iterator[str]:
    """Yield the items of each method: its summary, and its details one level deeper."""
    listed = definitions(node)
    for module, part in PARTS.get(node.name, ()):
        mixed_in = definitions(parse(module))[part]
        assert isinstance(mixed_in, ast.ClassDef)
        listed |= definitions(mixed_in)
    for name, method in listed.items():
        if name in INNER:
            continue
        head = name
        if "property" not in decorators(method):
            given = [re.split(r"[:= ]", a)[0] for a in arguments(method)]
            plain = isinstance(method, ast.ClassDef) or "staticmethod" in decorators(method)
            head = f"{name}({', '.join(given if plain else given[1:])})"
        yield "\n".join([item(head, summary(method)), *details(method, "  ")])


def entry(name: str, node: Definition) -> str:
    """Return the section of one class or function: signature, text, arguments, methods."""
    text = SECTION.split(ast.get_docstring(node) or "")[0].strip()
    parts = [f"### {name.rpartition('.')[2]}", signature(name, node), wrapped(summary(node))]
    for paragraph in text.split("\n\n")[1:]:
        code = paragraph.startswith(" ")
        parts.append(f"```\n{paragraph}\n```" if code else wrapped(flat(paragraph)))
    parts += ["\n".join(listed)] if (listed := details(node)) else []
    if isinstance(node, ast.ClassDef) and (listed := list(methods(node))):
        parts += ["Methods and properties:", "\n".join(listed)]
    return "\n\n".join(parts)


def reference() -> str:
    """Return the generated part of docs/api.md."""
    ours = exported()
    parts = ["## megamoe"]
    parts += [entry(f"megamoe.{n}", node) for n, node in ours.items() if not is_error(node)]
    listed = [item(f"megamoe.{n}", summary(d)) for n, d in ours.items() if is_error(d)]
    parts += ["## Errors", "\n".join(listed)]
    modules = {module: definitions(parse(module)) for module in adapters()}
    modules["megamoe.ops"] = exported("megamoe.ops")
    modules["megamoe.checkpoints"] = exported("megamoe.checkpoints")
    for module, found in modules.items():
        parts += [f"## {module}", *(entry(f"{module}.{n}", node) for n, node in found.items())]
    return "\n\n".join(parts)
