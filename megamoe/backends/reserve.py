"""How many SMs a layer's launches leave to other kernels."""

from __future__ import annotations

import os
from typing import Any

import torch

from megamoe import env
from megamoe.memory.transport.group import nccl_in_use

NCCL_MAX_CTAS = 24  # what NCCL takes at most on Hopper over NVLink unless told otherwise
GPCS = 8  # of a Hopper GPU; a pair of CTAs needs two free SMs of one, so other kernels may strand one in each


def default_reserve(group: Any) -> int:
    """SMs for NCCL, where a step both trains and communicates; decided when the backend is made.

    Cooperative kernels and NCCL's do not yield to each other: without room for both, two ranks that start them in
    different orders would wait for each other for ever.
    """
    stated = env.reserve_sms()
    if stated is not None:
        return stated
    if not (torch.is_grad_enabled() and nccl_in_use(group)):
        return 0
    ctas = os.environ.get("NCCL_MAX_CTAS", "")
    return (int(ctas) if ctas.isdigit() and int(ctas) else NCCL_MAX_CTAS) + GPCS
