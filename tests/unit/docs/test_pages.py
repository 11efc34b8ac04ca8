"""Every block of README.md and docs/*.md: programs run as pasted, in the order of their page, commands are parsed.

The word behind a fence's language says what runs the block: nothing, this file, in fresh processes on CPUs; another
word, the test that ELSEWHERE names. A block, or a page with programs, that no table here has fails.
"""

import ast
import re
import shlex
import textwrap

import pytest
from pages import ROOT, blocks, programs
from programs import run_code, torchrun

PAGES = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
SIGNATURES = "docs/api.md"  # its blocks are no programs: tools/gen_docs.py writes them, test_docs.py compares them
ELSEWHERE = {  # page, word -> the test that asks pages.programs() for these
    ("README.md", "gpu"): "tests/unit/docs/test_pages.py",  # with gloo and small sizes
    ("README.md", "adapters"): "tests/unit/docs/test_pages.py",  # statements of docs/adapters.md
    ("docs/training.md", "gpu"): "tests/gpu/test_training_gpu.py",
    ("docs/adapters.md", "hf"): "tests/unit/hf_models.py",
    ("docs/adapters.md", "peft"): "tests/libraries/test_peft.py",
    ("docs/adapters.md", "megatron"): "tests/libraries/test_megatron.py",
    ("docs/adapters.md", "flashinfer"): "tests/libraries/test_flashinfer.py",
    ("docs/adapters.md", "library"): "tests/unit/adapters/test_library_layer.py",
    ("docs/adapters.md", "nvfp4"): "tests/unit/checkpoints/test_nvfp4_checkpoints.py",
    ("docs/adapters.md", "checkpoints"): "tests/unit/checkpoints/test_checkpoints.py",
}
# page -> ranks, and what must be true behind its last program
RUN = {
    "README.md": (1, """
        assert y.shape == (10, 64) and y.isfinite().all()
        dense = torch.zeros(50, 9).scatter_(1, topk_ids.where(topk_ids >= 0, 8), topk_weights)[:, :8]
        assert torch.equal(dense, probs * routing_map)
        assert torch.equal((topk_ids >= 0).sum(1), routing_map.sum(1))
        assert (topk_ids < 0).any()
    """),
    "docs/hosts.md": (4, """
        with torch.no_grad():
            assert torch.equal(layer(x, ids, weights), flat(x, ids, weights))
        assert type(layer._layer._runtime.backend).__name__ == "HostsBackend"
        assert x.grad.any() and layer.w13.grad.isfinite().all()
        dist.destroy_process_group()
    """),
    "docs/ops.md": (1, """
        once = ops.grouped_mlp(x, w_up, w_down, offs=offs)
        assert y.shape == (300, 64)
        assert all((found - once).norm() < 0.1 * once.norm() for found in (y, y_e4m3))
        assert all(t.grad.any() for t in (x, w_up, w_down))
    """),
    "docs/serving.md": (2, """
        assert y.shape == (32, 64) and y.isfinite().all() and not y[5:].any()
        with torch.no_grad():
            unrounded = trained(x, ids, weights)[:5]
        assert (y[:5] - unrounded).norm() < 0.1 * unrounded.norm()
        assert again.isfinite().all() and not torch.equal(again[:5], y[:5])
        assert layer.problem.ep_size == 2
        dist.destroy_process_group()
    """),
    "docs/training.md": (2, """
        begin, held = net.moe.problem.expert_begin(), net.moe.problem.num_local_experts()
        assert torch.equal(alone.moe.w13[begin : begin + held], net.moe.w13)
        own = optimizer.state[net.moe.w13]["exp_avg"]
        assert own.any()
        assert torch.equal(other.state[alone.moe.w13]["exp_avg"][begin : begin + held], own)
        assert (ranks, net.moe.problem.ep_size, held) == (2, 2, 3)
        assert list(distributed.moe.w13.shape) == [6, 96, 64]
        assert 0 < loss < 10
        norms = [None, None]
        dist.all_gather_object(norms, float(total_norm))
        assert 0 < norms[0] == norms[1]
        dist.destroy_process_group()
    """),
}  # fmt: skip
SMALLER = {
    "hidden=7168": "hidden=64", "intermediate=2048": "intermediate=48", "num_experts=256": "num_experts=6",
    "top_k=8": "top_k=2", "max_tokens=8192": "max_tokens=16", "8192, 7168": "10, 64", "8192, 256": "10, 6",
    "topk(8)": "topk(2)", '"cuda"': '"cpu"', '"nccl"': '"gloo"', "torch.cuda.set_device": "print",
    "MegaMoE(7168, 2048, 256, 8,": "MegaMoE(64, 48, 6, 2,",
}  # fmt: skip
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
OF_LIBRARIES = ("vllm serve ", "python -m sglang.launch_server ")  # their commands' own options


def under_torchrun(code, folder, ranks):
    """Run a program on so many ranks; return what failed."""
    # Without a name that a program could use and forget to import.
    code = f"__import__('os').chdir({str(folder)!r}); __import__('torch').manual_seed(0)\n{code}"
    return "\n".join(d.stderr for d in torchrun(ranks, ["-c"], code) if d.returncode)


def outline(text):
    return textwrap.dedent(text).strip()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_by_something(page):
    for kind, text in blocks(page):
        language, _, word = kind.partition(" ")
        if language == "":  # drawings and formulas
            assert not re.search(
                r"^(\S+=\S+ )*(python|torchrun|make|pip|\.venv/|tools/|import|from) ?", text, re.M
            ), text
        elif language == "sh":
            assert not word
        elif page == SIGNATURES:
            assert kind == "python"
        else:
            assert language == "python", kind
            assert (page, word) in ELSEWHERE if word else page in RUN, kind
    if page == SIGNATURES:
        own = re.sub(
            r"<!-- (\w+): begin.*?<!-- \1: end -->", "", (ROOT / page).read_text(), flags=re.S
        )
        assert "```" not in own


@pytest.mark.parametrize(("page", "word"), ELSEWHERE)
def test_what_runs_elsewhere_is_run_there(page, word):
    assert programs(page, word)
    assert f'programs("{page}", "{word}")' in (ROOT / ELSEWHERE[page, word]).read_text()


@pytest.mark.parametrize("page", RUN)
def test_pages_run_as_pasted(page, tmp_path):
    ranks, claims = RUN[page]
    assert programs(page)
    code = "\n".join([*programs(page), outline(claims)])
    assert not under_torchrun(code, tmp_path, ranks)


def test_programs_of_the_readme_for_gpus(tmp_path):
    """One behind the other, by one rank on the CPU with small sizes."""
    code = "\n".join(programs("README.md", "gpu"))
    for large, small in SMALLER.items():
        assert large in code
        code = code.replace(large, small)
    code += "\nassert y.shape == (10, 64) and y.isfinite().all() and mesh.shape == (1, 1)"
    assert not under_torchrun(code, tmp_path, 1)
    assert "argument: 'hidden'" in under_torchrun(code.replace("hidden=", "hiden="), tmp_path, 1)


def test_the_readme_calls_adapters_as_their_page_does():
    """So that what runs that page's programs runs README's lines, too. Commands likewise."""

    def statements(texts):
        return {ast.dump(s) for text in texts for s in ast.parse(text).body}

    def of_libraries(page):
        return [c for kind, text in blocks(page) if kind == "sh" for c in calls(text)]

    shown = statements(t for kind, t in blocks("docs/adapters.md") if kind.startswith("python"))
    called = statements(programs("README.md", "adapters"))
    assert len(called) == 5
    assert called <= shown
    commands = [c for c in of_libraries("README.md") if re.search("torchtitan|vllm|sglang", c)]
    assert len(commands) == 3
    assert {*commands} <= {*of_libraries("docs/adapters.md")}


PARSE = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def parsed(self, *args, **options):
    parse(self, *args, **options)
    sys.exit("parsed")
argparse.ArgumentParser.parse_args = parsed
run = {"file": runpy.run_path, "module": runpy.run_module}
for kind, name, arguments in COMMANDS:
    sys.argv = [name, *arguments]
    try:
        run[kind](name, run_name="__main__")
    except SystemExit as end:
        assert end.code == "parsed", (name, arguments, end.code)
    else:
        raise AssertionError((name, "parses nothing"))
"""


def calls(text):
    """Return the commands of a block, without comments and line breaks."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def commands(text):
    """Return what a block of commands asks Python for, as PARSE takes it. Raises for what is no command of ours."""
    found = []
    for line in calls(text):
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if not words or " ".join(words).startswith(OF_LIBRARIES):
            continue
        program, *arguments = words
        if program == "make":
            targets = [a for a in arguments if "=" not in a]
            assert targets, line
            assert set(targets) <= set(TARGETS), line
        elif program == "torchrun":
            found.append(["module", "torch.distributed.run", arguments])
        else:
            assert program in ("python", ".venv/bin/python"), line
            if arguments[0] == "-m":
                found.append(["module", *arguments[1:2], arguments[2:]])
            else:
                found.append(["file", str(ROOT / arguments[0]), arguments[1:]])
    return found


def test_commands_are_parsed():
    found = [
        c for page in PAGES for kind, text in blocks(page) if kind == "sh" for c in commands(text)
    ]
    assert {name.rpartition("/")[2] for _, name, _ in found} >= {
        "rank_check.py",
        "megamoe.jit",
        "megamoe.checkpoints",
    }
    run_code(f"COMMANDS = {found!r}\n{PARSE}")
    for wrong in ("make fly", "nothing --help"):
        with pytest.raises(AssertionError):
            commands(wrong)
    gone = commands("python tools/rank_check.py --gone")
    with pytest.raises(AssertionError, match="unrecognized arguments: --gone"):
        run_code(f"COMMANDS = {gone!r}\n{PARSE}")
