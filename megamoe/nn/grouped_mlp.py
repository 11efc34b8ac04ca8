"""Provide the MLPs of experts whose rows are on this device, sorted, as one module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.core.config import Activation, activation_by_name
from megamoe.ops import grouped_mlp
from megamoe.ops.functions import Glu, Recipe


class GroupedMLP(nn.Module):
    """Run each group of rows through its MLP, as Transformer Engine's GroupedLinear, ScaledSwiGLU, GroupedLinear do.

    Parameters: fc1_weight [G, P*ffn, in] and fc2_weight [G, in, ffn], stacks of Transformer Engine's weight0, weight1,
    ... (P = 2 if gated); with bias=True also fc1_bias [G, P*ffn] and fc2_bias [G, in].

    Args:
        num_groups: G, the number of groups, or experts.
        in_features: Width of rows, a multiple of 8.
        ffn_hidden_size: Width between the products, a multiple of 8.
        activation: A name or an Activation. Default: "swiglu".
        bias: True: both products have biases. Default: False.
        glu: Where gate and up are in the rows of fc1_weight, see ops.grouped_mm_act(). Default: "halves".
        recipe: "blockwise": multiply in FP8, see ops.grouped_mm(). Default: None, bf16.
        device: Device of the parameters. Default: torch's.

    Raises:
        ConfigError: The activation is unknown.
    """

    def __init__(
        self, num_groups: int, in_features: int, ffn_hidden_size: int,
        activation: str | Activation = "swiglu", *, bias: bool = False, glu: Glu = "halves",
        recipe: Recipe | None = None, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation, self.glu, self.recipe = activation_by_name(activation), glu, recipe
        wide = self.activation.planes * ffn_hidden_size
        for name, rows, width in ("fc1", wide, in_features), ("fc2", in_features, ffn_hidden_size):
            for part, shape in ("weight", (rows, width)), ("bias", (rows,)):
                made = torch.empty(num_groups, *shape, dtype=torch.bfloat16, device=device)
                nn.init.uniform_(made, -(width**-0.5), width**-0.5)  # as nn.Linear
                kept = part == "weight" or bias
                self.register_parameter(f"{name}_{part}", nn.Parameter(made) if kept else None)

    def forward(
        self, x: Tensor, split_sizes: Tensor | Sequence[int], probs: Tensor | None = None
    ) -> Tensor:
        """Compute the MLPs; differentiable.

        Args:
            x: [M, in] bf16, rows sorted by group.
            split_sizes: [G] integers, the rows of each group; a tensor on x's device is not read by the host.
            probs: [M] or [M, 1], multiplies each row before fc2, whose bias it leaves alone. Default: None.

        Returns:
            [M, in] bf16. Rows of no group are zeros.

        Raises:
            ArgumentError: A tensor is invalid.
        """
        offs = torch.as_tensor(split_sizes, device=x.device).cumsum(0).to(torch.int32)
        own: Any = self
        up, down, b1, b2 = own.fc1_weight.mT, own.fc2_weight.mT, own.fc1_bias, own.fc2_bias
        given: Any = {"offs": offs, "glu": self.glu, "recipe": self.recipe, "b_up": b1}
        if probs is not None:
            given["row_scale"] = probs.reshape(-1).float()
        return grouped_mlp(x, up, down, self.activation, b_down=b2, **given)
