"""Groups, transports and the window, with threads as ranks and CPU memory."""

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from thread_group import ThreadGroup

from megamoe.core.config import ACTIVATIONS, Problem
from megamoe.core.errors import ConfigError, RankMismatch, UnreachablePeer, WindowBroken
from megamoe.group.group import Group
from megamoe.window.allocators import checked_peers, choose
from megamoe.window.window import Window, WindowSpec

PROBLEM = Problem(64, 32, 4, 2, ep_size=2, max_tokens=40)


def on_threads(function, size=2):
    """Run function(member) on `size` threads; return results or exceptions by rank."""
    results = [None] * size

    def body(member):
        try:
            results[member.rank] = function(member)
        except Exception as error:
            results[member.rank] = error

    threads = [
        threading.Thread(target=body, args=(m,)) for m in ThreadGroup.create(size, timeout_s=20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def window(member, **changes):
    return Window(replace(PROBLEM, rank=member.rank, **changes), member, device="cpu")


def test_ranks_see_each_others_memory():
    def body(member):
        made = window(member)
        made.regions["window_staged"].view(made.memory)[member.rank] = 7 + member.rank
        member.barrier()
        found = made.bases, made.memory.data_ptr(), made.memory.count_nonzero().item()
        made.close()
        made.close()
        return found

    (bases, first, count), (others, second, _) = on_threads(body)
    assert bases == others == [first, second]
    assert first % 256 == second % 256 == 0
    assert count == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 80),
        ("max_tokens", 41),
        ("num_experts", 5),
        ("activation", ACTIVATIONS["swiglu_oai"]),
    ],
)
def test_mismatch_names_rank_and_field(field, value):
    def body(member):
        return window(member, **({field: value} if member.rank == 1 else {}))

    for error in on_threads(body):
        assert isinstance(error, RankMismatch)
        assert "on rank 1" in str(error)
        assert field in str(error)


def test_wrong_rank_and_size_are_named():
    def swapped(member):
        return Window(replace(PROBLEM, rank=1 - member.rank), member, device="cpu")

    assert all("Problem.rank = 1" in str(error) for error in on_threads(swapped))
    with pytest.raises(ConfigError, match="ep_size is 2, expected 1"):
        Window(PROBLEM, None, device="cpu")


def test_reset_clears_the_control_regions_only():
    def body(member):
        made = window(member)
        for name in ("window_abort", "window_ready", "window_ids"):
            made.regions[name].view(made.memory).fill_(3)
        made.fault.edge = 4
        raised = []
        for _ in range(2):
            try:
                made.poll()
            except Exception as error:
                raised.append(type(error).__name__)
        made.reset()
        made.poll()
        left = {
            name: bool(region.view(made.memory).view(torch.uint8).any())
            for name, region in made.regions.items()
        }
        made.close()
        try:
            made.poll()
        except WindowBroken as error:
            raised.append(str(error))
        return raised, {name for name, nonzero in left.items() if nonzero}

    for raised, left in on_threads(body):
        assert raised == ["ProtocolTimeout", "WindowBroken", "this window is closed"]
        assert left == {"window_ids"}


def test_epochs_go_on_after_a_reset():
    """Behind those of all ranks: a state says which launch made it, and no two may say the same."""

    def body(member):
        made = window(member)
        made.epoch_cell.fill_(5 + member.rank)
        made.reset()
        found = made.epoch()
        made.close()
        return found

    assert on_threads(body) == [7, 7]


def test_deleting_an_open_window_warns_and_keeps_the_memory():
    def body(member):
        made = window(member)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del made
        return [w.category for w in caught]

    categories = sum(on_threads(body), [])
    assert ResourceWarning in categories


def test_shared_windows_bound_tokens_and_equal_the_rest():
    spec = WindowSpec.of(PROBLEM)
    assert (
        spec.mismatch(replace(PROBLEM, max_tokens=8, num_experts=9, intermediate=64, bias=True))
        is None
    )
    for name, value in (("hidden", 80), ("top_k", 3), ("precision", "fp8"), ("max_tokens", 41)):
        assert name in spec.mismatch(replace(PROBLEM, **{name: value}))


def test_unreachable_peers_are_named():
    member = ThreadGroup.create(4)[1]
    assert checked_peers([1, 2, 3, 4], member) == [1, 2, 3, 4]
    with pytest.raises(UnreachablePeer, match="rank 1 cannot map the memory of rank 0, 3"):
        checked_peers([0, 2, 3, None], member)


def test_groups_and_transports_by_name():
    assert (Group.of(None).size, Group.of(None).in_process) == (1, True)
    assert choose("auto", Group()).__module__.endswith(".single_process")
    remote = Group()
    remote.in_process, remote.size = False, 2
    assert Group.of(remote) is remote
    assert choose("auto", remote).__module__.endswith(".symm_mem")
    assert choose("nvshmem", remote).__module__.endswith(".nvshmem")
    with pytest.raises(ConfigError, match="transport"):
        choose("pigeon", remote)
    with pytest.raises(UnreachablePeer, match="process group"):
        choose("symm_mem", remote)(256, torch.device("cpu"), remote)


def test_a_rank_without_memory_is_named_on_all():
    """Red before: the others waited for it in the barrier behind the allocation."""

    def failing(nbytes, device, group):
        if group.rank == 1:
            raise torch.OutOfMemoryError("no memory left")
        return choose("single_process", Group())(nbytes, device, Group())

    def body(member):
        return Window(replace(PROBLEM, rank=member.rank), member, device="cpu", transport=failing)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        first, second = on_threads(body)
    assert "rank 1 raised OutOfMemoryError: no memory left" in str(first)
    assert isinstance(second, torch.OutOfMemoryError)
