"""Markers gpu, ep(n), slow, flaws: what needs which hardware or patience. One thread: the machine is shared.

With MEGAMOE_SHARE_GPUS=1 a GPU serves for four, but for ep(n, share=False).

torch is imported where tests are collected: xdist's controller starts the workers sooner without it.
"""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

# A pool of compilers imports torch again, for 8 s, which is more than there is to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Modules and collected tests are no garbage: looking for some among them takes a fifth of the time to collect.
gc.disable()

RANKS_OF_ONE = 4  # GPU that is shared: each waits for the time slices of all others

collect_ignore: list[str] = []
if find_spec("hypothesis") is None:  # a machine without a network, see tools/setup_env.sh
    files = Path(__file__).parent.rglob("test_*.py")
    collect_ignore += [str(p) for p in files if "from hypothesis import" in p.read_text()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in collect_ignore:
        terminalreporter.line(f"LEFT OUT, no hypothesis: {path}")


# What most ranks import that tests start: once in the fork server, not 0.3 s in each of them.
OF_RANKS = ["pytest", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]


def pytest_collection_finish() -> None:
    from megamoe.testing.launch import PRELOADED

    PRELOADED.extend(OF_RANKS)
    gc.freeze()
    gc.enable()


def pytest_collectstart() -> None:
    import torch

    torch.set_num_threads(1)


def _hopper_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    majors = [torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())]
    return sum(major == 9 for major in majors)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus, slow = _hopper_gpus(), os.environ.get("SLOW", "0") == "1"
    from megamoe.core.env import share_gpus

    # Workers steal from the end. Tests that share ranks' `results`, a fixture, come first: the ranks start once.
    items.sort(key=lambda item: "results" not in getattr(item, "fixturenames", ()))
    sharing = share_gpus()
    for item in items:
        needed = 1 if item.get_closest_marker("gpu") else 0
        if (ep := item.get_closest_marker("ep")) is not None:
            shared = sharing and ep.kwargs.get("share", True)
            needed = max(needed, -(-ep.args[0] // RANKS_OF_ONE) if shared else ep.args[0])
        if needed > gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} Hopper GPUs, found {gpus}"))
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with SLOW=1"))
        asked = slow or "flaws" in config.option.markexpr
        if item.get_closest_marker("flaws") and not asked:
            item.add_marker(pytest.mark.skip(reason="a planted flaw: run with -m flaws"))
