"""What torch.compile skips is marked without torch._dynamo, and is skipped as torch.compiler.disable has it."""

import pytest
import torch

from megamoe.core.uncompiled import uncompiled


class Counter:
    def __init__(self, mark):
        self.graphs, self.traced, count = 0, [], self.count

        def inner(x):
            self.traced.append(torch.compiler.is_dynamo_compiling())
            return count(x)

        self.skipped = mark(inner)

    def count(self, x):
        return x * 2

    def __call__(self, x):
        return self.skipped(x + 1) + 1

    def record(self, graph, example):
        self.graphs += 1
        return graph


def run_compiled(mark):
    torch._dynamo.reset()
    found = Counter(mark)
    compiled = torch.compile(found.__call__, backend=found.record)
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 5.0))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        torch.compile(found.__call__, backend=found.record, fullgraph=True)(torch.ones(2))
    return found.graphs, found.traced, str(refused.value)


def test_skipped_as_torch_does():
    ours, its = (
        run_compiled(uncompiled("of a why")),
        run_compiled(torch.compiler.disable(reason="of a why")),
    )
    assert ours[:2] == its[:2] == (2, [False] * 3)  # before and behind it
    for said in (ours[2], its[2]):
        assert "it was wrapped with `torch.compiler.disable` (reason: of a why)" in said


def test_errors_and_names_pass_through():
    @uncompiled("why")
    def divide(a: int, *, by: int) -> float:
        """Say what this does."""
        return a / by

    assert (divide.__name__, divide.__doc__, divide(3, by=2)) == (
        "divide",
        "Say what this does.",
        1.5,
    )
    with pytest.raises(ZeroDivisionError):
        divide(1, by=0)
