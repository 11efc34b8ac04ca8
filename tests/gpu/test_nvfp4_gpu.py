"""NVFP4 on the GPU: its numbers are those of BF16 to the bit, subnormal scales too, in every form of a tile."""

from dataclasses import replace

import pytest
import torch

from megamoe import ExpertWeights, Problem
from megamoe.backends.call import Call
from megamoe.backends.reference import forward
from megamoe.backends.select import make_backend
from megamoe.testing import assert_close, make_inputs, make_weights

E4M3, SIZE = torch.float8_e4m3fn, 64
PROBLEM = Problem(SIZE, SIZE, 1, 1, max_tokens=128, precision="bf16xnvfp4")


def scales_of(exponent, rows, seed):
    """Return [1, rows, 4] e4m3 of one exponent, with any sign and mantissa."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(16, (1, rows, SIZE // 16), generator=g)
    bits = exponent << 3 | bits & 7 | (bits & 8) << 4
    return torch.where(bits & 127 == 127, bits - 1, bits).to(torch.uint8).view(E4M3)


def weights_of(exponent):
    """w13 of any codes; w2 the identity, so that y are h's numbers, and no order of sums matters."""
    g = torch.Generator().manual_seed(exponent)
    w13 = torch.randint(256, (1, 2 * SIZE, SIZE // 2), generator=g).to(torch.uint8)
    codes = torch.eye(SIZE, dtype=torch.uint8) * 2
    w2 = (codes[:, 0::2] | codes[:, 1::2] << 4)[None]
    ones = torch.ones(1, SIZE, SIZE // 16).to(E4M3)
    outer = torch.ldexp(torch.ones(1, 2), torch.tensor([[5 - exponent, 6 - exponent]]))
    scales = scales_of(exponent, 2 * SIZE, exponent), ones
    return ExpertWeights.from_nvfp4(w13, w2, scales, (outer, torch.ones(1)))


def moved(w, device):
    return ExpertWeights(**{name: t.to(device) for name, t in w.named().items()})


def every_scale(backend, device, rows):
    layer = make_backend(backend, PROBLEM, None, device=device)
    plain = make_backend(backend, replace(PROBLEM, precision="bf16"), None, device=device)
    x = torch.eye(SIZE, dtype=torch.bfloat16, device=device).repeat(2, 1)[:rows]
    ids, scores = (torch.full((rows, 1), v, device=device) for v in (0, 1.0))
    for exponent in range(16):
        w = weights_of(exponent)
        y, _ = layer.forward(Call(x, ids, scores, moved(w, device)))
        dense = w.dense(PROBLEM, torch.bfloat16)
        want, _ = plain.forward(Call(x, ids, scores, moved(dense, device)))
        assert torch.equal(y.view(torch.int16), want.view(torch.int16)), exponent
        assert y.isfinite().all()
        assert y.any()
    for each in (layer, plain):
        each.close()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_every_scale(rows):
    every_scale("mega", "cuda", rows)


@pytest.mark.gpu
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("rows", [16, 128])
def test_a_nan_scale(rows, byte):
    layer = make_backend("mega", PROBLEM, None, device="cuda")
    w = moved(weights_of(9), "cuda")
    w.w13_scale[0, 0, 0, 16 + 5] = byte  # row 1, columns 16 to 31
    x = torch.eye(SIZE, dtype=torch.bfloat16, device="cuda").repeat(2, 1)[:rows]
    ids, scores = (torch.full((rows, 1), v, device="cuda") for v in (0, 1.0))
    y, _ = layer.forward(Call(x, ids, scores, w))
    assert y[:, 1].isnan().all()  # NaN times 0 is NaN
    layer.close()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 60, 500])
def test_against_the_reference(tokens):
    """With fp32 scales that are no powers of two, biases, and gate and up apart."""
    problem = Problem(1024, 640, 9, 3, max_tokens=500, precision="bf16xnvfp4", bias=True)
    w = make_weights(problem, device="cuda")
    i = make_inputs(problem, tokens, device="cuda")
    call = i.x, i.topk_ids, i.topk_weights
    layer = make_backend("mega", problem, None, device="cuda")
    y, _ = layer.forward(Call(*call, w))
    assert_close(y, forward(problem, *[[t] for t in call], [w])["y"][0], relative=4e-3)
    layer.close()
