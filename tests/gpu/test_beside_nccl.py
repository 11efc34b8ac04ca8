"""A launch that shares its SMs is never one half of a deadlock with NCCL: the least that once was one.

Rank 0's host waits for an all-gather before it makes its launch; rank 1's all-gather comes behind its launch, which
waits for rank 0's. Long runs of it: tools/soak.py nccl, train_nccl.
"""

import time

import pytest
import torch
import torch.distributed as dist
from test_backward_gpu import NAMES, Case

from megamoe.backends.mega.backend import MegaBackend
from megamoe.testing import launch, same_bits

TIMEOUT_S = 4.0  # so that a deadlock is a fault soon


def on_ranks(rank, gradients):
    """Return what is wrong on this rank. gradients: whether they were recorded where the layer was made."""
    case, wrong = Case("bf16", ranks=2, rank=rank), []
    group, side = dist.group.WORLD, torch.cuda.Stream()
    with torch.set_grad_enabled(gradients):
        backend = MegaBackend(case.problem, group, timeout_s=TIMEOUT_S)
        case.plain(backend)
    piece, gathered = torch.zeros(1 << 20, device="cuda"), torch.zeros(2, 1 << 20, device="cuda")

    def gather(n):
        with torch.cuda.stream(side):
            piece.fill_(n + rank)
            dist.all_gather_into_tensor(gathered.view(-1), piece)

    y, state = case.forward(backend)
    made = case.backward(backend, state)
    plain = case.plain(backend)
    # The first launch without gradients of a layer made so takes its SMs and keeps them (docs/training.md).
    torch.cuda.synchronize()
    backend.window.group.barrier()
    gather(0)  # makes the communicator
    launches = {
        "forward": (lambda: [case.plain(backend)], [plain]),
        "train": (lambda: [case.forward(backend)[0]], [y]),
        "backward": (lambda: case.backward(backend, state), made),
    }  # fmt: skip
    if not gradients:
        launches.pop("forward")
    for n, (name, (call, expected)) in enumerate(launches.items(), start=1):
        torch.cuda.synchronize()
        backend.window.group.barrier()
        if rank == 0:
            gather(n)
            torch.cuda.synchronize()
            found = call()
        else:
            found = call()
            time.sleep(0.1)  # the launch has its SMs, and rank 0 waits
            gather(n)
        backend.check()
        wrong += [
            f"{name}: other bits of {what}"
            for what, a, b in zip(
                NAMES if name == "backward" else "y", found, expected, strict=True
            )
            if not same_bits(a, b)
        ]
        if [float(row.unique()) for row in gathered] != [n, n + 1]:
            wrong.append(f"{name}: a wrong all-gather")
        if rank == 1 and backend.num_ctas() > (backend.grid + 2) // 2:
            wrong.append(f"{name}: {backend.num_ctas()} CTAs took part without rank 0")
    backend.close()
    return wrong


@pytest.mark.ep(2, share=False)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_host_that_waits_for_an_all_gather_before_its_launch(gradients):
    outcomes = launch(on_ranks, 2, gradients, backend="cpu:gloo,cuda:nccl", timeout_s=90)
    assert outcomes == [[], []]
