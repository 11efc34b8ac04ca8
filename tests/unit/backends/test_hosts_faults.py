"""Calls over hosts that fail: every rank raises, and names the rank that began it and its host; then right again."""

import os
import socket
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_hosts import Case, along, be_on_host, inputs, made, step
from programs import fresh

from bench.hosts import spin
from megamoe import MegaMoEError, Problem, ProtocolTimeout, RankMismatch
from megamoe.backends.call import Call
from megamoe.group.order import Mark
from megamoe.testing import launch, make_inputs, make_weights

TIMEOUT_S = 2.0
BOUND_S = 2 * TIMEOUT_S + 2
EXACT = Case(over={"chunks": 2})
STATIC = Case(over={"chunks": 2, "exchange": "static"})


def failed(call):
    """Return the error of a call, as text, and how long it took."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


class Rank:
    """One rank with a layer that has been right once."""

    def __init__(self, rank, case, group=None):
        self.rank, self.case, self.group = rank, case, group or dist.group.WORLD
        self.call = inputs(case, rank)
        self.layer = self.made()
        self.expected = self.step()

    def made(self):
        return made(self.case, self.group, **self.case.over)

    def step(self, layer=None):
        return step(layer or self.layer, self.case, *self.call)

    def wrong(self):
        """Make a call that is refused here."""
        x, *rest = self.call
        self.layer(x.float(), *rest[:2])

    def passes(self, second):
        """Make two calls and the backward pass of one of them."""
        x, ids, weights, dy = self.call
        calls = [self.layer(t.clone().requires_grad_(), ids, weights) for t in (x, 2 * x)]
        calls[second].backward(dy)

    def transposed(self, back):
        """Make a call, and then its backward pass or another call."""
        x, ids, weights, dy = self.call
        y = self.layer(x.clone().requires_grad_(), ids, weights)
        if back:
            y.backward(dy)
        else:
            self.layer(x.clone().requires_grad_(), ids, weights)

    def is_right(self, layer=None):
        found = self.step(layer)
        return all(torch.equal(found[n], t) for n, t in self.expected.items())


def refusals(rank):
    """Each rank refuses in turn, forward and backward; nothing needs a reset in between."""
    be_on_host(rank, 2)
    mine, found = Rank(rank, EXACT), {}
    for who in range(4):
        found["forward", who] = failed(mine.wrong if rank == who else mine.step)

        def backward(who=who):
            x, ids, weights, dy = mine.call
            x = x.clone().requires_grad_()
            y = mine.layer(x, ids, weights)
            if rank == who:
                x.data.add_(0)
                with torch.no_grad():
                    x.add_(1)  # autograd finds that out
            y.backward(dy)

        found["backward", who] = failed(backward)
    found["right"] = mine.is_right()
    other = mine.made()
    mine.step(other)
    order = [mine.layer, other] if rank != 2 else [other, mine.layer]
    found["order"] = failed(lambda: [mine.step(layer) for layer in order])
    found["then"] = mine.is_right() and mine.is_right(other)
    for who in ((0,), (2, 3)):  # where all ranks of a host agree, nothing is wrong inside of it
        found["passes", who] = failed(lambda who=who: mine.passes(second=rank in who))
    found["after passes"] = mine.is_right()
    x, ids, weights, dy = mine.call
    ys = []
    for _ in range(2):  # numbers of calls go on behind a reset
        mine.layer.reset()
        ys.append(mine.layer(x.clone().requires_grad_(), ids, weights))
    found["passes", "reset"] = failed(lambda: ys[rank < 2].backward(dy))
    return found


@pytest.fixture(scope="module")
def refused():
    os.environ["MEGAMOE_TIMEOUT_S"] = "20"  # nothing here takes as long
    try:
        return launch(refusals, 4, timeout_s=100)
    finally:
        del os.environ["MEGAMOE_TIMEOUT_S"]


@pytest.mark.parametrize("who", range(4))
def test_a_refusal_is_named_on_all_ranks(refused, who):
    for rank, found in enumerate(refused):
        for what, own in (
            ("forward", "ArgumentError: x.dtype is"),
            ("backward", "RuntimeError: one of the"),
        ):
            text, seconds = found[what, who]
            others = f"PeerFault: rank {who} on host-{who // 2} raised "
            assert text.startswith(own if rank == who else others)
            assert seconds < 3


def test_other_orders_of_calls_are_named_on_all_ranks(refused):
    for found in refused:
        text, seconds = found["order"]
        assert text.startswith("RankMismatch: rank ")
        assert "rank 2 on host-1 for " in text or "rank 2 on host-1 comes for " in text
        assert "of layer 1" in text
        assert "of layer 2" in text
        assert seconds < 3


def test_layers_are_right_after_refusals(refused):
    assert all(found["right"] and found["then"] and found["after passes"] for found in refused)


def is_of_other_calls(text):
    return text.startswith("RankMismatch: rank ") and "comes for backward of call " in text


def test_other_orders_of_backward_passes_are_named_on_all_ranks(refused, late):
    for found in refused:
        text, seconds = found["passes", (2, 3)]
        assert is_of_other_calls(text)
        assert " on host-0" in text
        assert " on host-1" in text
        assert seconds < 3
        assert found["passes", (0,)][0].startswith("RankMismatch: rank ")
        assert is_of_other_calls(found["passes", "reset"][0])
    for found in late:
        text, seconds = found["static passes"]
        assert is_of_other_calls(text)
        assert seconds < BOUND_S


def lateness(rank):
    """Ranks come later than twice the time-out, or refuse where nothing is met; what then makes the layer right."""
    be_on_host(rank, 2)
    mine, found = Rank(rank, EXACT), {}

    def late(ranks, call=None):
        dist.barrier()
        if rank in ranks:
            time.sleep(2 * TIMEOUT_S)
        return failed(call or mine.step)

    found["late host"] = late((2, 3))
    found["again"] = failed(mine.step)
    mine.layer.reset()
    found["after reset()"] = mine.is_right()
    found["late rank"] = late((1,))
    new = mine.made()
    found["new layer"] = mine.is_right(new)
    found["old layer"] = mine.is_right()
    # an error of a rank's own, in the middle of a call
    backend = along(new)
    good = backend.inner.forward

    def bad(call, keep):
        raise ValueError("planted")

    dist.barrier()
    backend.inner.forward = bad if rank == 3 else good
    found["own"] = failed(lambda: mine.step(new))
    backend.inner.forward = good
    new.reset()
    found["after own"] = mine.is_right(new)
    other = Rank(rank, STATIC)
    dist.barrier()
    found["static"] = failed(other.wrong if rank == 0 else other.step)
    other.layer.reset()
    found["after static"] = other.is_right()
    second = other.made()
    other.step(second)
    order = (
        [other.layer, second] if rank < 2 else [second, other.layer]
    )  # alike but for their marks
    found["static order"] = failed(lambda: [other.step(layer) for layer in order])
    second.reset()
    found["after order"] = other.is_right() and other.is_right(second)
    found["static passes"] = failed(lambda: other.passes(second=rank < 2))
    other.layer.reset()
    found["after passes"] = other.is_right()
    found["static transposed"] = failed(lambda: other.transposed(back=rank < 2))
    other.layer.reset()
    found["after transposed"] = other.is_right()
    wide = Rank(rank, replace(STATIC, layer={"top_k": 4}))
    order = [other, wide] if rank < 2 else [wide, other]
    found["static sizes"] = failed(lambda: [one.step() for one in order])
    wide.layer.reset()
    found["after sizes"] = other.is_right() and wide.is_right()
    return found


@pytest.fixture(scope="module")
def late():
    os.environ["MEGAMOE_TIMEOUT_S"] = str(TIMEOUT_S)
    try:
        return launch(lateness, 4, timeout_s=100)
    finally:
        del os.environ["MEGAMOE_TIMEOUT_S"]


@pytest.mark.parametrize(
    ("what", "who"), [("late host", "ranks 2, 3 on host-1"), ("late rank", "rank 1 on host-0")]
)
def test_who_is_late_is_named_on_all_ranks(late, what, who):
    for found in late:
        text, seconds = found[what]
        assert text.startswith(
            f"ProtocolTimeout: {who} did not take part in this call over 2 hosts"
        )
        assert seconds < BOUND_S


def test_a_broken_layer_says_so_until_reset(late):
    for found in late:
        text, seconds = found["again"]
        assert text.startswith(
            "WindowBroken: call reset() on all ranks first. The fault was: ranks"
        )
        assert seconds < 0.1


def test_an_error_of_one_rank_is_named_on_all(late):
    for rank, found in enumerate(late):
        text, seconds = found["own"]
        others = "MegaMoEError: rank 3 on host-1 failed: ValueError: planted"
        assert text == ("ValueError: planted" if rank == 3 else others)
        assert seconds < BOUND_S


def test_a_refusal_is_named_where_nothing_is_met(late):
    for rank, found in enumerate(late):
        text, seconds = found["static"]
        own = "ArgumentError: x.dtype"
        others = f"PeerFault: rank 0 on host-0 raised {own}"
        assert text.startswith(own if rank == 0 else others)
        assert seconds < BOUND_S


# The last two were red before: ranks exchanged other numbers of bytes, and gloo ended the process.
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("static order", ("forward of layer 3", "forward of layer 4")),
        ("static transposed", ("forward of layer 3", "backward of layer 3")),
        ("static sizes", ("forward of layer 3", "forward of layer 5")),
    ],
)
def test_ranks_that_differ_are_named_where_nothing_is_met(late, what, words):
    for found in late:
        text, seconds = found[what]
        assert text.startswith("RankMismatch: rank ")
        assert all(word in text for word in words), text
        assert seconds < BOUND_S


def test_what_a_device_has_seen_stays_until_a_host_looks():
    """A host may be calls ahead of its device. Red before: what was seen of one call, the next one overwrote."""
    problem = Problem(64, 64, 4, 2, max_tokens=16)
    options = {"chunks": 1, "exchange": "static"}
    engine = spin.Spinning(lambda n: 0.0, torch.device("cpu"), problem, "static")
    backend = spin.over_hosts(problem, 2, "reference", torch.device("cpu"), engine, **options)
    given, weights = make_inputs(problem, 8), make_weights(problem)
    call = Call(given.x, given.topk_ids, given.topk_weights, weights)
    backend.planner.mark = Mark(1, problem.fingerprint() & 0x7FFFFFFF)
    backend.forward(call)
    marks = torch.tensor([[*backend.planner.mark.ints(), 0]] * 2, dtype=torch.int32)
    backend.planner._seen = marks.clone(), marks.clone()
    backend.forward(call)
    other = marks.clone()
    other[1, 0] += 1 << 8  # the mark of the next layer
    backend.planner._look(other)
    backend.planner._look(marks)
    for late in (lambda: backend.forward(call), backend.check):
        with pytest.raises(RankMismatch, match=r"forward of layer 2 .*forward of layer 1"):
            late()


@pytest.mark.parametrize("exchange", ["exact", "static"])
def test_the_backend_inside_a_host_is_told_what_a_layer_is_told(exchange):
    problem, cpu = Problem(64, 64, 4, 2, max_tokens=16), torch.device("cpu")
    backend = spin.over_hosts(problem, 2, "reference", cpu, None, chunks=2, exchange=exchange)
    with pytest.raises(MegaMoEError, match="needs a call of the layer before it"):
        backend.statistics()
    backend.inner, backend.links = inner, links = mock.Mock(), mock.Mock(broken=None)
    inner.check.side_effect = ProtocolTimeout("rank 1 is late")
    links.host.size, links.host.label.return_value = 2, "rank 4 on b"
    with pytest.raises(ProtocolTimeout, match="is late .on this host rank 0 is rank 4 on b"):
        backend.check()
    backend.planner.abort = mock.Mock()
    backend.abort(error := ValueError("planted"))
    links.end_incident.assert_called_once_with("this rank raised planted")
    links.broken = "planted"
    backend.abort(ValueError("another"))  # of a layer that is broken: the others know
    links.report.assert_called_once_with(error, refuses=True)
    inner.abort.assert_called_once_with(error)
    backend.reset()
    inner.reset.assert_called_once_with()
    backend.close()
    inner.close.assert_called_once_with()
    assert backend.needs_close is inner.needs_close


RIGHT = ("after reset()", "new layer", "old layer", "after own", "after static", "after order")
RIGHT += ("after passes", "after transposed", "after sizes")


@pytest.mark.parametrize("what", RIGHT)
def test_layers_are_right_again(late, what):
    assert all(found[what] for found in late)


# --- ranks that die ---


def mortal(rank, dead, port, folder, master):
    """One of four ranks; some end between two calls, and the others write down what they raise."""
    os.environ.update(MEGAMOE_TIMEOUT_S=str(TIMEOUT_S), GLOO_SOCKET_IFNAME="lo")
    be_on_host(rank, 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, master and rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mine = Rank(rank, EXACT)
    if rank in dead:
        os._exit(9)
    text, seconds = failed(mine.step)
    (folder / str(rank)).write_text(f"{seconds}\n{text}")
    os._exit(0)  # whoever leaves properly waits for the dead


def outlived(dead, port, folder, master=False):
    """Return what each rank that lives raises, and after how long."""
    ranks = [fresh(mortal, rank, dead, port, folder, master) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [p.exitcode for p in ranks] == [9 if r in dead else 0 for r in range(4)]
    for rank in set(range(4)) - set(dead):
        seconds, text = (folder / str(rank)).read_text().split("\n", 1)
        assert float(seconds) < BOUND_S
        yield text


@pytest.mark.parametrize(
    ("dead", "who"), [((1,), "rank 1 on host-0"), ((2, 3), "ranks 2, 3 on host-1")]
)
def test_who_is_dead_is_named_on_all_ranks(dead, who, tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for text in outlived(dead, store.port, tmp_path):
        assert text.startswith(
            f"ProtocolTimeout: {who} did not take part in this call over 2 hosts"
        )


def test_all_ranks_raise_where_the_store_dies_too(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    texts = list(outlived((0,), port, tmp_path, master=True))
    assert all("was left by another, or lost it; the store of" in text for text in texts)
    assert any("lost rank 0 on host-0" in text for text in texts)
