"""tools/timeline.py: what it makes of a launch's timestamps, emulated ones and recorded ones."""

import csv
import json
import sys

import pytest
from programs import tool

from bench import timeline as module
from bench.timeline import columns
from megamoe.backends.emulate.emulation import Emulation


@pytest.fixture
def timeline(monkeypatch):
    def run(*arguments, draws=False):
        if not draws:  # which takes seconds
            monkeypatch.setattr(module, "draw", lambda *_: False)
        monkeypatch.setattr(sys, "argv", ["timeline.py", *map(str, arguments)])
        return tool("timeline").main()

    return run


def spans(path):
    """Return (process, thread) -> [(name, begin, end)] of a Chrome trace."""
    names, found = {}, {}
    events = json.loads(path.read_text())["traceEvents"]
    for e in events:
        if e["ph"] == "M" and e["name"] == "process_name":
            names[e["pid"]] = e["args"]["name"]
        if e["ph"] == "M" and e["name"] == "thread_name":
            names[e["pid"], e["tid"]] = e["args"]["name"]
    for e in events:
        if e["ph"] == "X":
            key = names[e["pid"]], names[e["pid"], e["tid"]]
            found.setdefault(key, []).append((e["name"], e["ts"], e["ts"] + e["dur"]))
    return found


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_launch_is_shown(timeline, direction, tmp_path, capsys):
    small = ("--backend", "emulate", "--shape", "tiny", "--tokens", 40, "--ranks", 2, "--cta", 1,
             "--samples", 2)  # fmt: skip
    assert timeline(*small, "--direction", direction, "--out", tmp_path, "--name", "a") == 0
    printed = capsys.readouterr().out
    found = spans(tmp_path / "a.json")
    weights = ["tiles of weight gradients"] * (direction == "backward")
    for rank in range(2):
        for cta in range(2):
            phases = found[f"rank {rank}: CTAs", f"CTA {cta}"]
            wanted = ["route", "plan", "first rows", "tiles", *weights, "tail", "exit"]
            assert [name for name, *_ in phases] == wanted
            ends = [end for *_, end in phases]
            assert [begin for _, begin, _ in phases[1:]] == pytest.approx(ends[:-1])
            assert ends == sorted(ends)
            assert 0 < ends[0] < ends[-1] < 1e3  # us; the machine's clock counts nanoseconds
        roles = {
            role: names for (process, role), names in found.items() if "roles of CTA 1" in process
        }
        assert list(roles) == ["crew 0", "crew 1", "transport", "math"]
        assert [n for n, *_ in roles["transport"]] == ["plan", "dispatch", "reduce, combine"]
        assert [n for n, *_ in roles["math"]] == [
            "wait for a slot",
            "tiles",
            *weights,
            "reduce, combine",
        ]
    assert "medians of 2 launches" in printed
    assert "first_slot" in printed
    assert (direction == "backward") == ("data_done" in printed) == ("weights_GHz" in printed)
    assert (
        timeline("--marks", tmp_path / "a.csv", "--cta", 1, "--out", tmp_path, "--name", "b") == 0
    )
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


def recorded(path, *ctas):
    names = columns()
    with path.open("w", newline="") as file:
        file.write("# recorded\n")
        writer = csv.writer(file)
        writer.writerow(["rank", "cta", *names])
        for index, marks in enumerate(ctas):
            writer.writerow([0, index, *(marks.get(name, 0) for name in names)])


WHOLE = {
    **{"clock_start": 0, "clock_end": 16_000, "start": 1_000, "staged": 1_500, "routed": 2_000},
    **{"planned": 3_000, "first_slot": 4_000, "dispatched": 6_000, "math_done": 8_000},
    **{"combined": 8_500, "end": 9_000, "rows_wait": 2_000, "slot_wait": 4_000},
}


def test_recorded_marks_are_us_since_the_first_cta_began(timeline, tmp_path, capsys):
    later = {n: t + 500 for n, t in WHOLE.items()}
    absent = WHOLE | {"start": 8_800, "end": 8_900}  # its other marks are of the launch before
    recorded(tmp_path / "marks.csv", WHOLE, later, absent)
    assert timeline("--marks", tmp_path / "marks.csv", "--out", tmp_path, draws=True) == 0
    found = spans(tmp_path / "timeline.json")
    assert found["rank 0: roles of CTA 0", "math"][1] == ("tiles", 3.0, 7.0)
    assert found["rank 0: CTAs", "CTA 1"][0] == ("route", 0.5, 1.5)
    assert ("rank 0: CTAs", "CTA 2") not in found
    lines = {
        line.split()[1]: line.split()[2:] for line in capsys.readouterr().out.splitlines()[2:-1]
    }
    assert lines["first_slot"] == ["2", "3.00", "3.50"]
    assert lines["rows_wait"][:2] == ["2", "1.00"]  # 2000 cycles at 2 GHz
    assert lines["GHz"] == ["2", "2.00", "2.00"]
    assert (tmp_path / "timeline.png").stat().st_size > 1_000


def test_first_tiles_of_each_gemm(timeline, tmp_path, capsys):
    """A tile of gemm1, one that is loaded for the partner alone, and one of gemm2: what word is in profile.cuh."""
    times = {"asked": 2_000, "rows_seen": 3_500, "slot_seen": 4_000, "multiplied": 5_000}
    times |= {"finished": 5_500, "published": 6_000}
    words = {f"tile{i}_{name}": times[name] + 100 * i for i in range(3) for name in times}
    whats = {"tile0_what": 8 << 8, "tile2_what": 8 << 8 | 1}
    recorded(tmp_path / "marks.csv", WHOLE | words | whats, WHOLE)
    assert timeline("--marks", tmp_path / "marks.csv", "--out", tmp_path) == 0
    found = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if " gemm" in line]
    assert found == [
        ["gemm1", "0", "1", "1.00", "2.50", "3.00", "4.00", "4.50", "5.00"],
        ["gemm2", "0", "1", "1.20", "2.70", "3.20", "4.20", "4.70", "5.20"],
    ]


def test_the_clock_of_rows_and_weights(timeline, tmp_path, capsys):
    """A phase that draws more power shows as a lower clock, not as more cycles."""
    recorded(tmp_path / "marks.csv", WHOLE | {"data_done": 5_000, "clock_data": 10_000})
    assert timeline("--marks", tmp_path / "marks.csv", "--out", tmp_path) == 0
    found = {line.split()[1]: line.split()[2:] for line in capsys.readouterr().out.splitlines()}
    assert found["rows_GHz"][1] == "2.50"
    assert found["weights_GHz"][1] == "1.50"
    assert "GHz" not in found


def test_of_several_launches_the_median_one_is_shown(timeline, tmp_path, capsys):
    def shifted(us):
        return {
            n: t + us * 1_000 * (n in ("math_done", "combined", "end")) for n, t in WHOLE.items()
        }

    names = columns()
    launches = [(shifted(4), shifted(9)), (shifted(1),), (shifted(3), shifted(6))]
    with (tmp_path / "marks.csv").open("w", newline="") as file:
        file.write("# recorded\n")
        writer = csv.writer(file)
        writer.writerow(["sample", "rank", "cta", *names])
        for sample, ctas in enumerate(launches):
            for index, marks in enumerate(ctas):
                writer.writerow([sample, 0, index, *(marks.get(name, 0) for name in names)])
    assert timeline("--marks", tmp_path / "marks.csv", "--out", tmp_path) == 0
    assert spans(tmp_path / "timeline.json")["rank 0: CTAs", "CTA 1"][-1] == ("exit", 13.5, 14.0)
    head, *lines = capsys.readouterr().out.splitlines()[1:-1]
    assert head.endswith("medians of 3 launches")
    found = {line.split()[1]: line.split()[2:] for line in lines}
    assert found["end"] == ["2", "11.00", "14.00"]  # of 12, 9, 11 and of 17, 9, 14
    assert found["first_slot"] == ["2", "3.00", "3.00"]


def test_experts_of_one_rank_of_several(timeline, monkeypatch):
    shown = []
    monkeypatch.setattr(Emulation, "forward_all", lambda self, *_, **__: shown.append(self.problem))
    monkeypatch.setattr(module, "write", lambda *_: 0)
    few = ("--backend", "emulate", "--shape", "tiny", "--tokens", 8, "--ranks", 1)
    timeline(*few)
    timeline(*few, "--local-experts-of", 2)
    assert shown[0].num_experts == 2 * shown[1].num_experts


def test_what_cannot_be_shown_is_named(timeline, tmp_path, capsys):
    with pytest.raises(SystemExit):
        timeline("--samples", 0)
    assert "--samples 0, expected at least 1" in capsys.readouterr().err
    recorded(tmp_path / "marks.csv", WHOLE)
    show = ("--marks", tmp_path / "marks.csv", "--out", tmp_path)
    with pytest.raises(SystemExit, match="--cta 3: not one of the 1 CTAs"):
        timeline(*show, "--cta", 3)
    text = (tmp_path / "marks.csv").read_text().splitlines()
    (tmp_path / "marks.csv").write_text("\n".join([*text[:-1], text[-1] + ",7"]) + "\n")
    with pytest.raises(SystemExit, match="81 marks of a CTA, expected 80: clock_start"):
        timeline(*show)
