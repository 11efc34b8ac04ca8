"""Text from a trained model, one byte at a time: on a GPU by replays of one captured step."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

EAGER_STEPS = 2  # before the capture: they load kernels and make layers of this size


class Decoder:
    """A model with a cache of fixed size, whose step reads and writes device memory only.

    length: of prompt and text together, at most a sliding window. temperature: 0 takes the likeliest byte. batch: how
    many texts of one prompt.
    """

    def __init__(self, model: Any, length: int, temperature: float = 0.8, batch: int = 1) -> None:
        self.model, self.temperature = model.eval(), temperature
        device = next(model.parameters()).device
        config = copy.deepcopy(model.config)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        self.cache = StaticCache(config=config, max_cache_len=length)
        self.slots = torch.arange(length, device=device)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.captures = device.type == "cuda"
        self.graph: Any = None  # a torch.cuda.CUDAGraph

    def _next(self, ids: Tensor, positions: Tensor) -> Tensor:
        seen = (self.slots <= positions[0, :, None])[None, None]  # [1, 1, ids, length]
        if self.model.config._attn_implementation == "eager":  # which adds its mask
            least = torch.finfo(self.model.dtype).min
            seen = torch.zeros_like(seen, dtype=self.model.dtype).masked_fill(~seen, least)
        out = self.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=seen,
            past_key_values=self.cache,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        noise = torch.empty_like(
            logits
        ).exponential_()  # the largest ratio is a draw, without a wait
        return ((logits / self.temperature).softmax(-1) / noise).argmax(-1, keepdim=True)

    def _step(self) -> None:
        self.token.copy_(self._next(self.token, self.position))
        self.position.add_(1)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):  # records the step, does not take it
            self._step()
        torch.cuda.synchronize()

    @torch.no_grad()
    def text(self, prompt: Tensor, num_bytes: int) -> tuple[Tensor, float]:
        """prompt: [P] int64 -> num_bytes bytes that follow it, [num_bytes] int64 on the CPU, and steps per second.

        The text is the first of the batch.
        """
        at = torch.arange(len(prompt), device=self.slots.device)[None]
        ids = prompt.to(at.device).expand(len(self.token), -1)
        self.token.copy_(self._next(ids, at))
        self.position.fill_(len(prompt))
        made = [self.token.clone()]

        def take(step: Callable[[], None], count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                step()
                made.append(self.token.clone())
            made[-1].cpu()  # waits for the device
            return count / (time.perf_counter() - start)

        warm = min(EAGER_STEPS, num_bytes - 1) if self.captures else 0
        take(self._step, warm)
        step, left = self._step, num_bytes - 1 - warm
        if self.captures and left:
            self._capture()
            step = self.graph.replay
        speed = take(step, left)
        return torch.cat(made, dim=1)[0].cpu(), speed
