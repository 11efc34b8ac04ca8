"""Register the gradients of the operators, which call the operators themselves.

Operators that compute a part of a backward pass have no gradient, and neither have e4m3 operands: using them raises an
error. With `dynamic` the gradient is straight-through: that of the product of the quantized operands, as if
quantization were the identity. The gradient of rows is again such a product, of quantized dy and the same e4m3 weights,
because blocks of 128 x 128 also fit the transpose. Weight gradients are BF16 products of the original arguments.
Pre-activations are recomputed, so a call saves only its arguments.
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
from megamoe.ops.operands import join, split
from megamoe.ops.operators import (
    grouped_activation_gradient,
    grouped_mm,
    grouped_wgrad,
)
from megamoe.ops.reference import through

Found = dict[str, Tensor | None]  # by the names of arguments


def _of_mm(call: Any, dy: Tensor) -> Found:
    dy = rows_of(dy)
    dw, db = of_weights(dy, call.x, call.w, ("w", "bias"), call)
    dx = _product(dy, call.w.transpose(1, 2), call) if call.needs["x"] else None
    return {"x": dx, "w": dw, "bias": db}


def _of_activation(call: Any, dh: Tensor | None, d_gu: Tensor | None) -> Found:
    dgu, d_scale = d_gu, None
    if dh is not None:
        if call.quantizes:
            raise RuntimeError("a quantized h has no gradient: use ops.grouped_mlp")
        dgu, _, d_scale = _through(dh, call.w, call.bias, call)
        dgu = (dgu if d_gu is None else dgu + d_gu).bfloat16()
    assert dgu is not None
    return {**_of_first(dgu, "w", "bias", call), "row_scale": d_scale}


def _of_mlp(call: Any, dy: Tensor, _: Any) -> Found:
    dy = rows_of(dy)
    if call.dynamic:
        dgu, h, d_scale = _through(_product(dy, call.w2, call), call.w13, call.b13, call)
        dgu, h = dgu.bfloat16(), h.bfloat16()
    else:
        of = call.w2, call.saved, call.offs, call.alignment, call.kind, call.numbers
        dgu, h, d_scale = grouped_activation_gradient(dy, *of, call.row_scale)
    found = _of_first(dgu, "w13", "b13", call)
    dw, found["b2"] = of_weights(dy, h, call.w2.transpose(1, 2), ("w2", "b2"), call)
    found["row_scale"] = d_scale
    found["w2"] = dw if dw is None else dw.transpose(1, 2)
    return found


# --- parts of them ---


def rows_of(t: Tensor) -> Tensor:
    """Return a gradient as kernels take it."""
    legal = t.stride(-1) == 1 and t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[-1]
    return t if legal and t.dtype == torch.bfloat16 else t.to(torch.bfloat16).contiguous()


def _product(rows: Tensor, w: Tensor, call: Any, bias: Tensor | None = None) -> Tensor:
    """rows: [M, K], w: [E, K, N], both bf16, bias: [E, N] -> [M, N], in the precision of the call."""
    return grouped_mm(rows, w, call.offs, call.alignment, bias, None, None, call.dynamic)


def of_weights(
    dy: Tensor, x: Tensor, w: Tensor, names: tuple[str, str], call: Any
) -> tuple[Tensor | None, Tensor | None]:
    """dy: [M, N], x: [M, K], w: [E, K, N] -> gradients of w, as it lies, and of its bias, by what these names need."""
    of_w, of_bias = (call.needs[name] for name in names)
    if of_w and w.stride(2) == 1 and not of_bias:
        return grouped_wgrad(x, dy, call.offs, call.alignment, w.shape[0], False, False)[0], None
    if not (of_w or of_bias):
        return None, None
    dw, sums = grouped_wgrad(dy, x, call.offs, call.alignment, w.shape[0], False, of_bias)
    db = sums.to(getattr(call, names[1])) if of_bias else None
    return dw.transpose(1, 2) if of_w else None, db


def _of_first(dgu: Tensor, name: str, bias: str, call: Any) -> Found:
    """dgu: [M, P, I] -> gradients of x, of the weights of this name [E, P, I, H], and of their bias.

    Where gate and up alternate in memory, dgu does so, too. Then one product makes dx, and dw lies as the weights do.
    """
    w = getattr(call, name)
    planes, width = w.shape[1:3]
    alternate = planes == 2 and w.stride(1) < w.stride(2)
    # Views here, copies in a compiled graph that lays w out anew: as_strided would read past it.
    rows, matrices = rows_of(join(dgu, alternate)), join(w, alternate)
    dw, db = of_weights(rows, call.x, matrices.transpose(1, 2), (name, bias), call)
    if not call.needs["x"]:
        dx = None
    elif call.dynamic and planes == 2 and (alternate or width % GROUP):
        dx = _product(dgu[:, 0], w[:, 0], call) + _product(dgu[:, 1], w[:, 1], call)
    else:
        dx = _product(rows, matrices, call)
    dw = dw if dw is None else split(dw.transpose(1, 2), planes, alternate)
    return {"x": dx, name: dw, bias: db if db is None else split(db, planes, alternate).flatten(1)}


def _through(dh: Tensor, w: Tensor, bias: Tensor | None, call: Any) -> tuple[Tensor, ...]:
    """Return what through() does, dgu as [M, P, I], by what can be differentiated again.

    Of the pre-activations that were saved, or with `dynamic` of those that w [E, P, I, H] and bias make again: by a
    product for each plane, whose blocks are its own.
    """
    gu, act = call.saved, Activation(call.kind, *call.numbers)
    if call.dynamic:
        of_planes = [None] * act.planes if bias is None else bias.chunk(act.planes, 1)
        pairs = zip(w.unbind(1), of_planes, strict=True)
        found = [_product(call.x, part.transpose(1, 2), call, b) for part, b in pairs]
        gu = torch.stack(found, 1)
    groups = Groups(call.offs, call.alignment)
    dgu, *others = through(act, gu, dh.float(), groups, call.row_scale)
    return dgu.view(gu.shape), *others


# --- registration ---


def _refusal(name: str) -> MegaMoEError:
    return MegaMoEError(
        f"a result of megamoe::{name} was differentiated, expected first derivatives in bf16 operands only: this "
        "operator, a part of backward passes or for e4m3, has none"
    )


def _refuse(name: str) -> None:
    """Make a backward pass that comes to the operator of this name raise MegaMoEError."""

    def backward(ctx: Any, *_: Any) -> Any:
        raise _refusal(name)

    _register(name, backward, lambda *_: None)


def _differentiate(name: str, gradients: Callable[..., Found]) -> None:
    """Let an operator's gradients be those of a function (call, *gradients of results), or None without these.

    `call` has the arguments by name, which of them `needs` a gradient, and the pre-activations that it `saved`.
    """
    names = [a.name for a in getattr(torch.ops.megamoe, name).default._schema.arguments]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = dict(zip(names, inputs, strict=True))
        dynamic, quantizes = given["dynamic"], given.get("quantizes")
        ctx.refused = given.get("x_scale") is not None or (quantizes and not dynamic)
        if ctx.refused:
            return
        if isinstance(output, tuple):
            ctx.set_materialize_grads(False)
            if dynamic or name == "grouped_mlp":
                ctx.mark_non_differentiable(output[1])
        given["saved"] = output[1] if given.get("saves") else None
        tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        ctx.names, ctx.others = [*tensors], {n: t for n, t in given.items() if n not in tensors}
        ctx.save_for_backward(*tensors.values())

    def backward(ctx: Any, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.refused:
            raise _refusal(name)
        if all(t is None for t in results):
            return (None,) * len(names)
        needs = dict(zip(names, ctx.needs_input_grad, strict=False))  # torch leaves defaults out
        tensors = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        found = gradients(SimpleNamespace(needs=needs, **ctx.others, **tensors), *results)
        return tuple(found.get(n) if needs.get(n) else None for n in names)

    _register(name, backward, setup_context)


def _register(name: str, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    """Register them in graphs and, as an autograd function past the dispatcher, of eager calls."""
    run = getattr(operators, name).__wrapped__
    torch.library.register_autograd(f"megamoe::{name}", backward, setup_context=setup)

    def forward(ctx: Any, *args: Any) -> Any:
        out = run(*args)
        setup(ctx, args, out)
        return out

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    operators.recorded[name] = type(f"megamoe::{name}", (torch.autograd.Function,), methods)


def register() -> None:
    """Give the operators their gradients. Once."""
    _differentiate("grouped_mm", _of_mm)
    _differentiate("grouped_activation", _of_activation)
    _differentiate("grouped_mlp", _of_mlp)
    for part in ("activation_gradient", "wgrad"):
        _refuse(f"grouped_{part}")
