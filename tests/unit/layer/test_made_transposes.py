"""transposes="made": the bits of "kept", one buffer for the layers of a device, and nothing kept."""

import gc

import pytest
import torch

import megamoe
from megamoe.core.errors import ConfigError
from megamoe.launch import cache
from megamoe.testing.compare import same_bits

SHAPE = {"hidden": 144, "intermediate": 48, "num_experts": 4, "top_k": 2, "max_tokens": 32}
WAYS = ["kept", "made"]


def make(way, backend="emulate", **options):
    options = SHAPE | {"precision": "fp8", "init_seed": 3, "transposes": way} | options
    return megamoe.MegaMoE(backend=backend, **options)


def batch(seed=0, hidden=144):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, hidden, generator=generator).bfloat16().requires_grad_()
    weights, ids = torch.randn(24, 4, generator=generator).softmax(-1).topk(2)
    return x, ids, weights


def trained(*layers, steps=2):
    """Train layers one behind the other; return y and all gradients of the last step, and the parameters."""
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for step in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        x, ids, weights = batch(step)
        y = x
        for layer in layers:
            y = layer(y, ids, weights)
        y.float().square().sum().backward()
    of_weights = [t for layer in layers for p in layer.parameters() for t in (p.grad, p.data)]
    return [y.detach(), x.grad, *of_weights]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_are_those_of_kept_transposes(dtype):
    """Two layers in one backward pass, so that the second overwrites what the first one has used."""
    kept, made = (trained(*(make(way, dtype=dtype, init_seed=i) for i in range(2))) for way in WAYS)
    assert len(kept) == len(made) == 10
    assert all(map(same_bits, kept, made))


@pytest.mark.parametrize(
    "options", [{"delay_wgrad": True}, {"weight_gradients": "e4m3"}, {"bias": True}]
)
def test_bits_are_equal_with_other_options(options):
    def run(way):
        layer = make(way, **options)
        x, ids, weights = batch()
        y = layer(x, ids, weights)
        y.float().square().sum().backward()
        if "delay_wgrad" in options:
            layer.backward_dw()
        return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

    assert all(map(same_bits, *map(run, WAYS)))


def test_bits_are_equal_for_loaded_weights():
    def run(way):
        layer, of = make(way), make("kept", dtype=torch.float32)
        made = of.expert_weights().quantized(of.problem)
        layer.load_fp8_weights(*(getattr(made, n) for n in ("w13", "w2", "w13_scale", "w2_scale")))
        x, ids, weights = batch()
        layer(x, ids, weights).float().square().sum().backward()
        assert layer._layer._runtime.cache._kept_transposes is None or way == "kept"
        return [x.grad]

    assert all(map(same_bits, *map(run, WAYS)))


def test_one_buffer_for_all_layers_of_a_device(monkeypatch):
    """It is as large as the largest layer, each pass writes it once, and the last layer frees it."""
    written = []
    transpose = cache.transpose_weights
    monkeypatch.setattr(
        cache, "transpose_weights", lambda *args: written.append(args[0]) or transpose(*args)
    )
    layers = [make("made", "reference", init_seed=i) for i in range(3)]
    trained(*layers, steps=2)
    assert len(written) == 2 * 2 * 3  # w13 and w2, of each layer and backward pass
    held = [layer._layer._runtime.cache for layer in layers]
    assert all(entry.transposed is None for c in held for entry in c._entries.values())
    (buffer,) = {c._buffer for c in held}
    assert buffer.memory.nbytes == sum(p.numel() for p in layers[0].parameters())
    large = make("made", "reference", intermediate=64)
    x, ids, weights = batch()
    large(x, ids, weights).sum().backward()
    trained(layers[0], steps=1)
    assert held[0]._buffer is buffer  # a graph may read there
    assert large._layer._runtime.cache._buffer.memory.nbytes > buffer.memory.nbytes
    assert len(cache._buffers) == 1  # the largest; it serves new layers
    for layer in (*layers, large):
        layer.close()
    del held, buffer
    gc.collect()
    assert not cache._buffers


def test_report_counts_copies_and_transposes():
    layer = make("made")
    report = megamoe.memory_report(layer)
    weights = layer.w13.numel() + layer.w2.numel()
    scales = layer.expert_weights().quantized(layer.problem)
    of_scales = scales.w13_scale.nbytes + scales.w2_scale.nbytes
    assert report["copies_bytes"] == report["transposes_bytes"] == weights + of_scales
    assert "their transposes" in report["text"]
    assert "w13 and w2" in report["text"]
    plain = megamoe.memory_report(make("kept", precision="bf16"))
    assert plain["copies_bytes"] == plain["transposes_bytes"] == 0
    masters = {
        d: megamoe.memory_report(make("kept", dtype=d)) for d in (torch.bfloat16, torch.float32)
    }
    assert [m["masters_bytes"] for m in masters.values()] == [2 * weights, 4 * weights]


def test_other_values_are_refused():
    with pytest.raises(ConfigError, match="transposes is 'never', expected 'kept' or 'made'"):
        make("never")
