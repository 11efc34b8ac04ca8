"""Scenarios of tools/soak.py in which a backward pass fails: named on every rank, in time, and gone after a reset."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.ranks import Rank
from bench.soak.faults import TIMEOUT_S, error_of, faults
from bench.soak.layer import Outcome
from bench.soak.training import Trainer, shared_layers
from megamoe.backends.call import Call
from megamoe.core.errors import MegaMoEError, ProtocolTimeout, RankMismatch, WindowBroken

# of both layers for the first microbatch, then for the second: input, state
Saved = list[tuple[Tensor, Tensor]]
NOBODYS = "state that no forward of this layer completed"


def train_faults(me: Rank, args: argparse.Namespace) -> Outcome:
    """Backward comes late, for another layer, for another microbatch, with a state of nobody or of a failed forward."""
    out, start, last = Outcome(""), time.monotonic(), me.size - 1
    window, layers = shared_layers(me, "bf16", timeout_s=TIMEOUT_S)
    trainer = Trainer(me, layers, 4)
    batches = trainer.draw(1)
    expected, _ = trainer.run(1, window.check)
    is_last = int(me.rank == last)

    def forward() -> Saved:
        saved = [passed for batch in batches for passed in trainer.forward(*batch)[:-1]]
        window.check()
        return saved

    def backward(layer: int, batch: int, state: Tensor) -> None:
        inputs, count = batches[batch]
        call = trainer.call(layer, inputs.x, inputs, count)
        layers[layer].backward(call, torch.zeros_like(inputs.x), state, trainer.wanted(layer))
        window.check()

    def late(saved: Saved) -> None:
        time.sleep(2 * TIMEOUT_S * is_last)
        backward(0, 0, saved[0][1])

    def failed(saved: Saved) -> None:
        """Give backward the state of a forward that the last rank came too late for; reset() lies between."""
        inputs, count = batches[0]
        weights, states = trainer.masters[0], list[Any]([torch.zeros_like(saved[0][1])])

        def too_late() -> None:
            time.sleep(2 * TIMEOUT_S * is_last)
            call = Call(inputs.x, inputs.topk_ids, inputs.topk_weights, weights, count)
            states.append(layers[0].forward(call, keep=True)[1])
            window.check()

        out.require(error_of(too_late) is not None, "a forward that came too late was taken")
        window.reset()
        backward(0, 0, states[-1])

    other, named = f"rank {last} runs another configuration", (RankMismatch,)
    cases: list[tuple[str, Callable[[Saved], Any], tuple[type[MegaMoEError], ...], list[str]]] = [
        ("a state of nobody", lambda s: backward(0, 0, torch.zeros_like(s[0][1])), named, [NOBODYS])
    ]
    if me.size > 1:
        cases += [
            ("late backward", late, (ProtocolTimeout,), ["routes_ready", f"for rank {last}"]),
            ("another layer", lambda s: backward(is_last, 0, s[is_last][1]), named, [other]),
            (
                "another microbatch",
                lambda s: backward(0, is_last, s[2 * is_last][1]),
                named,
                [other],
            ),
            ("the state of a failed forward", failed, named, [NOBODYS]),
        ]
    for title, run, kinds, words in cases:
        saved = forward()
        me.gather(None)
        faults(me, out, title, partial(run, saved), kinds, words)
        broken = error_of(partial(backward, 0, 0, saved[0][1]))
        out.require(isinstance(broken, WindowBroken), f"{title}: a broken window took a backward")
        window.reset()
        again, _ = trainer.run(1, window.check)
        out.require(torch.equal(expected, again), f"{title}: a step after a reset has other bits")
    out.text = (
        f"{len(cases)} faults in backward, each then reset; {time.monotonic() - start:.1f} s in all"
    )
    window.close()
    return out
