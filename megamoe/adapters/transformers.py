"""Experts of Hugging Face transformers (5.x) through a megamoe layer, on one GPU or CPU.

    import megamoe.adapters.transformers as adapter

    adapter.register()  # options: those of megamoe.Layer
    model = AutoModelForCausalLM.from_pretrained(..., dtype=torch.bfloat16, experts_implementation="megamoe")

The experts' parameters stay where they are, so that checkpoints, optimizers and `save_pretrained` know nothing of it;
they are read by their strides, gate and up rows interleaved or not. Stored transposed (GPT-OSS), or in another type
than bf16, they are copied in every call. Gradients reach x, routing weights and all parameters.

The activation is not looked up by name: it is the one of megamoe's that gives what the module's own gate gives, so that
a model with another one is refused, not computed wrongly.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from megamoe.config import Activation, Problem, activation_by_name
from megamoe.errors import ConfigError
from megamoe.formats.weights import ExpertWeights
from megamoe.frontend.layer import Layer

NAME = "megamoe"
MAX_TOKENS = 8192
_GATED = ("swiglu", "geglu", "geglu_tanh")
_SAMPLES = 4096
_TOLERANCE = 1e-5  # both are fp32, by other formulas


class Experts:
    """What is registered: a function of the experts' module, with a layer for each of them.

    precision: "bf16" or "fp8". max_tokens: of a call of the layer; longer inputs take several. options: of Layer.
    """

    def __init__(
        self, *, precision: str = "bf16", max_tokens: int = MAX_TOKENS, **options: Any
    ) -> None:
        self._precision, self._max_tokens, self._options = precision, max_tokens, options
        self._layers: WeakKeyDictionary[nn.Module, Layer] = WeakKeyDictionary()

    def __call__(
        self, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """hidden_states: [T, H], top_k_index, top_k_weights: [T, K] -> [T, H] in hidden_states' type.

        Raises ConfigError for a module that a layer cannot stand for.
        """
        weights = weights_of(module)
        layer = self._layers.get(module)
        if layer is None:
            problem = self._problem(module, weights, top_k_index.shape[-1])
            layer = self._layers[module] = Layer(problem, "alone", **self._options)
        x = hidden_states.to(torch.bfloat16)
        calls = (t.split(self._max_tokens) for t in (x, top_k_index, top_k_weights))
        parts = [layer(*call, weights) for call in zip(*calls, strict=True)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y.to(hidden_states.dtype)

    def _problem(self, module: Any, weights: ExpertWeights, top_k: int) -> Problem:
        num_experts, hidden, intermediate = weights.w2.shape
        return Problem(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            max_tokens=self._max_tokens,
            precision=self._precision,
            activation=activation_of(module),
            bias=module.has_bias,
        )

    def close(self) -> None:
        """Close the layers of all modules. A call reopens its layer."""
        for layer in self._layers.values():
            layer.close()


def register(name: str = NAME, **options: Any) -> Experts:
    """Make `experts_implementation=name` known to transformers. options: of Experts. Returns what was registered."""
    made = Experts(**options)
    ExpertsInterface.register(name, made)
    return made


def weights_of(module: Any) -> ExpertWeights:
    """Return a module's experts as a layer takes them: views of its parameters where they are bf16, not transposed."""
    _check(module)
    w13 = module.gate_up_proj if module.has_gate else module.up_proj
    w2, b13, b2 = module.down_proj, None, None
    if module.has_bias:
        b13 = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        b13, b2 = b13.float(), module.down_proj_bias.float()
    w13, w2 = w13.to(torch.bfloat16), w2.to(torch.bfloat16)
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    if module.has_gate and not module.is_concatenated:  # rows g0, u0, g1, u1, ...
        w13 = w13.unflatten(1, (-1, 2)).transpose(1, 2)
        b13 = None if b13 is None else b13.unflatten(1, (-1, 2)).transpose(1, 2)
    return ExpertWeights(w13, w2, b13, b2)


def _check(module: Any) -> None:
    """Raise ConfigError for what a layer of one rank does not compute."""
    kind = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError("experts", kind, "no norm behind each expert")
    if getattr(module, "_is_expert_parallel", False):
        raise ConfigError("experts", f"{kind} over several ranks", "all experts on one rank")
    matrix = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    if not isinstance(matrix, Tensor) or matrix.dim() != 3:
        raise ConfigError(
            "experts", kind, "parameters of all experts in one tensor of 3 dimensions"
        )


@torch.no_grad()
def activation_of(module: Any) -> Activation:
    """Return the activation that gives what the module's own gate gives, on random pre-activations."""
    planes = 2 if module.has_gate else 1
    candidates = [activation_by_name(name) for name in (_GATED if planes == 2 else ("relu2",))]
    limit, alpha = getattr(module, "limit", None), getattr(module, "alpha", 1.0)
    if planes == 2 and limit is not None:
        candidates += [
            Activation("clamped_swiglu", alpha=float(alpha), limit=float(limit), up_offset=offset)
            for offset in (0.0, 1.0)
        ]
    device = next(module.parameters()).device
    scale = 5.0 if limit is None else 2.0 * float(limit)  # far enough that clamps matter
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, planes, _SAMPLES, generator=generator) * scale
    drawn = drawn.to(device)
    given = drawn.flatten(1)
    if planes == 2 and not module.is_concatenated:
        given = drawn.transpose(1, 2).flatten(1)
    wanted = module._apply_gate(given) if planes == 2 else module.act_fn(given)
    for candidate in candidates:
        found = candidate(drawn.flatten(1))
        if bool(((found - wanted).abs() <= _TOLERANCE * (1 + wanted.abs())).all()):
            return candidate
    expected = "one of " + ", ".join(c.kind for c in candidates)
    raise ConfigError("activation", f"that of {type(module).__name__}", expected)
