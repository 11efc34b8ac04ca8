"""Text from a trained model, one byte at a time: on a GPU by replays of one captured step."""

import time

import torch
from torch import Tensor, nn
from transformers import StaticCache


class Decoder:
    """A model with a cache of fixed size, whose step reads and writes device memory only.

    length: of prompt and text together. temperature: 0 takes the likeliest byte.
    """

    def __init__(self, model: nn.Module, length: int, temperature: float = 0.8) -> None:
        self.model, self.temperature = model.eval(), temperature
        device = next(model.parameters()).device
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.slots = torch.arange(length, device=device)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _next(self, ids: Tensor, positions: Tensor) -> Tensor:
        seen = (self.slots <= positions[0, :, None])[None, None]  # [1, 1, ids, length]
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
        with torch.cuda.graph(self.graph):
            self._step()

    @torch.no_grad()
    def text(self, prompt: Tensor, num_bytes: int) -> tuple[Tensor, float]:
        """prompt: [P] int64 -> num_bytes bytes that follow it, [num_bytes] int64 on the CPU, and bytes per second."""
        at = torch.arange(len(prompt), device=self.slots.device)[None]
        self.token.copy_(self._next(prompt.to(at.device)[None], at))
        self.position.fill_(len(prompt))
        made = [self.token.clone()]
        on_gpu = self.token.is_cuda
        warm = 2  # steps of the text by which kernels are loaded and layers of this size made, before the capture
        start = time.perf_counter()
        for i in range(1, num_bytes):
            if on_gpu and i > warm:
                if self.graph is None:
                    self._capture()
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                self.graph.replay()
            else:
                self._step()
            made.append(self.token.clone())
        text = torch.cat(made).flatten().cpu()
        timed = num_bytes - 1 - (warm if on_gpu else 0)
        return text, timed / (time.perf_counter() - start)
