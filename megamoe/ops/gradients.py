"""Register the gradients of the operators, which call the operators themselves.

Operators that compute a part of a backward pass have no gradient, and neither have e4m3 operands: using them raises an
error. With `dynamic` the gradient is straight-through: that of the product of the quantized operands, as if
quantization were the identity. The gradient of rows is again such a product, of quantized dy and the same e4m3 weights,
because blocks of 128 x 128 also fit the transpose. Weight gradients are BF16 products of the original arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megamoe.core.config import Activation
from megamoe.core.errors import MegaMoEError
from megamoe.formats.quantization import GROUP
from megamoe.ops import operators
from megamoe.ops.groups import Groups
from megamoe.ops.operators import grouped_activation_gradient, grouped_mm, grouped_wgrad
from megamoe.ops.reference import through

Found = dict[str, Tensor | None]  # by the names of arguments


def _of_mm(call: Any, dh: Tensor | None, d_gu: Tensor | None, *_: Any) -> Found:
    dgu, d_scale = d_gu if call.kind else dh, None
    if dh is not None and call.quantizes:
        raise RuntimeError("a quantized h has no gradient: use ops.grouped_mlp")
    if dh is not None and call.kind:
        act, groups = Activation(call.kind, *call.numbers), Groups(call.offs, call.alignment)
        # by what can be differentiated again
        made = through(act, call.saved, dh.float(), groups, call.row_scale, call.interleaved)
        d_scale = made[2]
        dgu = (made[0] if d_gu is None else made[0] + d_gu).bfloat16()
    assert dgu is not None
    return {**_of_first(dgu, "w", "bias", call), "row_scale": d_scale}


def _of_mlp(call: Any, dy: Tensor, _: Any) -> Found:
    dy, w = rows_of(dy), call.w_down.transpose(1, 2)
    of = call.saved, call.offs, call.alignment, call.kind, call.numbers, call.interleaved
    made = grouped_activation_gradient(dy, w, *of, None, None, call.dynamic, call.row_scale)
    found = _of_first(made[0], "w_up", "b_up", call)
    names = "w_down", "b_down"
    found |= zip(names, of_weights(dy, made[1], call.w_down, names, call), strict=True)
    return {**found, "row_scale": made[2]}


# --- parts of them ---


def rows_of(t: Tensor) -> Tensor:
    """Return a gradient as kernels take it."""
    legal = t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[-1]
    return t if legal and t.dtype == torch.bfloat16 else t.to(torch.bfloat16).contiguous()


def of_weights(
    dy: Tensor, x: Tensor, w: Tensor, names: tuple[str, str], call: Any
) -> tuple[Tensor | None, Tensor | None]:
    """dy: [M, N], x: [M, K], w: [E, K, N] -> gradients of w, as it lies, and of its bias, by what these names need."""
    of_w, of_bias = (call.needs[name] for name in names)
    rest, dw, db = (call.offs, call.alignment, w.shape[0], False), None, None
    if of_w and w.stride(2) == 1:  # autograd copies a gradient that lies otherwise than w
        dw = grouped_wgrad(x, dy, *rest, False)[0]
        x = x[:, :8]  # few columns: of the next product only dy's sums are wanted
    if of_bias or (of_w and dw is None):
        turned, sums = grouped_wgrad(dy, x, *rest, of_bias)
        dw = turned.transpose(1, 2) if of_w and dw is None else dw
        db = sums.to(getattr(call, names[1])) if of_bias else None
    return dw, db


def _of_first(dgu: Tensor, name: str, bias: str, call: Any) -> Found:
    """dgu: [M, P*I] -> gradients of x, of the weights of this name [E, H, P*I], and of their bias."""
    w, rows, dx = getattr(call, name), rows_of(dgu), None
    dw, db = of_weights(rows, call.x, w, (name, bias), call)
    if call.needs["x"]:
        parts = 1  # of K that have blocks of their own
        if call.dynamic and call.kind and not call.interleaved:
            planes = Activation(call.kind, *call.numbers).planes
            parts = planes if w.shape[2] // planes % GROUP else 1
        pairs = zip(rows.chunk(parts, 1), w.transpose(1, 2).chunk(parts, 1), strict=True)
        rest = call.offs, call.alignment, None, None, None, call.dynamic
        made = [grouped_mm(part, matrices, *rest)[0] for part, matrices in pairs]
        dx = made[0] if parts == 1 else made[0] + made[1]
    return {"x": dx, name: dw, bias: db}


# --- registration ---


def _register(name: str, gradients: Callable[..., Found] | None = None) -> None:
    """Register an operator's gradients in graphs and, as an autograd function past the dispatcher, of eager calls.

    gradients: a function (call, *gradients of results), where `call` has the arguments by name, which of them `needs` a
    gradient, and the pre-activations that it `saved`. Default: a backward pass raises MegaMoEError.
    """
    names = [a.name for a in getattr(torch.ops.megamoe, name).default._schema.arguments]
    run = getattr(operators, name).planned

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        quantizes = given.get("quantizes") and not given["dynamic"]
        ctx.refused = gradients is None or quantizes or given.get("x_scale") is not None
        if ctx.refused:
            return
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 if name == "grouped_mlp" else 2 :])
        given["saved"] = output[1] if given.get("saves") else None
        tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        ctx.names, ctx.others = [*tensors], {n: t for n, t in given.items() if n not in tensors}
        ctx.save_for_backward(*tensors.values())

    def backward(ctx: Any, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradients is None or ctx.refused:
            raise MegaMoEError(
                f"a result of megamoe::{name} was differentiated, expected first derivatives in bf16 operands only: "
                "this operator, a part of backward passes or for e4m3, has none"
            )
        if all(t is None for t in results):
            return (None,) * len(names)
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))  # torch leaves defaults out
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        found = gradients(SimpleNamespace(needs=needs, **ctx.others, **tensors), *results)
        return tuple(found.get(n) if needs.get(n) else None for n in names)

    def forward(ctx: Any, *args: Any) -> Any:
        out = run(*args)
        setup(ctx, args, out)
        return out

    torch.library.register_autograd(f"megamoe::{name}", backward, setup_context=setup)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    operators.recorded[name] = type(f"megamoe::{name}", (torch.autograd.Function,), methods)


def register() -> None:
    """Give the operators their gradients. Once."""
    _register("grouped_mm", _of_mm)
    _register("grouped_mlp", _of_mlp)
    _register("grouped_activation_gradient")
    _register("grouped_wgrad")
