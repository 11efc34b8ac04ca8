"""Meetings on a GPU: equal bits whoever meets, also where other work takes SMs in the middle."""

import time

import pytest
import torch
import torch.distributed as dist

from megamoe import Problem
from megamoe.backends.call import Call
from megamoe.backends.mega import backend as mega
from megamoe.backends.mega import sm_share as reserve
from megamoe.backends.select import make_backend
from megamoe.launch import meetings
from megamoe.launch.meetings import Meet
from megamoe.testing import launch, make_inputs, make_weights
from megamoe.testing.compare import same_bits

pytestmark = pytest.mark.gpu
MEETS = [
    Meet(many=4, mean_rows=1),
    Meet(many=1000, mean_rows=1, cycles=0),
    Meet(many=2, mean_rows=1, cycles=3000),
]


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_channel"])
def test_bits_do_not_depend_on_meetings(monkeypatch, precision):
    problem = Problem(1024, 768, 8, 4, max_tokens=4096, precision=precision)
    drawn = make_inputs(problem, 4096, device="cuda", ids_dtype=torch.int32)
    weights = make_weights(problem, device="cuda")
    call = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)
    found, beside = [], torch.cuda.Stream()
    for meet in (Meet(mean_rows=0), *MEETS):
        monkeypatch.setattr(meetings, "chosen", lambda *_, meet=meet: meet)
        backend = make_backend("mega", problem, None, device="cuda")
        for busy in (False, True):
            if busy:
                with torch.cuda.stream(beside):
                    for _ in range(20):
                        drawn.x @ drawn.x.t()
            found += [backend.forward(call)[0] for _ in range(5)]
            found.append(backend.forward(call, keep=problem.formats.trains)[0])
        backend.check()
        backend.close()
    assert all(same_bits(y, found[0]) for y in found)


# --- where pairs are slow, late or fewer: meetings run out, nothing hangs, bits stay ---

BUSY_CYCLES, SPINNERS = 300_000_000, 4
PATIENT = Meet(many=4, mean_rows=1, cycles=3000)  # a miss costs two units
TIMEOUT_S = 20.0  # of a wait in a launch: a hang is a fault soon


class Case:
    """A layer and its call, forward and training, with what they make where nobody meets."""

    def __init__(self, seed=0, hidden=1024, tokens=4096, ranks=1, rank=0):
        self.problem = Problem(hidden, 768, 8, 4, ep_size=ranks, rank=rank, max_tokens=tokens)
        drawn = make_inputs(
            self.problem, tokens, rank=rank, seed=seed, device="cuda", ids_dtype=torch.int32
        )
        weights = make_weights(self.problem, device="cuda")
        self.call = Call(drawn.x, drawn.topk_ids, drawn.topk_weights, weights)

    def backend(self, meet, group=None, **options):
        before, meetings.chosen = meetings.chosen, lambda *_: meet
        try:
            made = make_backend(
                "mega", self.problem, group, device="cuda", timeout_s=TIMEOUT_S, **options
            )
            self.both(made)  # arguments of both kinds are filled
        finally:
            meetings.chosen = before
        return made

    def both(self, backend):
        return [backend.forward(self.call)[0], backend.forward(self.call, keep=True)[0]]


def pairs_that_came(backend):
    """Return the most pairs at a meeting of the last launch. Waits."""
    backend.check()
    workspace = backend.window.workspace(backend.plan)
    return int(backend.plan.workspace["came"].view(workspace).max())


def test_sms_are_taken_in_the_middle(monkeypatch):
    """Of a row of launches: spinners on side streams begin where CTAs leave, so the next launch has fewer, or late."""
    monkeypatch.setattr(mega, "share_of", lambda *_, **__: reserve.Share(0, 20_000, 0))
    case, rows = Case(), 24
    backend = case.backend(Meet(mean_rows=0))
    expected = case.both(backend)
    backend.close()
    backend = case.backend(PATIENT)
    streams, mine = [torch.cuda.Stream() for _ in range(SPINNERS)], torch.cuda.Stream()
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    found = []
    for i in range(rows):
        for stream in streams[i % 2 :: 2]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000 + 50_000 * i)
        with torch.cuda.stream(mine):
            found += case.both(backend)
    torch.cuda.synchronize()
    backend.check()
    assert all(same_bits(y, expected[i % 2]) for i, y in enumerate(found))
    for stream in streams:  # and held all the while
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
    busy = [stream.record_event() for stream in streams]
    with torch.cuda.stream(mine):
        found = case.both(backend)
        done = mine.record_event()
    done.synchronize()
    assert not any(event.query() for event in busy), "the launch waited for SMs that were held"
    assert backend.num_ctas() < backend.grid
    assert all(same_bits(y, e) for y, e in zip(found, expected, strict=True))
    assert 1 < pairs_that_came(backend) <= backend.num_ctas() // 2
    backend.close()


def test_two_layers_on_two_streams():
    """Of one process, whose launches follow each other, in windows of their own: each has its own cells."""
    cases = [Case(), Case(seed=1, hidden=512, tokens=2048)]
    backends = [case.backend(Meet(mean_rows=0)) for case in cases]
    expected = [case.both(backend) for case, backend in zip(cases, backends, strict=True)]
    for backend in backends:
        backend.check()
        backend.close()
    backends = [case.backend(PATIENT) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for i, case in enumerate(cases):
            with torch.cuda.stream(streams[i]):
                found[i] += case.both(backends[i])
    torch.cuda.synchronize()
    for i, backend in enumerate(backends):
        assert all(same_bits(y, expected[i][n % 2]) for n, y in enumerate(found[i]))
        assert pairs_that_came(backend) > 1
        backend.close()


def in_time_slices(rank):
    """Return what is wrong. Both processes have the whole GPU in turns, so pairs stand still in the middle."""
    torch.cuda.set_device(0)
    case, wrong = Case(seed=rank), []
    backend = case.backend(Meet(mean_rows=0))
    expected = case.both(backend)
    backend.check()
    backend.close()
    backend = case.backend(PATIENT)
    dist.barrier()
    for n in range(100):
        wrong += [
            n for y, e in zip(case.both(backend), expected, strict=True) if not same_bits(y, e)
        ]
    if pairs_that_came(backend) < 2:
        wrong.append("nobody met")
    backend.close()
    return wrong


def test_two_processes_on_one_gpu():
    assert launch(in_time_slices, 2, timeout_s=180) == [[], []]


def beside_a_slow_rank(rank):
    """Return what is wrong. Rank 1 has 16 of its SMs, and a host that stops for a while before its launches."""
    group, wrong = dist.group.WORLD, []
    case = Case(ranks=2, rank=rank)
    backend = case.backend(Meet(mean_rows=0), group, reserve_sms=0)
    expected = case.both(backend)
    backend.check()
    backend.close()
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    backend = case.backend(PATIENT, group, reserve_sms=sms - 16 if rank == 1 else 0)
    for n in range(6):
        if rank == 1:
            torch.cuda.synchronize()
            time.sleep(0.3 * (n % 3))
        wrong += [
            n for y, e in zip(case.both(backend), expected, strict=True) if not same_bits(y, e)
        ]
    came, ctas = pairs_that_came(backend), backend.num_ctas()
    if not 1 < came <= ctas // 2:
        wrong.append(f"{came} pairs met of {ctas} CTAs")
    dist.barrier()
    backend.close()
    return wrong


@pytest.mark.ep(2)
def test_a_slow_rank():
    found = launch(beside_a_slow_rank, 2, backend="cpu:gloo,cuda:nccl", timeout_s=180)
    assert found == [[], []]
