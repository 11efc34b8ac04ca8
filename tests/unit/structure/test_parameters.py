"""A function has at most seven parameters, Python's and C++'s: what belongs together is a record (AGENTS.md)."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOST = 7
OPTIONS = "public, of keyword arguments with defaults, as PyTorch's constructors and functions are"
HOST = "what another library calls, by its own signature"
OPERATOR = "torch.library takes tensors side by side, and no records"
EXCEPTIONS = {
    "megamoe/nn/module.py:MegaMoE.__init__": OPTIONS,
    "megamoe/nn/grouped_mlp.py:GroupedMLP.__init__": OPTIONS,
    "megamoe/formats/weights.py:ExpertWeights.from_nvfp4": OPTIONS,
    "megamoe/ops/functions.py:grouped_mm_act": OPTIONS,
    "megamoe/ops/functions.py:grouped_mm_dact": OPTIONS,
    "megamoe/ops/functions.py:scaled_grouped_mm": HOST,
    "megamoe/ops/functions.py:grouped_mlp": OPTIONS,
    "megamoe/backends/mega/backend.py:MegaBackend.__init__": OPTIONS,
    "megamoe/backends/emulate/emulation.py:Emulation.__init__": OPTIONS,
    "megamoe/backends/reference/backward.py:backward": "the oracle, which shares no records either",
    "megamoe/adapters/megatron.py:MegaMoELayer.__init__": HOST,
    "megamoe/adapters/sglang.py:Buffer.__init__": HOST,
    "megamoe/adapters/sglang.py:Installed.get_symm_buffer_for_mega_moe": HOST,
    "megamoe/adapters/sglang.py:Installed.fp8_mega_moe": HOST,
    "megamoe/adapters/vllm_experts.py:Experts.apply": HOST,
    "megamoe/adapters/vllm_experts.py:PrepareAndFinalize.prepare": HOST,
    "megamoe/ops/operators.py:grouped_mlp": OPERATOR,
    "megamoe/ops/operators.py:grouped_mm": OPERATOR,
    "megamoe/ops/operators.py:grouped_activation_gradient": OPERATOR,
}


def in_python(text: str) -> dict[str, int]:
    """Return the number of parameters of each function, but for self; *args and **kwargs are one each."""
    found = {}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                a = child.args
                names = [
                    x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if x
                ]
                own = bool(owner) and names[:1] in (["self"], ["cls"])
                found[owner + child.name] = len(names) - own
                visit(child, "")
            else:
                visit(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)

    visit(ast.parse(text), "")
    return found


def in_cpp(text: str) -> dict[str, int]:
    """Return the largest number of parameters of functions of each name that are defined: `name(...) const {`."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|^\s*#.*$', "0", text, flags=re.MULTILINE)
    found: dict[str, int] = {}
    for head in re.finditer(r"(\w+)\s*\(", text):
        end, depth, commas = head.end(), 1, 0
        while depth and end < len(
            text
        ):  # `<` of a template's arguments: no comparison stands in a head
            depth += (text[end] in "([{<") - (text[end] in ")]}>")
            commas += text[end] == "," and depth == 1
            end += 1
        is_head = re.match(r"\s*(?:const\s*)?(?:noexcept\s*)?(?:->[^;{]*)?(?:\{|:[^:])", text[end:])
        if is_head and head[1] not in ("if", "for", "while", "switch", "catch"):
            inside = text[head.end() : end - 1].strip()
            found[head[1]] = max(found.get(head[1], 0), commas + 1 if inside else 0)
    return found


def counted(*folders: str) -> dict[str, int]:
    counts = {}
    for path in (p for folder in folders for p in sorted((ROOT / folder).rglob("*"))):
        if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"):
            count = in_python if path.suffix == ".py" else in_cpp
            name = path.relative_to(ROOT).as_posix()
            counts |= {f"{name}:{of}": n for of, n in count(path.read_text()).items()}
    return counts


def test_functions_have_few_parameters():
    python, cpp = counted("megamoe", "jit", "bench", "tools"), counted("csrc")
    assert len(python) > 1500
    assert len(cpp) > 500
    many = {name: n for name, n in (python | cpp).items() if n > MOST}
    assert sorted(many.keys() - EXCEPTIONS.keys()) == []
    assert sorted(EXCEPTIONS.keys() - many.keys()) == [], "no exceptions any more"


def test_how_parameters_are_counted():
    python = """
def f(a, b, /, c, *args, d=1, **kwargs): pass
class A:
    def g(self, a): pass
    @classmethod
    async def h(cls, *, a, b): pass
    @staticmethod
    def i(a):
        def self_free(self): pass
"""
    assert in_python(python) == {"f": 6, "A.g": 1, "A.h": 2, "A.i": 1, "self_free": 1}
    cpp = """
#define MACRO(a, b, c) f(a, b, c) {}
// int gone(int a, int b) {
template <class T, int n>
MEGAMOE_DEVICE void f(Pair<int, T> a, int b[2],
                      const int (&c)[4], int (*d)(int, int)) {
    if (g(a, b, c, d, 5)) { call(1, 2); }
}
struct S {
    int x, y;
    S(int a, int b) : x(a), y(b) {}
    int get() const { return x; }
    int declared(int a, int b, int c);
};
"""
    found = in_cpp(cpp)
    assert {name: found[name] for name in ("f", "S", "get")} == {"f": 4, "S": 2, "get": 0}
    assert not found.keys() & {"gone", "MACRO", "declared", "call"}
