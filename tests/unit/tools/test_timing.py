"""bench/timing.py: what lies between the two events of a sample, and what comes before them, without a GPU."""

import pytest
import torch

from bench import timing


class Event:
    """An event that knows when it was recorded; the clock goes on by what is called."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now
        SEEN.append("event")

    def elapsed_time(self, end):
        return end.at - self.at  # ms


SEEN: list[str] = []


@pytest.fixture
def timer(monkeypatch):
    """Return (samples) -> a Timer that takes the CPU for a GPU; what it does is in SEEN."""
    SEEN.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name: SEEN.append(name))
    monkeypatch.setattr(timing, "HOT_SECONDS", 0.0)

    def make(samples):
        made = timing.Timer(torch.device("cpu"), samples, lambda c: SEEN.append(f"watch {c.name}"))
        made.on_gpu = True
        monkeypatch.setattr(
            made, "flush", lambda clean: SEEN.append("flush clean" if clean else "flush")
        )
        return made

    return make


def contender(name, ms):
    """Return one whose calls take these times, and whose `before` takes far longer."""
    times = iter(ms)

    def before():
        Event.now += 100.0
        SEEN.append(f"before {name}")
        return name

    def timed(given):
        assert given == name
        Event.now += next(times)
        SEEN.append(name)

    return timing.Contender(name, timed, before)


def test_cool_samples_take_turns_behind_a_flush_and_a_spin(timer):
    found = timer(3).medians([contender("a", [1, 9, 2]), contender("b", [5, 4, 99])])
    assert found == [2000.0, 5000.0]
    one = ["before ?", "synchronize", "flush", "_sleep", "event", "?", "event", "synchronize"]
    turn = [what.replace("?", name) for name in "ab" for what in [*one, "watch ?"]]
    assert turn * 3 == SEEN


def test_clean_samples_are_cool_ones_behind_another_flush(timer):
    assert timer(1).medians([contender("a", [1])], "clean") == [1000.0]
    assert [what for what in SEEN if "flush" in what] == ["flush clean"]


def test_a_clean_flush_reads_what_it_wrote(monkeypatch):
    made, read = timing.Timer(torch.device("cpu"), 1), []
    made._flushed = torch.ones(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, "sum", lambda t: read.append(t.numel() * t.element_size()))
    made.flush()
    assert not made._flushed.any()
    assert not read
    made.flush(clean=True)
    assert read == [16]


def test_hot_samples_of_a_contender_follow_each_other(timer):
    found = timer(3).medians([contender("a", [50, 1, 9, 2]), contender("b", [50, 5, 4, 99])], "hot")
    assert found == [2000.0, 5000.0]
    assert not {"flush", "_sleep"} & set(SEEN)
    first = ["synchronize", "before ?", "?", "synchronize"]
    one = first + ["before ?", "event", "?", "event"] * 3 + ["synchronize", "watch ?"]
    assert [what.replace("?", name) for name in "ab" for what in one] == SEEN


def test_means_of_the_host_leave_out_its_warm_up_and_the_queue(timer, monkeypatch):
    times = iter([50.0, 50.0, 1.0, 3.0, 2.0, 6.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Event.now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(Event, "now", Event.now + 7.0))

    def call():
        Event.now += next(times)

    found = timer(1).host(call, calls=2, repeats=2, warm_up=2)
    assert found == pytest.approx([2e6, 4e6])
