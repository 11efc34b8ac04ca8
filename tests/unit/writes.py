"""Ways to give a module's parameters other values: (write, counted?). Uncounted ones need invalidate()."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

ALONE = []  # by rank, a group of it alone


class Write(NamedTuple):
    """write: (module, values by name of some of its parameters). counted: torch counts it, or sees another tensor."""

    write: Callable
    counted: bool = True

    def __call__(self, module, values, invalidate=True):
        self.write(module, values)
        if invalidate and not self.counted:
            module.invalidate()


def each(write):
    """Make a way of one that takes a parameter and its values."""

    @torch.no_grad()
    def of_all(module, values):
        for name, value in values.items():
            write(module.get_parameter(name), value)

    return of_all


def by_expert(p, value):
    for held, given in zip(p.detach(), value, strict=True):
        held.copy_(given)


def sent(p, value):
    """From rank 0 of a group of one, which torch does not count, as it does not count .data."""
    p.data.copy_(value)
    if dist.is_initialized():
        dist.broadcast(p.detach(), dist.get_rank(), group=ALONE[dist.get_rank()])


@torch.no_grad()
def together(module, values):
    held = [module.get_parameter(name).view(-1) for name in values]
    torch._foreach_copy_(held, [value.view(-1) for value in values.values()])


def loaded(module, values, **options):
    module.load_state_dict(module.state_dict() | values, **options)


def into_state_dict(module, values):
    state = module.state_dict()
    for name, value in values.items():
        state[name].data.copy_(value)


def new_parameters(module, values):
    for name, value in values.items():
        setattr(module, name, torch.nn.Parameter(value))


WRITES = {
    "copy_": Write(each(torch.Tensor.copy_)),
    "expert by expert": Write(each(by_expert)),
    "_foreach_copy_": Write(together),
    "load_state_dict": Write(loaded),
    "load_state_dict, assign": Write(lambda m, values: loaded(m, values, assign=True)),
    ".data =": Write(each(lambda p, value: setattr(p, "data", value))),
    "new Parameter": Write(new_parameters),
    "into state_dict()": Write(into_state_dict),
    ".data.copy_": Write(each(lambda p, value: p.data.copy_(value)), counted=False),
    "by numpy": Write(
        each(
            lambda p, value: (
                p.view(torch.int16).numpy().__setitem__(..., value.view(torch.int16).numpy())
            )
        ),
        counted=False,
    ),
    "broadcast": Write(each(sent), counted=False),
}


def other_values(module, *names):
    """Return random values of the parameters of these names, or of all."""
    named = dict(module.named_parameters())
    return {name: torch.randn_like(named[name]) for name in names or named}
