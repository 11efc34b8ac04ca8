"""Let PEFT (0.21) add LoRA to GPT-OSS's packed experts, under the parameter names of float experts.

    import megamoe.adapters.peft

    megamoe.adapters.peft.install()
    config = LoraConfig(target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    model = peft.get_peft_model(model, config)  # or PeftModel.from_pretrained(model, folder)

Packed experts show these two parameters while PEFT looks for its targets. A wrapper holds the factors, named and shaped
as on float experts. PEFT would merge them into the weights; transformers_lora.py multiplies them separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraModel, layer
from torch import Tensor, nn

from megamoe.adapters.transformers_packed import PackedExperts
from megamoe.core.errors import ConfigError

_NAMES = "gate_up_proj", "down_proj"
_inject = LoraModel._inject_parameters


class _Wrapper(layer.ParamWrapper):
    """Hold the factors of one matrix of packed experts."""

    def get_param(self) -> Tensor:
        """Return a tensor of the dequantized matrix's shape and dtype, but without its memory."""
        experts = self.get_base_layer()
        num, rows, packed = getattr(experts, self.parameter_name).shape
        return experts.down_proj_bias.new_zeros(()).expand(num, rows, 2 * packed)

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        adapters, name = self.get_base_layer().adapters, self.parameter_name
        if found := [self.get_delta_factors(n) for n in active_adapters if n in self.lora_A]:
            adapters[name] = found
        try:
            yield
        finally:
            adapters.pop(name, None)

    def merge(self, *args: Any, **kwargs: Any) -> None:
        expected = "those of Mxfp4Config(dequantize=True)"
        raise ConfigError("weights to merge into", "packed", expected)


_Wrapper.__name__ = "ParamWrapper"  # by which PEFT knows it


def _inject_parameters(self: Any, peft_config: Any, model: nn.Module, **given: Any) -> list[str]:
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    peft_config._register_custom_module({PackedExperts: _Wrapper})
    for module in packed:
        module._parameters |= {name: nn.Parameter(torch.empty(0)) for name in _NAMES}
    try:
        return _inject(self, peft_config=peft_config, model=model, **given)
    finally:
        for module in packed:
            for name in _NAMES:
                del module._parameters[name]


def install() -> None:
    """Let PEFT find the matrices of packed experts. Call it before get_peft_model() or PeftModel.from_pretrained()."""
    LoraModel._inject_parameters = _inject_parameters
