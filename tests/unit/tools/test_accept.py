"""The steps of tools/accept.sh, on any number of GPUs: every command of theirs is one that its tool takes."""

import argparse
import os
import runpy
import shlex
import subprocess
import sys

import pytest
from programs import ROOT

# Stand for python, make and nvidia-smi: say what GPUs there are, and write down what else was to be done.
PROGRAMS = {
    "python": """[ "$1" = -c ] && echo {gpus} && exit
echo "${{CUDA_VISIBLE_DEVICES-all}} ${{NCCL_P2P_DISABLE-0}} $(printf '%q ' "$@")" >> {folder}/log""",
    "make": 'echo "$@" >> {folder}/made',
    "nvidia-smi": "echo 143771",
}
STEPS = (
    "random",
    "backward_random",
    "shapes",
    "backward_shapes",
    "channel",
    "fp4",
    "panels",
    "overload",
)


class Parsed(Exception):
    """The arguments were taken."""


def commands(folder, gpus):
    """Return (visible GPUs, whether by sockets, words) of what the script runs on so many GPUs, and names of steps."""
    for name, text in PROGRAMS.items():
        program = folder / name
        program.write_text("#!/usr/bin/env bash\n" + text.format(gpus=gpus, folder=folder) + "\n")
        program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    variables = os.environ | {"PYTHON": str(folder / "python"), "PATH": path}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    script = [ROOT / "tools" / "accept.sh", folder / "out"]
    done = subprocess.run(
        script, env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    lines = [shlex.split(line) for line in (folder / "log").read_text().splitlines()]
    said = [line.split() for line in done.stdout.splitlines()]
    assert all(verdict == "ok:" for verdict, *_ in said)
    return [(seen, sockets == "1", words) for seen, sockets, *words in lines], {
        name.rstrip(",") for _, name, *_ in said
    }


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def steps(request, tmp_path_factory):
    return request.param, *commands(tmp_path_factory.mktemp("accept"), request.param)


def test_every_size_of_a_group_is_judged(steps):
    gpus, found, names = steps
    for ranks in (1, 2, 4, 8):
        here = ranks <= max(gpus, 2)  # two ranks share one GPU
        named = {f"{step}_ep{ranks}" for step in STEPS}
        assert named & names == (named if here else set())
        judges = {
            seen
            for seen, _, words in found
            if words[0] == "tools/rank_check.py" and words[words.index("--ranks") + 1] == str(ranks)
        }
        assert bool(judges) == here
        if 1 < ranks <= gpus:
            assert judges == {",".join(map(str, range(ranks)))}
    assert any(sockets for _, sockets, _ in found) == (gpus > 1)


def test_every_tool_takes_its_arguments(steps, monkeypatch):
    def parse(self, *given):
        try:
            namespace, further = self.parse_known_args(*given)
        except SystemExit:
            pytest.fail(f"{sys.argv}: not taken")
        assert not further, sys.argv
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tools = [words for _, _, words in steps[1] if words[0].startswith("tools/")]
    assert len({words[0] for words in tools}) >= 5
    for words in tools:
        monkeypatch.setattr(sys, "argv", list(words))
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
