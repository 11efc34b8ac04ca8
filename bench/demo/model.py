"""A byte-level language model whose feed-forward layers are MegaMoE, and the text it learns."""

import ast
import math
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megamoe

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class ModelConfig:
    hidden: int = 128
    intermediate: int = 128
    num_experts: int = 8
    top_k: int = 2
    num_blocks: int = 2
    num_heads: int = 4
    context: int = 128


def corpus() -> Tensor:
    """English about Python: the language reference's topics and the standard library's docstrings, as uint8.

    Read from the running Python itself: nothing to download, and the same bytes for the same Python version.
    """
    texts = []
    try:
        from pydoc_data.topics import topics

        texts += [topics[name] for name in sorted(topics)]
    except ImportError:  # some distributions leave it out
        pass
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        texts += filter(None, (ast.get_docstring(n) for n in nodes if isinstance(n, documented)))
    return torch.frombuffer(bytearray("\n\n".join(texts).encode()), dtype=torch.uint8)


def shared_corpus() -> Tensor:
    """Return the corpus, read by rank 0 alone: it takes seconds. Collective; of a group with a CPU backend."""
    text = corpus() if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    text = text if len(text) else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    return text


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, hidden: int, num_heads: int, context: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        half = hidden // num_heads // 2
        angle = torch.arange(context)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, hidden = x.shape
        qkv = self.qkv(x).view(batch, context, 3, self.num_heads, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # each [batch, heads, context, hidden / heads]
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, hidden))


class RoutedExperts(nn.Module):
    """Softmax top-k router in fp32 in front of MegaMoE, with the Switch load-balancing loss."""

    def __init__(
        self, config: ModelConfig, group: dist.ProcessGroup | None, **moe_options: Any
    ) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        experts = moe_options.pop("experts", megamoe.MegaMoE)
        self.experts = experts(
            hidden=config.hidden,
            intermediate=config.intermediate,
            num_experts=config.num_experts,
            top_k=config.top_k,
            group=group,
            **moe_options,
        )
        self.chosen: Tensor | None = None  # expert ids of the last forward
        self.given: Tensor | None = None  # ids to take instead of the router's choice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y, this rank's share of the balancing loss); the shares' mean over ranks is the loss."""
        flat = x.reshape(-1, x.shape[-1])
        probabilities = self.router(flat.float()).softmax(-1)
        ids = probabilities.topk(self.config.top_k, dim=-1).indices
        if self.given is not None:
            ids = self.given
        self.chosen = ids
        weights = probabilities.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True)

        # The load is counted over the whole group's batch, so that the loss does not depend on how
        # many ranks share it; it carries no gradient.
        load = torch.bincount(ids.flatten(), minlength=self.config.num_experts).float()
        dist.all_reduce(load, group=self.group)
        load /= load.sum()
        balance = self.config.num_experts * (load * probabilities.mean(0)).sum()

        y = self.experts(flat.bfloat16(), ids.int(), weights)
        return y.to(x.dtype).view_as(x), balance


class Block(nn.Module):
    def __init__(
        self, config: ModelConfig, group: dist.ProcessGroup | None, **moe_options: Any
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config.hidden, config.num_heads, config.context)
        self.moe_norm = nn.RMSNorm(config.hidden)
        self.moe = RoutedExperts(config, group, **moe_options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        y, balance = self.moe(self.moe_norm(x))
        return x + y, balance


class ByteLM(nn.Module):
    """Decoder with a tied head. The dense part is fp32 and replicated, the experts live on their ranks."""

    def __init__(
        self, config: ModelConfig, group: dist.ProcessGroup | None, **moe_options: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden)
        self.blocks: Any = nn.ModuleList(
            Block(config, group, **moe_options) for _ in range(config.num_blocks)
        )
        self.norm = nn.RMSNorm(config.hidden)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: [batch, context] -> logits [batch, context, 256], balancing loss summed over blocks."""
        x = self.embedding(tokens) * math.sqrt(self.config.hidden)
        balance = x.new_zeros(())
        for block in self.blocks:
            x, share = block(x)
            balance = balance + share
        return F.linear(self.norm(x), self.embedding.weight), balance

    def expert_parameters(self) -> list[Any]:
        return [p for block in self.blocks for p in block.moe.experts.parameters()]

    def dense_parameters(self) -> list[Any]:
        experts = {id(p) for p in self.expert_parameters()}
        return [p for p in self.parameters() if id(p) not in experts]

    def close(self) -> None:
        """Free what the layers share with other ranks. Collective."""
        for block in self.blocks:
            block.moe.experts.close()

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight from (seed, name, global expert): the same model on any number of ranks."""
        experts = {id(p) for p in self.expert_parameters()}

        def draw(name: str, shape: torch.Size) -> Tensor:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

        for name, p in self.named_parameters():
            if id(p) in experts:
                problem = self.blocks[0].moe.experts.problem
                first = problem.expert_begin(problem.rank)
                for i in range(p.shape[0]):
                    p[i].copy_(draw(f"{name}.{first + i}", p[i].shape))
            elif p.dim() > 1:  # vectors are the norms' ones
                p.copy_(draw(name, p.shape))
        self.embedding.weight.mul_(0.25)  # the head is tied: small logits, a first loss of ln 256
