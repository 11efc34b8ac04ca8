"""Layers and models of Megatron-Core: its own experts, and a megamoe layer over the same parameters."""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from copies import watched
from pages import programs

import megamoe
from megamoe.core.config import ACTIVATIONS, Activation
from megamoe.core.errors import ArgumentError, ConfigError, MegaMoEError
from megamoe.layer import main_grad
from megamoe.testing import assert_close, compare, same_bits

pytest.importorskip("megatron.core", reason="megatron-core is missing: make libraries")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import quick_gelu, squared_relu  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.inference.utils import set_decode_expert_padding  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.transformer.enums import CudaGraphScope  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # noqa: E402
from megatron_models import (  # noqa: E402
    EXPERTS,
    OPTIONS,
    config_of,
    grouped_gemm,
    losses_of,
    model_of,
    pair_of,
    results,
    rows,
    spec_of,
    spread,
    start,
)

from megamoe.adapters import megatron as adapter  # noqa: E402
from megamoe.adapters.megatron_experts import (
    activation_of,
    routes_of,
    turned_ids,
    weights_of,
)  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def megatron(one_rank):
    start()
    yield
    parallel_state.destroy_model_parallel()


def compare_layers(theirs, ours, x=None, dy=None):
    x, dy = rows() if x is None else x, rows(seed=2) if dy is None else dy
    expected, found = results(theirs, x, dy), results(ours, x, dy)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        if value is not None and value.any():
            assert_close(found[name], value, relative=0.02, name=name)
    assert expected["y"].any()
    return found


BIASES = {"add_bias_linear": True}
QUICK = {
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
}
# Megatron rounds pre-activations to bf16, so that gradients of those close to the clamp come or not: few are.
FAR = {"activation_func_clamp_value": 4.7}
LAYERS = {
    "swiglu": ("sequential", {}),
    "geglu": ("sequential", {"activation_func": F.gelu}),
    "clamped": ("sequential", QUICK | FAR),
    "relu2": ("sequential", {"activation_func": squared_relu, "gated_linear_unit": False}),
    "shared expert": ("sequential", {"moe_shared_expert_intermediate_size": 32}),
    "one of all": ("sequential", {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "weights on the input": (
        "sequential",
        {
            "moe_router_topk": 1,
            "moe_router_pre_softmax": True,
            "moe_apply_probs_on_input": True,
            "moe_router_dtype": "fp32",
        },
    ),
    "sigmoid": (
        "sequential",
        {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    ),
    "auxiliary loss": (
        "sequential",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5},
    ),
    "router in fp32": ("sequential", {"moe_router_dtype": "fp32"}),
    "dropped by probability": ("sequential", {"moe_expert_capacity_factor": 0.5}),
    "dropped by position": (
        "sequential",
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ),
    "recomputed": (
        "sequential",
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ),
    "TEGroupedMLP": ("te", {}),
    "TEGroupedMLP with biases": ("te", QUICK | FAR | BIASES),
    "GroupedMLP": ("grouped", {"moe_grouped_gemm": True}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_megatron(name):
    kind, changes = LAYERS[name]
    with grouped_gemm():
        compare_layers(*pair_of(kind, **changes))


def test_biases_of_a_linear_module_for_each_expert():
    """Forward alone: behind Megatron's own linear modules its SequentialMLP adds biases where autograd forbids it."""
    theirs, ours = pair_of(**QUICK | BIASES)
    with torch.no_grad():
        assert_close(ours(rows())[0], theirs(rows())[0], relative=0.02)
    ours(rows())[0].backward(rows(seed=2))
    assert all(p.grad.any() for n, p in ours.experts.named_parameters() if "bias" in n)


def test_tokens_are_dropped_at_all():
    """Else two tests above would compare nothing."""
    theirs, ours = pair_of(moe_expert_capacity_factor=0.5)
    ours(rows())
    assert (ours.token_dispatcher.topk_ids == -1).sum() > 3


def test_calls_of_other_sizes():
    theirs, ours = pair_of()
    for length in (1, 17, 32):
        with torch.no_grad():
            y, expected = ours(rows(length))[0], theirs(rows(length))[0]
        assert y.shape == expected.shape
        assert_close(y, expected, relative=0.02)
    with pytest.raises(ArgumentError, match="at most max_tokens = 64"):
        ours(rows(33))


@pytest.mark.parametrize("kind", ["sequential", "te"])
def test_parameters_are_read_in_place_until_they_move(kind):
    _, ours = pair_of(kind)
    parameters = list(ours.experts.parameters())
    starts = {p.data_ptr() for p in parameters}
    weights = weights_of(ours.experts)
    assert {weights.w13.data_ptr(), weights.w2.data_ptr()} <= starts
    before = ours(rows())[0]
    for p in parameters:
        p.data = p.data.clone()
    weights = weights_of(ours.experts)
    assert not {weights.w13.data_ptr(), weights.w2.data_ptr()} & {p.data_ptr() for p in parameters}
    assert same_bits(ours(rows())[0], before)


def test_quantized_experts_follow_every_parameter():
    theirs, ours = pair_of(options={"precision": "fp8"})
    with torch.no_grad():
        assert_close(ours(rows())[0], theirs(rows())[0], relative=0.1)
        for layer in (theirs, ours):
            for expert in list(layer.experts.local_experts)[1:]:
                expert.linear_fc2.weight.mul_(-1)
        assert_close(ours(rows())[0], theirs(rows())[0], relative=0.1)


def apart(layer):
    for p in layer.experts.parameters():
        p.data = p.data.clone()


@pytest.mark.parametrize("lay", [lambda _: None, spread, apart], ids=["tied", "buffer", "apart"])
@pytest.mark.parametrize("kind", ["sequential", "te", "grouped"])
def test_experts_are_quantized_once_a_step(kind, lay):
    with grouped_gemm():
        _, ours = pair_of(kind, options={"precision": "fp8"})
    lay(ours)
    parameters = list(ours.experts.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    with watched() as seen:
        for _ in range(2):
            for micro in range(3):
                ours(rows(seed=micro))[0].float().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            ours(rows())
            for p in parameters:
                p.mul_(-1)
                ours(rows())
                ours(rows())
            ours.load_state_dict(ours.state_dict())
            ours(rows())
    assert seen["stale"] == 0
    assert seen["q"] == 2 * (1 + 2 + 1) + len(parameters)


def routes(probs, chosen, top_k=2):
    routing_map = torch.tensor(chosen, dtype=torch.bool)
    return routes_of(torch.tensor(probs), routing_map, top_k)


def test_dense_routes_become_ids():
    ids, weights = routes([[0.1, 0.7, 0.2], [0.0, 0.0, 0.5], [0.3, 0.0, 0.0], [0.0] * 3],
                          [[0, 1, 1], [1, 0, 1], [1, 0, 0], [0] * 3])  # fmt: skip
    assert ids.tolist() == [[1, 2], [0, 2], [0, -1], [-1, -1]]  # 0 is chosen with probability 0
    expected = torch.tensor([[0.7, 0.2], [0.0, 0.5], [0.3, 0.0], [0.0, 0.0]])
    assert torch.equal(weights, expected)
    with pytest.raises(RuntimeError, match="tokens with more than 2 experts"):
        routes([[0.1, 0.2, 0.3]], [[1, 1, 1]])


def test_a_chosen_expert_of_probability_0_has_a_gradient():
    probs = torch.zeros(1, 3, requires_grad=True)
    routes_of(probs, torch.tensor([[True, False, True]]), 2)[1].sum().backward()
    assert probs.grad.tolist() == [[1.0, 0.0, 1.0]]


def main_grads(layer, order, dtype):
    """Give the experts' matrices views of one buffer, as Megatron's DDP does, in an order of its own."""
    parameters = [p for n, p in layer.experts.named_parameters() if "weight" in n]
    sizes = [p.numel() for p in parameters]
    buffer = torch.full((sum(sizes),), 0.5, dtype=dtype)
    parts = dict(zip(parameters, buffer.split(sizes), strict=True))
    if order == "reversed":
        parts = dict(zip(parameters[::-1], buffer.split(sizes[::-1]), strict=True))
    for p, part in parts.items():
        p.main_grad, p.grad_added_to_main_grad = part.view(p.shape), False
    return parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["ascending", "reversed"])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_are_added_to_main_grad(order, dtype, delay):
    _, plain = pair_of()
    _, ours = pair_of(options={"delay_wgrad": delay})
    ours.experts.config.gradient_accumulation_fusion = True
    expected = results(plain, rows(), rows(seed=2))
    parameters = main_grads(ours, order, dtype)
    parameters[3].overwrite_main_grad = order == "reversed"
    results(ours, rows(), rows(seed=2))
    if delay:
        assert not any(p.grad_added_to_main_grad for p in parameters)
        ours.backward_dw()
    for name, p in ours.experts.named_parameters():
        assert p.grad_added_to_main_grad
        overwritten = getattr(p, "overwrite_main_grad", False)
        found = p.main_grad if overwritten else p.main_grad - 0.5
        assert_close(found, expected[f"experts.{name}"], relative=0.02, name=name)


def test_frozen_experts_and_those_without_main_grad():
    _, ours = pair_of()
    ours.experts.config.gradient_accumulation_fusion = True
    first = ours.experts.local_experts[0].linear_fc1.weight
    with pytest.raises(ArgumentError, match="main_grad is None"):
        ours(rows())
    parameters = main_grads(ours, "ascending", torch.float32)
    first.requires_grad_(False)
    first.main_grad.fill_(0.5)
    results(ours, rows(), rows(seed=2))
    assert bool((first.main_grad == 0.5).all())
    assert not any(bool((p.main_grad == 0.5).all()) for p in parameters if p is not first)


def test_weight_gradients_that_wait():
    _, plain = pair_of()
    _, ours = pair_of(options={"delay_wgrad": True})
    expected, found = (results(layer, rows(), rows(seed=2)) for layer in (plain, ours))
    assert same_bits(found["x"], expected["x"])
    assert all(p.grad is None for p in ours.experts.parameters())
    ours.backward_dw()
    for name, p in ours.named_parameters():
        assert same_bits(p.grad, expected[name]), name
    with pytest.raises(MegaMoEError, match="while no backward pass waits"):
        ours.backward_dw()
    with pytest.raises(ConfigError, match="delay_wgrad is False, expected True"):
        plain.backward_dw()


def test_weight_gradients_of_two_passes_at_once():
    """Experts are joined anew for each pass, in place, so one launch makes the gradients of both: in fp32 sums."""
    _, plain = pair_of()
    _, ours = pair_of(options={"delay_wgrad": "keep", "backend": "emulate"})
    ours.experts.config.gradient_accumulation_fusion = True
    parameters = main_grads(ours, "ascending", torch.float32)
    for seed in (1, 3):
        for layer in (plain, ours):
            layer(rows(seed=seed))[0].backward(rows(seed=2))
    assert not any(p.grad_added_to_main_grad for p in parameters)
    ours.backward_dw(passes=2)
    expected = dict(plain.experts.named_parameters())
    for name, p in ours.experts.named_parameters():
        assert p.grad_added_to_main_grad
        assert_close(p.main_grad - 0.5, expected[name].grad, relative=0.02, name=name)
    with pytest.raises(MegaMoEError, match="while no backward pass waits"):
        ours.backward_dw(passes=2)


class Routes:
    """Stands where a router has Megatron's RouterReplay: keeps the routes of a call, or replays another router's."""

    def __init__(self, recorded=None, flips=False):
        self.recorded, self.flips, self.ids = recorded, flips, None

    def get_replay_topk(self, scores, topk, num_groups, group_topk, choose):
        best, ids = choose(scores, topk + 1, num_groups=num_groups, group_topk=group_topk)
        if self.flips:  # as rounding would: the token whose last two choices are closest
            token = (best[:, -2] - best[:, -1]).argmin()
            ids[token, -2] = ids[token, -1]
        self.ids = ids[:, :topk] if self.recorded is None else self.recorded.ids
        return scores.gather(1, self.ids), self.ids


def training_apart(replays, flips):
    """Train five steps; return how far losses, gradients of experts, and of the rest, are from Megatron's in each.

    Step by step from the same parameters: what rounding differs by, five steps amplify. By the routes of Megatron's
    own run (replays): by its own ones a model differs wherever rounding tips a token's route over.
    """
    theirs, ours = model_of(False), model_of(True)
    for there, here in zip(theirs.decoder.layers, ours.decoder.layers, strict=True):
        recorded = there.mlp.router.router_replay = Routes(flips=flips)
        here.mlp.router.router_replay = Routes(recorded if replays else None)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    losses, apart = [], []

    def gradients(model, of_experts):
        named = model.named_parameters()
        return torch.cat([p.grad.flatten() for n, p in named if ("experts" in n) == of_experts])

    for _ in range(5):
        theirs.load_state_dict(ours.state_dict())
        for model in (theirs, ours):
            model.zero_grad()
            losses.append(losses_of(model).mean())
            losses[-1].backward()
        pairs = [[gradients(model, of) for model in (ours, theirs)] for of in (True, False)]
        apart.append([compare(*pair).relative for pair in (losses[:-3:-1], *pairs)])
        optimizer.step()
    assert losses[-1].item() < 0.7 * losses[0].item()
    adapter.close(ours)
    return torch.tensor(apart).T


@pytest.mark.parametrize("flips", [False, True])
def test_models_train_as_megatron_does(flips):
    """With one token of every layer and step sent elsewhere in Megatron's run, too: that is seen without a replay."""
    losses, *gradients = training_apart(replays=True, flips=flips)
    assert losses.max() < 0.005
    assert max(of.max() for of in gradients) < 0.03
    if flips:
        assert min(of.max() for of in training_apart(replays=False, flips=True)[1:]) > 0.1


def test_models_are_recomputed_and_saved_as_megatron_does():
    plain, whole = model_of(True), {"recompute_granularity": "full"}
    again = model_of(True, recompute_method="uniform", recompute_num_layers=1, **whole)
    again.load_state_dict(plain.state_dict())
    for model in (plain, again):
        losses_of(model).mean().backward()
    for p, q in zip(plain.parameters(), again.parameters(), strict=True):
        assert_close(q.grad, p.grad, relative=1e-6)
    theirs = model_of(False).sharded_state_dict()
    ours = plain.sharded_state_dict()
    assert theirs.keys() == ours.keys()
    assert all(type(ours[name]) is type(value) for name, value in theirs.items())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_megatrons_ddp_finds_all_gradients(sharded, overlap, fused, delay):
    theirs, ours = model_of(False), model_of(True, {"delay_wgrad": delay})
    ours.load_state_dict(theirs.state_dict())
    losses_of(theirs).mean().backward()
    for layer in ours.decoder.layers:
        layer.mlp.experts.config.gradient_accumulation_fusion = fused
    options = {"overlap_grad_reduce": overlap, "use_distributed_optimizer": sharded}
    ddp = DistributedDataParallel(ours.config, DistributedDataParallelConfig(**options), ours)
    ddp.zero_grad_buffer()
    for _ in range(2):  # micro-batches
        losses_of(ddp).mean().backward()
        for layer in ours.decoder.layers if delay else []:
            layer.mlp.backward_dw()
    ddp.finish_grad_sync()
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert q.grad is None
        assert_close(q.main_grad, 2 * p.grad.float(), relative=0.06, name=name)


class MainParameters:
    """Do what Megatron's distributed optimizer does, which needs GPUs, to the buffers of its DDP.

    fp32 main parameters are stepped by torch and copied to the model's, which are gathered at once or by the hooks of
    the next forward pass.
    """

    def __init__(self, ddp):
        self.ddp, self.buffers = ddp, [*ddp.buffers, *ddp.expert_parallel_buffers]
        self.mains = [torch.nn.Parameter(b.param_data.detach().float()) for b in self.buffers]
        self.inner = torch.optim.AdamW(self.mains, lr=1e-2, fused=True)

    @torch.no_grad()
    def step(self):
        for main, buffer in zip(self.mains, self.buffers, strict=True):
            main.grad = buffer.grad_data.float()
        self.inner.step()
        for main, buffer in zip(self.mains, self.buffers, strict=True):
            buffer.param_data.copy_(main)
        if not self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_main_parameters_are_followed_once_a_step(at_once, overlap, dtype):
    """Experts in fp32 are their own main parameters: no bf16 copy of them exists."""
    ours = model_of(True, {"precision": "fp8"})
    for layer in ours.decoder.layers:
        layer.mlp.experts.to(dtype)
    options = {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **options)
    ddp = DistributedDataParallel(ours.config, config, ours)
    optimizer, steps, of_calls = MainParameters(ddp), [], []
    with watched() as seen:
        for _ in range(3):
            before = seen["q"]
            for micro in range(2):
                losses_of(ddp, micro).mean().backward()
            ddp.finish_grad_sync()
            of_calls.append(seen["q"] - before)
            weight = ours.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight
            old, before = weight.detach().clone(), seen["q"]
            optimizer.step()
            assert not torch.equal(old, weight)
            if at_once:
                megamoe.quantize_experts(ddp)
            steps.append(seen["q"] - before)
            ddp.zero_grad_buffer()
    due = 2 * len(ours.decoder.layers)
    assert seen["stale"] == 0
    mlp = ours.decoder.layers[0].mlp
    assert {w.dtype for w in mlp._weights(mlp._layer).named().values()} == {dtype}
    shared = {b.param_data.data_ptr() for b in optimizer.buffers if b.param_dtype == torch.float32}
    assert shared <= {main.data_ptr() for main in optimizer.mains}
    assert bool(shared) == (dtype == torch.float32)
    assert steps == ([due] * 3 if at_once else [0] * 3)
    assert of_calls == ([due, 0, 0] if at_once else [due] * 3)
    with pytest.raises(ArgumentError, match="quantize_experts"):
        megamoe.after_step(optimizer.inner, ddp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_the_distributed_optimizer_are_read_in_place(dtype):
    ours = model_of(True)
    for layer in ours.decoder.layers:
        layer.mlp.experts.config.gradient_accumulation_fusion = True
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=dtype == torch.float32
    )
    ddp = DistributedDataParallel(ours.config, config, ours)
    losses_of(ddp).mean().backward()
    layer = ours.decoder.layers[0].mlp
    assert layer._descending
    weights = weights_of(layer.experts, adding=True, descending=True)
    last = layer.experts.local_experts[-1]
    mains = main_grad.targets(weights, (True, True), set())
    for name, parameter in (("w13", last.linear_fc1.weight), ("w2", last.linear_fc2.weight)):
        assert getattr(weights, name).data_ptr() == parameter.data_ptr()
        assert mains[name].dtype == dtype
        assert mains[name].data_ptr() == parameter.main_grad.data_ptr()
    before = layer(rows())[0]
    for p in layer.experts.parameters():
        p.data = p.data.clone()  # the order stays
    assert same_bits(layer(rows())[0], before)
    adapter.close(ours)
    assert same_bits(layer(rows())[0], before)
    assert not layer._descending


def test_layers_through_the_source_of_the_kernel():
    """It reads parameters and writes to main_grad as they lie, in descending order."""
    theirs, ours = pair_of(options={"backend": "emulate"})
    ours.experts.config.gradient_accumulation_fusion = True
    spread(ours)
    expected = results(theirs, rows(), rows(seed=2))
    main_grads(ours, "reversed", torch.float32)
    found = results(ours, rows(), rows(seed=2))
    assert ours._descending
    for name in ("y", "x", "router.weight"):
        assert_close(found[name], expected[name], relative=0.02, name=name)
    for name, p in ours.experts.named_parameters():
        assert_close(p.main_grad - 0.5, expected[f"experts.{name}"], relative=0.02, name=name)


def test_ids_are_turned_on_each_rank():
    ids = torch.tensor([[0, 1, 2], [3, 5, -1]])
    assert turned_ids(ids, 3).tolist() == [[2, 1, 0], [5, 3, -1]]
    assert turned_ids(ids, 1).tolist() == ids.tolist()


def test_gathered_parameters_are_waited_for():
    ours = model_of(True)
    options = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **options)
    ddp = DistributedDataParallel(ours.config, config, ours)
    waited = []
    layer = ours.decoder.layers[1].mlp
    for group in ddp.bucket_groups:
        group.finish_param_sync = lambda **_: waited.append(1)
    with torch.no_grad():
        layer(rows())
    matrices = len(list(layer.experts.parameters()))
    assert len(waited) == 1 + matrices  # the router's, too
    layer.experts.local_experts[2].linear_fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="hooks of ColumnParallelLinear: test_gathered_param"):
        layer(rows())


def test_the_program_of_the_document_runs():
    (program,) = programs("docs/adapters.md", "megatron")
    on_cpus = (
        "use_cpu_initialization=True, bias_activation_fusion=False, masked_softmax_fusion=False"
    )
    smaller = {"num_layers=48": f'num_layers=2, {on_cpus}, transformer_impl="local"',
               "hidden_size=2048": "hidden_size=64", "heads=32": "heads=4", "experts=128": "experts=6",
               "topk=8": "topk=2", "ffn_hidden_size=768": "ffn_hidden_size=48", "151936": "128",
               "use_transformer_engine=True": "use_transformer_engine=False",
               "4096": "16", "max_tokens=8192": 'max_tokens=64, backend="staged"'}  # fmt: skip
    for large, small in smaller.items():
        assert large in program
        program = program.replace(large, small)
    names = {}
    here = [mock.patch.object(dist, "init_process_group"), mock.patch("torch.cuda.set_device")]
    here += [mock.patch.object(parallel_state, "initialize_model_parallel")]  # one_rank() did
    here += [mock.patch("megatron.core.tensor_parallel.model_parallel_cuda_manual_seed")]
    with contextlib.ExitStack() as patched, mock.patch.dict("os.environ", LOCAL_RANK="0"):
        started, *_ = map(patched.enter_context, here)
        exec(program, names)
    started.assert_called_once()
    model = names["model"].bfloat16()
    assert all(type(block.mlp) is adapter.MegaMoELayer for block in model.decoder.layers)
    losses_of(model).mean().backward()
    assert all(p.grad.any() for p in model.decoder.layers[1].mlp.experts.parameters())


def test_process_groups_of_a_model_reach_the_layer():
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.ep = dist.new_group([0])
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    spec = adapter.replace(spec, **OPTIONS)
    layer = build_module(spec, config=config_of(), layer_number=1, pg_collection=groups)
    assert type(layer.mlp) is adapter.MegaMoELayer
    assert layer.is_moe_layer
    assert layer.mlp.ep_group is groups.ep


REFUSED = {
    "fp8": "hybrid", "moe_apply_probs_on_input": True, "moe_pad_expert_input_to_capacity": True,
    "moe_permute_fusion": True, "moe_shared_expert_overlap": True, "moe_latent_size": 32,
    "use_te_activation_func": True, "activation_func_fp8_input_store": True,
    "overlap_moe_expert_parallel_comm": True, "use_kitchen": True, "fp4": "e2m1", "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0, "cuda_graph_impl": "local",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_a_layer_does_not_compute_are_refused(name):
    config = config_of()
    setattr(config, name, REFUSED[name])  # Megatron wants other options, or packages, beside some
    with pytest.raises(ConfigError, match=name):
        build_module(adapter.replace(spec_of("sequential"), **OPTIONS), config=config)


def test_padding_that_is_turned_on_later_is_refused():
    """As in inference, where it gives experts tokens that were not routed to them."""
    model = model_of(True).eval()
    ours = model.decoder.layers[1].mlp
    with torch.no_grad():
        y = ours(rows())[0]
        for factor in (EXPERTS / 2, 1.0):  # of all tokens, and of few
            set_decode_expert_padding(model, True, factor)
            with pytest.raises(ConfigError, match="moe_pad_expert_input_to_capacity is True"):
                ours(rows())
        set_decode_expert_padding(model, False)
        assert same_bits(ours(rows())[0], y)


def test_further_configurations_are_refused():
    made = adapter.replace(spec_of("sequential"), **OPTIONS)
    config = config_of(recompute_granularity="selective", recompute_modules=["core_attn"])
    config.recompute_modules = ["moe_act"]
    with pytest.raises(ConfigError, match="recompute_modules"):
        build_module(made, config=config)
    config = config_of()
    config.fine_grained_activation_offloading, config.offload_modules = True, ["moe_act"]
    with pytest.raises(ConfigError, match="offload_modules"):
        build_module(made, config=config)
    with pytest.raises(ConfigError, match="activation is that of activation_func relu, expected"):
        build_module(made, config=config_of(activation_func=F.relu))
    layer = build_module(made, config=config_of(params_dtype=torch.float32))
    with pytest.raises(ConfigError, match="experts.local_experts.0.linear_fc1.weight is Tensor of"):
        layer(rows())
    assert layer.bfloat16()(rows())[0].isfinite().all()  # as Float16Module does
    config = config_of()
    config.cuda_graph_impl, config.cuda_graph_scope = "local", [CudaGraphScope.full_iteration]
    build_module(made, config=config)


def test_experts_of_other_classes_are_refused():
    _, ours = pair_of()
    ours.experts.local_experts[1].low_rank = torch.nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="experts.local_experts.1.low_rank.weight is a parameter"):
        ours(rows())

    class Other(type(ours.experts)):
        pass

    spec = adapter.replace(spec_of("sequential"), **OPTIONS)
    spec.submodules.experts.module = Other
    with pytest.raises(ConfigError, match="experts is Other, expected SequentialMLP, TEGroupedMLP"):
        build_module(spec, config=config_of())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, expected 1.."),
        ({"precision": "fp9"}, "precision is 'fp9', expected bf16 or fp8"),
        ({"precision": "bf16xmxfp4"}, "precision is 'bf16xmxfp4', expected 'bf16' or 'fp8'"),
        ({"backend": "magma"}, "backend is 'magma', expected auto, mega"),
        ({"reserve_sm": 3}, "option is 'reserve_sm', expected one of"),
    ],
)
def test_wrong_options_are_named(options, message):
    spec = adapter.replace(spec_of("sequential"), **options)
    config = config_of(moe_ffn_hidden_size=64)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_module(spec, config=config)


def test_a_spec_without_moe_layers_is_refused():
    with pytest.raises(ConfigError, match="spec is ModuleSpec, expected one with a MoELayer"):
        adapter.replace(ModuleSpec(module=torch.nn.Linear))


def test_activations_are_told_apart():
    expected = Activation("clamped_swiglu", alpha=1.702, limit=1.5, up_offset=1.0)
    assert activation_of(config_of(**QUICK)) == expected
    quick = config_of(activation_func=quick_gelu)
    assert activation_of(quick) == Activation("clamped_swiglu", alpha=1.702)
    assert activation_of(config_of()) == ACTIVATIONS["swiglu"]
    tanh = config_of(activation_func=lambda v: F.gelu(v, approximate="tanh"))
    assert activation_of(tanh) == ACTIVATIONS["geglu_tanh"]
