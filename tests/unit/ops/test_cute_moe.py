"""megamoe.ops.cute_moe: the quick start of CuTe-MoE-Train, by torch's operations and by the kernel, against fp64."""

import pytest
import torch
from torch import Tensor

from megamoe.core.errors import ArgumentError
from megamoe.ops import cute_moe
from megamoe.ops.cute_moe import grouped_mm, grouped_mm_downproj, grouped_mm_swiglu
from megamoe.testing.compare import compare

ROWS = [128, 64, 0, 256, 192, 32, 128, 64]
SIZES = {  # hidden, intermediate, rows of each expert
    "quick start": (256, 128, ROWS),  # published: 2048 and 1024
    "small": (72, 40, [12, 6, 0, 70, 1]),
    "all equal": (16, 16, [4, 0, 12] + [0] * 13),  # E = H = I = M = 16
    "H = 2 I": (32, 16, [5, 0, 70]),
}


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16().requires_grad_()


def operands(hidden: int, width: int, rows: list[int]) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    num = len(rows)
    made = [
        rand(sum(rows), hidden),
        rand(num, hidden, 2 * width, scale=2 * hidden**-0.5),
        rand(num, width, hidden, scale=width**-0.5),
        rand(num, 2 * width),
        rand(num, hidden),
    ]
    return made, torch.tensor(rows).cumsum(0).int()


def quick_start(tensors: list[Tensor], offs: Tensor) -> Tensor:
    """As published."""
    x, W_up, W_down, b_up, b_down = tensors
    swiglu_out, aux = grouped_mm_swiglu(
        x, W_up, offs=offs, bias=b_up, swiglu_alpha=1.702, swiglu_limit=7.0
    )
    return grouped_mm_downproj(
        swiglu_out,
        W_down,
        offs=offs,
        bias=b_down,
        aux_biased_acc=aux,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    )


def plain(tensors: list[Tensor], offs: Tensor) -> Tensor:
    x, w_up, w_down, b_up, b_down = tensors
    parts, begin = [], 0
    for e, end in enumerate(offs.tolist()):
        acc = x[begin:end] @ w_up[e] + b_up[e]
        gate, up = acc[:, ::2].clamp(max=7), acc[:, 1::2].clamp(-7, 7)
        parts.append((gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ w_down[e] + b_down[e])
        begin = end
    return torch.cat(parts)


def near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    # pre-activations, h and their gradients are rounded to bf16, and the result
    assert compare(found, expected).relative < 8e-3


CASES = [("torch", name) for name in SIZES] + [("emulate", name) for name in list(SIZES)[1:]]


@pytest.mark.parametrize(("machine", "name"), CASES)
def test_quick_start(machine, name, monkeypatch):
    if machine == "emulate":
        monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")
    given, offs = operands(*SIZES[name])
    out = quick_start(given, offs)
    out.sum().backward()
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = plain(wide, offs)
    expected.sum().backward()
    near(out, expected)
    for mine, theirs in zip(given, wide, strict=True):
        near(mine.grad, theirs.grad)


def test_the_gradient_of_the_activation_is_that_of_the_fused_kernel(monkeypatch):
    """Once, of the down projection; none goes through swiglu_out, unless something else reads it."""
    calls = []
    fused = cute_moe.grouped_mm_dact
    monkeypatch.setattr(
        cute_moe, "grouped_mm_dact", lambda *a, **k: (calls.append(1), fused(*a, **k))[1]
    )
    (x, w_up, w_down, b_up, b_down), offs = operands(*SIZES["small"])
    h, aux = grouped_mm_swiglu(x, w_up, offs=offs, bias=b_up)
    y = grouped_mm_downproj(h, w_down, offs=offs, bias=b_down, aux_biased_acc=aux)
    d_h, d_aux = torch.autograd.grad(y.sum(), (h, aux), retain_graph=True, allow_unused=True)
    assert d_h is None
    assert d_aux.any()
    assert calls == [1]
    (y.sum() + h.float().sum()).backward()  # both count
    wide = [t.detach().double().requires_grad_() for t in (x, w_up, w_down, b_up, b_down)]
    acc = torch.cat(
        [wide[0][s:e] @ wide[1][i] + wide[3][i] for i, (s, e) in enumerate(ranges(offs))]
    )
    gate, up = acc[:, ::2].clamp(max=7), acc[:, 1::2].clamp(-7, 7)
    beside = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    (plain(wide, offs).sum() + beside.sum()).backward()
    near(x.grad, wide[0].grad)


def ranges(offs: Tensor) -> list[tuple[int, int]]:
    return list(zip([0, *offs.tolist()], offs.tolist(), strict=False))


def test_products_and_weight_gradients():
    (x, w_up, *_), offs = operands(*SIZES["small"])
    y = grouped_mm(mat_a=x, mat_b=w_up, offs=offs)
    near(
        y, torch.cat([x[s:e].double() @ w_up[i].double() for i, (s, e) in enumerate(ranges(offs))])
    )
    dw = grouped_mm(x.mT, y, offs=offs)
    assert dw.shape == w_up.shape


def test_what_does_not_fit_is_refused():
    (x, w_up, w_down, *_), offs = operands(*SIZES["small"])
    h, aux = grouped_mm_swiglu(x, w_up, offs=offs)
    with pytest.raises(TypeError, match="aux_biased_acc"):
        grouped_mm_downproj(h, w_down, offs=offs)
    with pytest.raises(ArgumentError, match=r"aux_biased_acc.shape is \[89, 40\], expected twice"):
        grouped_mm_downproj(h, w_down, offs=offs, aux_biased_acc=h)
    with pytest.raises(TypeError, match="swiglu_beta"):
        grouped_mm_downproj(h, w_down, offs=offs, aux_biased_acc=aux, swiglu_beta=1.0)
    with pytest.raises(TypeError, match="positional"):
        grouped_mm_swiglu(x, w_up, offs)
