"""megamoe.GroupedMLP: values and gradients against fp64, with probabilities, biases and rows of no group."""

import pytest
import torch

from megamoe import GroupedMLP
from megamoe.core.config import ACTIVATIONS
from megamoe.core.errors import ArgumentError, ConfigError
from megamoe.testing.compare import compare

SPLITS, ROWS, WIDTH, FFN = [5, 0, 70], 78, 48, 32


def near(found, expected, limit=1.2e-2):
    assert found.shape == expected.shape
    assert compare(found, expected).relative < limit


def plain(layer, wide, x, probs):
    """Probabilities multiply h, before fc2."""
    parts, begin, act = [], 0, layer.activation
    for g, rows in enumerate(SPLITS):
        pre = x[begin : begin + rows] @ wide["fc1_weight"][g].T
        pre = pre + wide["fc1_bias"][g] if "fc1_bias" in wide else pre
        if act.gated:
            gate, up = (
                (pre[:, ::2], pre[:, 1::2]) if layer.glu == "interleaved" else pre.chunk(2, 1)
            )
            h = torch.nn.functional.silu(gate) * up
        else:
            h = torch.relu(pre).square()
        h = h if probs is None else h * probs[begin : begin + rows, None]
        y = h @ wide["fc2_weight"][g].T
        parts.append(y + wide["fc2_bias"][g] if "fc2_bias" in wide else y)
        begin += rows
    return torch.cat([*parts, x.new_zeros(ROWS - begin, WIDTH)])


@pytest.mark.parametrize("machine", ["torch", "emulate"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("name", "glu"), [("swiglu", "halves"), ("swiglu", "interleaved"), ("relu2", "halves")]
)
def test_values_and_gradients(name, glu, scaled, bias, machine, monkeypatch):
    if machine == "emulate":
        if name != "swiglu":
            pytest.skip("each activation's kernels compile for seconds")
        monkeypatch.setenv("MEGAMOE_BACKEND", "emulate")
    torch.manual_seed(0)
    layer = GroupedMLP(3, WIDTH, FFN, name, bias=bias, glu=glu)
    x = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_()
    probs = torch.rand(ROWS).requires_grad_() if scaled else None
    wide = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    x_wide = x.detach().double().requires_grad_()
    p_wide = probs.detach().double().requires_grad_() if scaled else None
    y, expected = layer(x, torch.tensor(SPLITS), probs), plain(layer, wide, x_wide, p_wide)
    near(y, expected)
    assert y.dtype == torch.bfloat16
    assert not y[sum(SPLITS) :].any()
    dy = torch.randn(y.shape).bfloat16()
    y.backward(dy)
    expected.backward(dy.double())
    near(x.grad, x_wide.grad)
    for n, p in layer.named_parameters():
        near(p.grad, wide[n].grad)
    if scaled:
        near(probs.grad, p_wide.grad)


def test_it_is_a_module_like_others():
    torch.manual_seed(0)
    layer = GroupedMLP(3, WIDTH, FFN, bias=True)
    shapes = {n: tuple(p.shape) for n, p in layer.state_dict().items()}
    assert shapes == {
        "fc1_weight": (3, 2 * FFN, WIDTH),
        "fc1_bias": (3, 2 * FFN),
        "fc2_weight": (3, WIDTH, FFN),
        "fc2_bias": (3, WIDTH),
    }
    x = torch.randn(ROWS, WIDTH).bfloat16()
    y = layer(x, SPLITS)
    near(layer(x, torch.tensor(SPLITS), torch.ones(ROWS, 1)), y, 4e-3)
    fp8 = GroupedMLP(3, WIDTH, FFN, bias=True, recipe="blockwise")
    fp8.load_state_dict(layer.state_dict())
    near(fp8(x, SPLITS), y, 0.1)
    assert not torch.equal(fp8(x, SPLITS), y)
    assert GroupedMLP(3, WIDTH, FFN, ACTIVATIONS["relu2"]).fc1_weight.shape == (3, FFN, WIDTH)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="activation is 'gelu'"):
        GroupedMLP(3, WIDTH, FFN, "gelu")
    layer = GroupedMLP(3, WIDTH, FFN)
    x = torch.randn(ROWS, WIDTH).bfloat16()
    with pytest.raises(ArgumentError, match=r"offs.shape is \[2\], expected \[3\]"):
        layer(x, [70, 8])
    with pytest.raises(ArgumentError, match="x.dtype is torch.float32, expected bfloat16"):
        layer(x.float(), SPLITS)
