"""The reference of docs/api.md, from the sources alone: nothing is imported, so no library of an adapter is needed."""

import ast
import re
import textwrap
from collections.abc import Iterator

from bench.tree import ROOT

WIDTH = 120
# Public in Python's sense, but for other modules of ours.
INNER = {"extra_repr", "handle", "is_open", "needs_close", "of_last"}
INNER |= {"cells", "of_cells", "of_tables", "refuse", "without_pool"}

# Classes whose methods stand with those of a class that is made of them.
PARTS = {
    "MegaMoELayer": (("megamoe.adapters.library_layer", "LibraryModule"),),
    "MegaRoutedExperts": (("megamoe.adapters.library_layer", "LibraryModule"),),
}

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


def first_paragraph(node: Definition) -> str:
    text = ast.get_docstring(node)
    if text is None:
        raise SystemExit(f"docs/api.md: {node.name} has no docstring")
    return flat(text.split("\n\n")[0])


def raises(node: Definition) -> str:
    """Return the sentences of a docstring that begin with "Raises"."""
    return " ".join(re.findall(r"\bRaises .*?\.(?= |$)", flat(ast.get_docstring(node) or "")))


def wrapped(text: str, indent: str = "") -> str:
    fill = textwrap.TextWrapper(
        WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return fill.fill(text)


def item(head: str, text: str) -> str:
    return wrapped(f"- `{head}`: {text}", "  ")


def methods(node: ast.ClassDef) -> Iterator[str]:
    """Yield an item each: the names of its arguments, its first paragraph, what it raises."""
    listed = definitions(node)
    for module, part in PARTS.get(node.name, ()):
        mixed_in = definitions(parse(module))[part]
        assert isinstance(mixed_in, ast.ClassDef)
        listed |= definitions(mixed_in)
    for name, method in listed.items():
        if name in INNER:
            continue
        taken = [] if "property" in decorators(method) else arguments(method)
        if taken and "staticmethod" not in decorators(method):
            taken = taken[1:]
        names = [re.split(r"[:= ]", a)[0] for a in taken]
        head = name if "property" in decorators(method) else f"{name}({', '.join(names)})"
        said = [first_paragraph(method)]
        if raises(method) not in said[0]:
            said.append(raises(method))
        yield item(head, " ".join(said))


def entry(name: str, node: Definition) -> str:
    """Return the section of one class or function."""
    parts = [
        f"### {name.rpartition('.')[2]}",
        signature(name, node),
        wrapped(first_paragraph(node)),
    ]
    if raises(node) and raises(node) not in first_paragraph(node):
        parts.append(wrapped(raises(node)))
    if isinstance(node, ast.ClassDef):
        listed = "\n".join(methods(node))
        parts += [listed] if listed else []
    return "\n\n".join(parts)


def reference() -> str:
    """Return the generated part of docs/api.md."""
    ours = exported()
    parts = ["## megamoe"]
    parts += [entry(f"megamoe.{n}", node) for n, node in ours.items() if not is_error(node)]
    listed = [item(f"megamoe.{n}", first_paragraph(d)) for n, d in ours.items() if is_error(d)]
    parts += ["## Errors", "\n".join(listed)]
    modules = {module: definitions(parse(module)) for module in adapters()}
    modules["megamoe.ops"] = exported("megamoe.ops")
    modules["megamoe.checkpoints"] = exported("megamoe.checkpoints")
    for module, found in modules.items():
        parts += [f"## {module}", *(entry(f"{module}.{n}", node) for n, node in found.items())]
    return "\n\n".join(parts)
