"""Calls that repeat an earlier one's launches, on fibers behind what a GPU has: the bits of calls that repeat none."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from megamoe import ops
from megamoe.backends.emulate.emulation import run_alone
from megamoe.backends.emulate.memory import encode_emulated
from megamoe.jit import abi, host, module, quantize, recording
from megamoe.jit.recording import made
from megamoe.launch import cache, launches
from megamoe.ops import arguments, calls, groups, machines, operands, operators
from megamoe.ops.groups import Groups
from megamoe.testing.compare import same_bits

pytestmark = pytest.mark.stub
ROWS, HIDDEN, WIDTH, NUM = 150, 128, 128, 3


class OnFibers:
    """A launcher of one kernel: its run() takes the argument and the grid."""

    def __init__(self, kernel: Any, grid: Any, argument: Any, **options: Any) -> None:
        self.kernel, self.grid, self.argument = kernel, grid, argument

    def launch(self, stream: int) -> None:
        self.kernel.run(self.argument, self.grid)


@pytest.fixture
def on_fibers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let operators launch by machines.Gpu; returns the kernels that ran outside of repeated calls."""
    source = (Path(__file__).parents[2] / "emulate" / "quantize_test.cpp").read_text()
    library = ctypes.CDLL(str(host.build_source(source, ("-Wall", "-Wextra", "-Werror"))))
    gpu, seen = machines.Gpu(0), list[str]()

    def fill(variant: Any, launch: Any) -> module.Block:
        seen.append(str(variant))
        args = abi.aligned(abi.LAUNCHES[variant.launch])
        places, num = launch.fill(args), len(launch.tensors())
        arguments.write(places, [machines.ANYWHERE] * num, encode_emulated)
        kernel: Any = SimpleNamespace(device=0, run=lambda a, g: run_alone(variant, a, g, 0))
        return module.Block(OnFibers(kernel, 4, args), places, num)  # type: ignore[arg-type]

    def one_pass(device: int, entry: str) -> Any:
        def run(argument: Any, grid: tuple[int, int, int]) -> None:
            report = ctypes.create_string_buffer(1 << 12)
            end = ctypes.c_uint64(3), report, ctypes.c_size_t(1 << 12)
            name = entry.removeprefix("megamoe_").replace("quantize_weights", "quantize")
            function = getattr(library, name)
            assert function(ctypes.byref(argument), (ctypes.c_uint * 3)(*grid), *end) == 0

        return SimpleNamespace(device=0, run=run)

    def replace(place: int, base: int, device: int) -> None:
        ctypes.c_uint64.from_address(place).value = base

    for owner, name, value in (
        (gpu, "_fill", fill),
        *((o, "on_device", lambda device: nullcontext()) for o in (machines, calls)),
        *((o, "current_stream_handle", lambda ordinal: 0) for o in (machines, calls)),
        (calls, "allocator", lambda on_gpu: launches.allocator(False)),
        (operators, "machine_of", lambda device, variant: gpu),
        (operands, "kernels_for", lambda x: quantize),
        *((o, "on_hopper", lambda t: True) for o in (groups, cache)),
        *((o, "fused_kernels", lambda: quantize) for o in (groups, cache)),
        (torch.Tensor, "is_cuda", True),
        *((quantize, n, v) for n, v in (("_kernel", one_pass), ("Launcher", OnFibers))),
        (module, "replace_address", replace),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 0),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
    calls._plans.clear()
    return seen


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def given() -> tuple[Tensor, ...]:
    """Return x, w_up, w_down, offs and dy, elsewhere than those before."""
    ends = [0, *sorted(torch.randint(0, ROWS, (NUM - 1,)).tolist())]
    made = rand(ROWS, HIDDEN), rand(NUM, 2 * WIDTH, HIDDEN).mT, rand(NUM, HIDDEN, WIDTH).mT
    return *made, torch.tensor(ends, dtype=torch.int32), rand(ROWS, HIDDEN)


RECIPES = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def products(x: Tensor, up: Tensor, down: Tensor, offs: Tensor, dy: Tensor) -> list[Tensor]:
    x_q, of_x = operands.rows_by_group(x, Groups(offs), NUM)
    w_q, of_w = ops.quantize(up, RECIPES[1])
    scaled = x_q, w_q, of_x, RECIPES[0], of_w, RECIPES[1]
    return [
        ops.grouped_mm(x, up, offs=offs),
        *ops.grouped_mm_act(x, up, offs=offs, return_pre=True),
        ops.scaled_grouped_mm(*scaled, offs=offs),
        ops.grouped_mlp(x, up, down, offs=offs),
    ]


def step(
    x: Tensor, up: Tensor, down: Tensor, offs: Tensor, dy: Tensor, recipe: Any = None
) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, up, down)]
    y = ops.grouped_mlp(*leaves, offs=offs, recipe=recipe)
    out = torch.ones(NUM, HIDDEN, HIDDEN)
    ops.grouped_mm_wgrad(x.mT, dy, out=out, offs=offs)
    return [y, *torch.autograd.grad(y, leaves, dy), out]


BACKWARD = "grouped_mlp grouped_activation_gradient grouped_mm grouped_wgrad grouped_wgrad_add"
CASES = [
    (products, "grouped_mm grouped_mm_act grouped_mlp"),
    (step, BACKWARD),
    (partial(step, recipe="blockwise"), BACKWARD),
]


@pytest.mark.parametrize(("run", "names"), CASES, ids=["products", "step", "fp8"])
def test_repeated_calls_have_the_bits_of_others(run: Any, names: str, on_fibers: list[str]) -> None:
    torch.manual_seed(0)
    held = []
    for i in range(3):
        case = given()
        found = run(*case)
        held += [*case, *found]  # so that the next ones are elsewhere
        assert bool(on_fibers) == (i == 0)
        complete = {key[0].__name__ for key, plan in calls._plans.items() if plan and plan.complete}
        assert complete >= set(names.split())
        kept, calls._plans = calls._plans, {}
        expected = run(*case)
        calls._plans = kept
        on_fibers.clear()
        assert all(map(same_bits, found, expected))
        assert all(t.abs().sum() > 0 for t in found)


def test_what_a_plan_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, offsets in new memory, and null."""
    seen: list[list[int]] = []
    block: Any = SimpleNamespace(
        launcher=SimpleNamespace(kernel=SimpleNamespace(device=0)),
        launch=lambda addresses, stream: seen.append(addresses),
    )

    @calls.repeats
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        square, other = made(torch.empty(4, 4)), made(torch.empty(8))
        made(torch.empty(1))  # nothing needs it
        recording.launch(
            lambda: block, [x.data_ptr(), square.mT[1].data_ptr(), 0, other[4:].data_ptr()], 0
        )
        return other, square

    monkeypatch.setattr(calls, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(calls, "current_stream_handle", lambda ordinal: 0)
    monkeypatch.setattr(calls, "allocator", lambda on_gpu: launches.allocator(False))
    first, x = torch.zeros(64), torch.zeros(64)
    call(first)
    other, square = call(x)
    assert seen[1:] == [[x.data_ptr(), square.data_ptr() + 4, 0, other.data_ptr() + 16]]
    assert (other.shape, square.shape) == ((8,), (4, 4))
