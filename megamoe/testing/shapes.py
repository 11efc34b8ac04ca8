"""List the layer shapes of well-known models, for tests and tools: `shape("dsv3")`."""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.core.config import activation_by_name


@dataclass(frozen=True)
class Shape:
    """The part of a Problem that a model fixes."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False

    @property
    def matrices(self) -> int:
        """Weight matrices of an expert: gate, up and down, or up and down."""
        return activation_by_name(self.activation).planes + 1

    def flops(self, tokens: int) -> float:
        """Floating-point operations of `tokens` tokens: two GEMMs over all matrices."""
        return 2.0 * tokens * self.top_k * self.matrices * self.hidden * self.intermediate


SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("dsv3", 7168, 2048, 256, 8),
        Shape("flash", 4096, 2048, 256, 6),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, activation="swiglu_oai", bias=True),
        Shape("nemotron3-super", 1024, 2688, 512, 22, activation="relu2"),
        Shape("mixtral", 4096, 14336, 8, 2),
        Shape("tiny", 64, 48, 6, 2),
    )
}


def shape(name: str) -> Shape:
    """Return the shape of a model by its name."""
    if name not in SHAPES:
        raise KeyError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]
