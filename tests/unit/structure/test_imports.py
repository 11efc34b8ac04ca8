"""`import megamoe` and every command's --help import nothing that takes long beside torch itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Half a second or more together (2026-11-24); who uses them has imported them.
LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor",
        "torch.distributed.checkpoint", "transformers", "safetensors", "matplotlib", "numba")  # fmt: skip
CODE = """
import contextlib, io, runpy, sys
import torch
before = set(sys.modules)
import megamoe
late = {late!r}
assert "torch._dynamo" not in before
def came(what):
    found = [name for name in late if name in sys.modules and name not in before]
    assert not found, (what, found)
came("import megamoe")
layer = megamoe.MegaMoE(64, 48, 6, 2, backend="staged")
weights, ids = torch.rand(10, 6).topk(2)
with torch.no_grad():
    layer(torch.randn(10, 64).bfloat16(), ids, weights)
came("inference")
for command in {commands!r}:
    said, sys.argv = io.StringIO(), [command, "--help"]
    with contextlib.redirect_stdout(said):
        try:
            if command.endswith(".py"):
                sys.path.insert(0, {root!r} + "/tools")
                runpy.run_path({root!r} + "/tools/" + command, run_name="__main__")
            else:
                runpy.run_module(command, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (command, end.code)
    assert "usage:" in said.getvalue(), command
    came(command)
print("all", len({commands!r}))
sys.modules[late[-1]] = sys
came("a planted name")
"""


def commands():
    tools = [p.name for p in (ROOT / "tools").glob("*.py") if p.name != "command.py"]
    return ["megamoe.jit", "megamoe.checkpoints", *sorted(tools)]


def test_nothing_slow_is_imported():
    """Nor where a layer is called without gradients. The last name is planted."""
    code = CODE.format(late=LATE, commands=commands(), root=str(ROOT))
    start = [sys.executable, "-c", code]  # not by programs.py, whose process has imported megamoe
    done = subprocess.run(start, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout == f"all {len(commands())}\n", done.stderr
    assert "AssertionError: ('a planted name', ['numba'])" in done.stderr
    assert len(commands()) > 15


def test_what_is_not_installed_is_one_line():
    """An adapter, or a command, names what to install instead of what it failed to import."""
    code = """
import importlib, io, sys, contextlib
import megamoe
class Missing:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "megatron", "flashinfer", "vllm", "safetensors", "torchtitan"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
for name in ("transformers", "megatron", "flashinfer", "vllm", "torchtitan"):
    try:
        importlib.import_module(f"megamoe.adapters.{name}")
    except ImportError as error:
        print(error)
from megamoe.checkpoints.__main__ import main as convert
with open("model.safetensors", "wb") as file:
    file.write(b"x")
said = io.StringIO()
with contextlib.redirect_stderr(said):
    print(convert([".", "made", "--to", "megamoe"]), said.getvalue())
"""
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, "-c", code]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGAMOE_LOG": "loud"}
        done = subprocess.run(start, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "MEGAMOE_LOG is 'loud', expected one of debug, info, warning, error, critical; it is 'warning'"
    ]
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines == [
        "megamoe.adapters.transformers needs transformers: pip install 'megamoe[hf]'",
        "megamoe.adapters.megatron needs megatron.core: pip install 'megamoe[megatron]'",
        "megamoe.adapters.flashinfer needs flashinfer: pip install 'megamoe[flashinfer]'",
        "megamoe.adapters.vllm needs vllm: pip install 'vllm'",
        "megamoe.adapters.torchtitan needs torchtitan, spmd_types: pip install 'megamoe[torchtitan]'",
        "1 megamoe.checkpoints: safetensors is not installed: pip install 'megamoe[checkpoints]'",
    ]
