"""latency_sweep.py --dram: bytes of DRAM beside each contender, where ncu is there."""

from __future__ import annotations

import pytest
import torch

from bench import dram

NCU = """==PROF== Connected to process 7
# a line of the command's own
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","spin_kernel(long)","dram__bytes_read.sum","byte","512"
"1","7","megamoe_forward","dram__bytes_read.sum","byte","13,400,000,000"
"2","7","spin_kernel(long)","dram__bytes_read.sum","byte","0"
"3","7","void cutlass(Params)","dram__bytes_read.sum","byte","9000000000"
"4","7","void cutlass(Params)","dram__bytes_read.sum","byte","3700000000"
"""


def test_kernels_behind_a_mark_are_one_contenders() -> None:
    assert dram.parse(NCU) == pytest.approx([13.4, 12.7])
    assert dram.parse("no table") == []


def test_bytes_come_in_the_order_of_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    fake = tmp_path / "ncu"
    fake.write_text(
        f"#!/bin/sh\nfor last; do :; done\n[ $last = {dram.CHILD} ] || exit 1\n"
        f"[ -z $LOCAL_RANK$WORLD_SIZE ] || exit 1  # of a rank: it would wait for others\ncat <<'E'\n{NCU}E\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert list(dram.read_gb(1)) == pytest.approx([13.4, 12.7])
    with pytest.raises(SystemExit, match="--ranks 1"):
        dram.read_gb(2)
    fake.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="ncu failed"):
        dram.read_gb(1)


def test_without_ncu_there_are_none(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = dram.read_gb(1)
    assert [next(found), next(found)] == [None, None]
    assert "the column is empty" in capsys.readouterr().out
