"""The problems that tools/ops_bench.py times: operators of megamoe.ops, and the same made of others' operations."""

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from bench.floors import GEMM_TFLOPS, HBM_BYTES_PER_US
from bench.gemms import grouped_mm as grouped
from bench.gemms import scaled_mm
from bench.layers import Entry, layers_of
from bench.ranks import Rank
from bench.timing import Contender
from megamoe import ops
from megamoe.core.config import ACTIVATIONS
from megamoe.ops import cute_moe
from megamoe.testing.inputs import make_inputs
from megamoe.testing.shapes import SHAPES

FAMILY = {"swiglu": "swiglu", "geglu": "geglu", "srelu": "relu2"}
# Weight gradients of a model: its experts by a rank of four, and rows of each: 8192 tokens there, for dsv3 also 4608.
RANKS = 4
MODEL_ROWS = {"dsv3": (576, 1024), "flash": (768,), "qwen3-235b": (2048,), "qwen3-30b": (2048,)}
ROWS, BLOCKS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
aten = torch.ops.aten
Call = Callable[[], object]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Rows of each expert, K, and N columns of the fused product: of gated activations gate and up columns together."""

    name: str
    rows: tuple[int, ...]
    k: int
    n: int
    device: str = "cuda"

    @property
    def num(self) -> int:
        return len(self.rows)

    @property
    def total(self) -> int:
        return sum(self.rows)

    def flops(self, *widths: int) -> float:
        """Return those of products of all rows: two for each of K * N numbers."""
        return 2.0 * self.total * sum(widths)

    def offs(self) -> Tensor:
        """Return where each expert's rows end."""
        return torch.tensor(self.rows, device=self.device).cumsum(0).int()

    def experts(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the expert of each row."""
        numbers = torch.arange(self.num, device=self.device, dtype=dtype)
        return numbers.repeat_interleave(torch.tensor(self.rows, device=self.device))

    def rand(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=torch.bfloat16).normal_(0, scale)


def sizes_of(text: str, device: str = "cuda") -> Sizes:
    """text: a name of NAMED, or M,E,K,N: M rows that E experts share evenly."""
    if text in NAMED:
        return Sizes(text, *NAMED[text][0], device=device)
    total, num, k, n = (int(part) for part in text.split(","))
    rows = tuple(total * (e + 1) // num - total * e // num for e in range(num))
    return Sizes(text, rows, k, n, device)


@dataclass(frozen=True)
class Case:
    """Contenders of one problem; its floating-point operations by precision; the operands of the first contender."""

    name: str
    flops: Mapping[str, float]
    reads: Iterable[Tensor]
    contenders: list[Contender] = field(default_factory=list)

    def limit_us(self, num_bytes: float) -> float:
        """Return the least time of the products, or of operands and results, each once."""
        gemms = sum(flops / (GEMM_TFLOPS[p] * 1e6) for p, flops in self.flops.items())
        return max(gemms, num_bytes / HBM_BYTES_PER_US)


def alone(**calls: Call | None) -> list[Contender]:
    """Return contenders of these names that need nothing before them."""

    def contender(name: str, call: Call) -> Contender:
        return Contender(name, lambda _: call())

    return [contender(name, call) for name, call in calls.items() if call is not None]


def compiled(call: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Return the call, compiled unless args.eager; where inductor fails, that becomes True."""
    fast = torch.compile(call, dynamic=False)

    def run(*given: Any) -> Any:
        if not args.eager:
            try:
                return fast(*given)
            except Exception as error:
                print(f"torch is eager from here on: {type(error).__name__}: {str(error)[:300]}")
                args.eager = True
        return call(*given)

    return run


# --- what others compute, one operation after the other ---


def apply(name: str, gu: Tensor) -> Tensor:
    """gu [M, P*I] -> h, in bf16 operations."""
    if name == "srelu":
        return F.relu(gu).square()
    gate, up = gu.chunk(2, 1)
    return (F.silu(gate) if name == "swiglu" else F.gelu(gate)) * up


def gradient(name: str, gu: Tensor, dh: Tensor) -> Pair:
    """-> dgu [M, P*I], h."""
    if name == "srelu":
        r = F.relu(gu)
        return dh * 2 * r, r.square()
    gate, up = gu.chunk(2, 1)
    back, f = (aten.silu_backward, F.silu) if name == "swiglu" else (aten.gelu_backward, F.gelu)
    value = f(gate)
    return torch.cat((back(dh * up, gate), dh * value), 1), value * up


def clamped(gu: Tensor, bias: Tensor | None = None, alternate: bool = False) -> Tensor:
    """gu [M, 2I], bias: of each row -> h of GPT-OSS."""
    act = ACTIVATIONS["swiglu_oai"]
    gu = gu if bias is None else gu + bias
    gate, up = (gu[:, ::2], gu[:, 1::2]) if alternate else gu.chunk(2, 1)
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)


def by_row(x: Tensor) -> Pair:
    """x: [..., K] -> e4m3, contiguous, and scales [..., 1]: torch's grouped product takes no other ones on Hopper."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3).contiguous(), scale.contiguous()


def by_column(w: Tensor) -> Pair:
    return by_row(w.transpose(-1, -2))


def by_group(x: Tensor) -> Pair:
    """x: [M, K] -> e4m3 and scales [M, ceil(K/128)]."""
    groups = -(-x.shape[1] // 128)
    padded = F.pad(x, (0, groups * 128 - x.shape[1])).unflatten(1, (groups, 128))
    q, scale = by_row(padded)
    return q.flatten(1)[:, : x.shape[1]], scale[..., 0]


# --- operators ---


def product(s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield a plain product in BF16, and both of its gradients."""
    offs, x, dy = s.offs(), s.rand(s.total, s.k), s.rand(s.total, s.n)
    w = s.rand(s.num, s.n, s.k, scale=s.k**-0.5)
    flops = {"bf16": s.flops(s.k * s.n)}
    for name, a, b in (("product", x, w.mT), ("dgrad", dy, w), ("wgrad", dy.T, x)):
        ours, theirs = partial(ops.grouped_mm, a, b, offs=offs), partial(grouped, a, b, offs)
        yield Case(name, flops, (a, b), alone(megamoe=ours, torch=theirs))


def activation(name: str, s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield forward and backward of an activation; product: ours alone."""
    act = FAMILY[name]
    width, offs = s.n // ACTIVATIONS[act].planes, s.offs()
    x, w = s.rand(s.total, s.k), s.rand(s.num, s.n, s.k, scale=s.k**-0.5)
    w2 = s.rand(s.num, s.k, width, scale=0.02)
    forward, backward = compiled(apply, args), compiled(gradient, args)
    gu = grouped(x, w.mT, offs)
    yield Case(
        name,
        {"bf16": s.flops(s.k * s.n)},
        (x, w),
        alone(
            megamoe=lambda: ops.grouped_mm_act(x, w.mT, act, offs=offs, return_pre=True),
            product=lambda: ops.grouped_mm(x, w.mT, offs=offs),
            torch=lambda: forward(name, grouped(x, w.mT, offs)),
        ),
    )
    yield Case(
        f"d{name}",
        {"bf16": s.flops(s.k * width)},
        (x, w2, gu),
        alone(
            megamoe=lambda: ops.grouped_mm_dact(x, w2, gu, act, offs=offs),
            product=lambda: ops.grouped_mm(x, w2, offs=offs),
            torch=lambda: backward(name, gu, grouped(x, w2, offs)),
        ),
    )


def deepgemm(s: Sizes, x: Pair, w: Pair) -> Call | None:
    """x: [M, K] and scales by row, w: [E, K, N] and scales -> DeepGEMM's product, whose experts have whole 128 rows."""
    if s.device == "cpu" or any(rows % 128 for rows in s.rows):
        return None
    try:
        import deep_gemm
    except ImportError:
        return None
    names = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"
    gemm: Any = next(getattr(deep_gemm, n) for n in names if hasattr(deep_gemm, n))
    aligned: Any = getattr(deep_gemm, "get_mn_major_tma_aligned_tensor", None) or getattr(
        deep_gemm, "get_col_major_tma_aligned_tensor", lambda scale: scale
    )
    rows, matrices = (x[0], aligned(x[1])), (w[0].mT, w[1].mT.contiguous())
    index = s.experts(torch.int32)
    out = s.rand(s.total, matrices[0].shape[1])

    def call() -> Tensor:
        gemm(rows, matrices, out, index)
        return out

    return call


def fp8(s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield FP8 by blocks: quantization, a product, its gradient of rows, and one with an activation that quantizes.

    torch: by row and channel. The dgrad quantizes nothing, as the others.
    """
    offs, x = s.offs(), s.rand(s.total, s.k)
    yield Case(
        "fp8 quantize",
        {},
        (x,),
        alone(
            megamoe=lambda: ops.quantize(x, ROWS, offs=offs),
            torch=partial(compiled(by_group, args), x),
        ),
    )
    quantizes = compiled(lambda gu: by_row(apply("swiglu", gu)), args)

    def last(made: Callable[[], Tensor]) -> Any:
        return quantizes(made())

    for name, k, n in (("product", s.k, s.n), ("dgrad", s.n, s.k)):
        rows, w = s.rand(s.total, k), s.rand(s.num, n, k, scale=k**-0.5)
        q, by_block = ops.quantize(rows, ROWS, offs=offs)
        wq, of_w = ops.quantize(w.mT, BLOCKS)
        theirs, of_columns = by_row(rows), by_row(w)
        ours = partial(ops.scaled_grouped_mm, q, wq, by_block, ROWS, of_w, BLOCKS, offs=offs)
        torchs = partial(scaled_mm, theirs[0], of_columns[0].mT, (theirs[1], of_columns[1]), offs)
        flops, reads = {"fp8": s.flops(k * n)}, (q, wq, by_block, of_w)
        peer = deepgemm(s, ops.quantize(rows, ROWS), (wq, of_w))
        yield Case(f"fp8 {name}", flops, reads, alone(megamoe=ours, torch=torchs, deepgemm=peer))
        if name == "product":
            halves, of_halves = ops.quantize(w.mT, BLOCKS, glu="halves")
            scales = by_block, ROWS, of_halves, BLOCKS
            fused = partial(
                ops.grouped_mm_act, q, halves, "swiglu", offs=offs, scales=scales, output_dtype=E4M3
            )
            both = {"product": ours, "torch": partial(last, torchs)}
            yield Case("fp8 swiglu", flops, reads, alone(megamoe=fused, **both))


def channel(s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield a product in e4m3, by token and channel."""
    recipe, offs, rows = ScalingType.RowWise, s.offs(), s.rand(s.total, s.k)
    w, of_columns = ops.quantize(s.rand(s.num, s.k, s.n), recipe)
    x, by_block = ops.quantize(rows, recipe, offs=offs)
    _, of_rows = ops.quantize(rows, recipe)
    scales = by_block, recipe, of_columns, recipe
    ours = partial(ops.scaled_grouped_mm, x, w, *scales, offs=offs)
    theirs = partial(scaled_mm, x, w, (of_rows[:, None], of_columns[..., None]), offs)
    flops, reads = {"fp8": s.flops(s.k * s.n)}, (x, w, by_block, of_columns)
    yield Case("channel", flops, reads, alone(megamoe=ours, torch=theirs))


# --- MLPs ---


def backward_of(call: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> Contender:
    """Return the backward pass of ours, whose graph is made before."""

    def before() -> Tensor:
        with torch.enable_grad():
            return call()

    return Contender("megamoe", lambda y: torch.autograd.grad(y, leaves, dy), before)


def mlp(s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield forward and backward of SwiGLU's MLP, in BF16 and in FP8 that quantizes rows and weights in each call."""
    width, offs = s.n // 2, s.offs()
    x, dy = s.rand(s.total, s.k), s.rand(s.total, s.k)
    w13 = s.rand(s.num, s.n, s.k, scale=s.k**-0.5)
    w2 = s.rand(s.num, s.k, width, scale=width**-0.5)
    leaves = [t.requires_grad_() for t in (x, w13, w2)]
    act, slope = (
        compiled(partial(apply, "swiglu"), args),
        compiled(partial(gradient, "swiglu"), args),
    )
    rows, columns = compiled(by_row, args), compiled(by_column, args)
    last = compiled(lambda gu: by_row(apply("swiglu", gu)), args)
    one = s.flops(s.k * s.n, s.k * width)

    def scaled(t: Pair, w: Pair) -> Tensor:
        """w: [E, N, K], and scales [E, N, 1]."""
        return scaled_mm(t[0], w[0].mT, (t[1], w[1]), offs)

    def forward(fp8: bool) -> tuple[Tensor, Tensor]:
        a, b, c = (t.detach() for t in leaves)
        if not fp8:
            gu = grouped(a, b.mT, offs)
            return grouped(act(gu), c.mT, offs), gu
        gu = scaled(rows(a), rows(b))
        return scaled(last(gu), rows(c)), gu

    def backward(fp8: bool, gu: Tensor) -> tuple[Tensor, ...]:
        a, b, c = (t.detach() for t in leaves)
        dh = scaled(rows(dy), columns(c)) if fp8 else grouped(dy, c, offs)
        dgu, h = slope(gu, dh)
        dx = scaled(rows(dgu), columns(b)) if fp8 else grouped(dgu, b, offs)
        return dx, grouped(dgu.T, a, offs), grouped(dy.T, h, offs)

    for fp8, precision in ((False, "bf16"), (True, "fp8")):
        name = "fp8 mlp" if fp8 else "mlp"
        given: dict[str, Any] = {"offs": offs, "recipe": "blockwise" if fp8 else None}
        ours = partial(ops.grouped_mlp, x, w13.mT, w2.mT, **given)
        calls = alone(megamoe=torch.no_grad()(ours), torch=partial(forward, fp8))
        yield Case(f"{name} forward", {precision: one}, leaves, calls)
        theirs = Contender(
            "torch", partial(lambda fp8, y: backward(fp8, y[1]), fp8), partial(forward, fp8)
        )
        flops = {"fp8": one, "bf16": one} if fp8 else {"bf16": 2 * one}
        both = [backward_of(ours, leaves, dy), theirs]
        yield Case(f"{name} backward", flops, (*leaves, dy), both)


def cute(s: Sizes, args: argparse.Namespace) -> Iterator[Case]:
    """Yield forward and backward of the calls of CuTe-MoE-Train's quick start: columns alternate, with biases."""
    width, offs = s.n // 2, s.offs()
    x, dy = s.rand(s.total, s.k), s.rand(s.total, s.k)
    w_up = s.rand(s.num, s.k, s.n, scale=s.k**-0.5)
    w_down = s.rand(s.num, width, s.k, scale=width**-0.5)
    leaves = [x, w_up, s.rand(s.num, s.n), w_down, s.rand(s.num, s.k)]
    leaves = [t.requires_grad_() for t in leaves]
    experts = s.experts()
    middle = compiled(partial(clamped, alternate=True), args)

    def ours() -> Tensor:
        x, w_up, b_up, w_down, b_down = leaves
        h, aux = cute_moe.grouped_mm_swiglu(x, w_up, offs=offs, bias=b_up)
        return cute_moe.grouped_mm_downproj(h, w_down, aux_biased_acc=aux, offs=offs, bias=b_down)

    def theirs() -> Tensor:
        x, w_up, b_up, w_down, b_down = leaves
        return (
            grouped(middle(grouped(x, w_up, offs), b_up[experts]), w_down, offs) + b_down[experts]
        )

    one, without = s.flops(s.k * s.n, s.k * width), torch.no_grad()
    calls = alone(megamoe=without(ours), torch=without(theirs))
    yield Case("cute forward", {"bf16": one}, leaves, calls)
    other = backward_of(theirs, leaves, dy)
    both = [backward_of(ours, leaves, dy), Contender("torch", other.timed, other.before)]
    yield Case("cute backward", {"bf16": 2 * one}, (*leaves, dy), both)


# --- models ---


def add(out: Tensor, product: Callable[[], Tensor]) -> Tensor:
    return out.add_(product())


def model_wgrad(name: str, args: argparse.Namespace) -> Iterator[Case]:
    """Yield dw13 and dw2 of a model's local experts, in bf16, and added to fp32: torch adds its bf16 product."""
    shape = SHAPES[name]
    num, planes = shape.num_experts // RANKS, ACTIVATIONS[shape.activation].planes
    matrices = {
        "dw13": (planes * shape.intermediate, shape.hidden),
        "dw2": (shape.hidden, shape.intermediate),
    }
    for rows, (matrix, (n1, n2)) in itertools.product(MODEL_ROWS[name], matrices.items()):
        s = Sizes("", (rows,) * num, n1, n2, args.device)
        offs, a, b = s.offs(), s.rand(s.total, n1), s.rand(s.total, n2)
        out = torch.zeros(num, n1, n2, device=s.device)
        case, flops = f"wgrad-{name} {rows} {matrix}", {"bf16": s.flops(n1 * n2)}
        made = partial(ops.grouped_mm, a.T, b, offs=offs)
        adds = partial(ops.grouped_mm_wgrad, a.T, b, out=out, offs=offs)
        theirs = partial(grouped, a.T, b, offs)
        yield Case(case, flops, (a, b), alone(megamoe=made, torch=theirs))
        plus = alone(megamoe=adds, torch=partial(add, out, theirs))
        yield Case(f"{case} +=", flops, (a, b, out), plus)


Mlp = Callable[..., Tensor]  # x, w13, w2, biases; offs=


def mlps(act: Any, experts: Tensor, args: argparse.Namespace) -> tuple[Mlp, Mlp]:
    """Return GPT-OSS's MLP of sorted rows: ours and torch's. experts: of each row."""
    middle = compiled(clamped, args)

    def ours(x: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor, offs: Tensor) -> Tensor:
        given: dict[str, Any] = dict(zip(("b_up", "b_down"), biases, strict=False))
        return ops.grouped_mlp(x, w13.mT, w2.mT, act, offs=offs, **given)

    def theirs(x: Tensor, w13: Tensor, w2: Tensor, *biases: Tensor, offs: Tensor) -> Tensor:
        gu = grouped(x, w13.mT, offs)
        h = middle(gu, biases[0].to(gu.dtype)[experts] if biases else None)
        y = grouped(h, w2.mT, offs)
        return y + biases[1].to(y.dtype)[experts] if biases else y

    return ours, theirs


def gpt_oss(args: argparse.Namespace) -> Iterator[Case]:
    """Yield forward, and forward + backward, of one MLP of experts over sorted rows."""
    num, size, total = args.experts, args.size, args.tokens * 4
    ids = torch.randint(num, (total,)).bincount(minlength=num).tolist()
    s = Sizes("", tuple(ids), size, 2 * size, args.device)
    offs, biased = s.offs(), not args.no_bias
    leaves = [
        s.rand(total, size),
        s.rand(num, 2 * size, size, scale=size**-0.5),
        s.rand(num, size, size, scale=size**-0.5),
        *((s.rand(num, 2 * size), s.rand(num, size)) if biased else ()),
    ]
    dy, leaves = s.rand(total, size), [t.requires_grad_() for t in leaves]
    both = mlps(ACTIVATIONS["swiglu_oai"], s.experts(), args)
    ours, theirs = (partial(call, *leaves, offs=offs) for call in both)

    def step(call: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(call(), leaves, dy)

    flops, without = s.flops(3 * size * size), torch.no_grad()
    forward = alone(megamoe=without(ours), torch=without(theirs))
    yield Case("gpt-oss forward", {"bf16": flops}, leaves, forward)
    steps = alone(megamoe=step(ours), torch=step(theirs))
    yield Case("gpt-oss step", {"bf16": 3 * flops}, (*leaves, dy), steps)


class Sorted(torch.autograd.Function):
    """Rows of routes in the order of experts: out[i] = x[place[i] // times], whose gradient sums without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, back: Tensor, times: int) -> Tensor:
        ctx.back, ctx.times = back, times
        return x[place // times]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        rows = dy[ctx.back]
        if ctx.times > 1:
            rows = rows.unflatten(0, (-1, ctx.times)).sum(1)
        return rows, None, None, None


def layer(args: argparse.Namespace) -> Iterator[Case]:
    """Yield forward and step of GPT-OSS's layer on one rank: by the layer, by operators, and by torch's."""
    sizes = {"hidden": args.size, "intermediate": args.size, "num_experts": args.experts}
    shape = replace(SHAPES["gpt-oss-120b"], **sizes)
    device, flops = torch.device(args.device), shape.flops(args.tokens)
    forward = Entry(args.backend, "bf16", "forward")
    step = Entry(args.backend, "bf16", "step", through_layer=True)
    with layers_of(shape, [forward, step], args.tokens, Rank(0, 1, device)) as layers:
        problem, w = layers[step].problem, layers[step].masters
        given = make_inputs(problem, args.tokens, device=device, ids_dtype=torch.int32)
        place = given.topk_ids.flatten().long().argsort(stable=True)
        back = place.argsort()
        experts = given.topk_ids.flatten()[place].long()
        offs = torch.bincount(experts, minlength=args.experts).cumsum(0).int()
        tensors = [given.x, given.topk_weights, w.w13, w.w2, w.b13, w.b2]
        leaves = [t.detach().requires_grad_() for t in tensors]
        dy = torch.randn_like(given.x)
        total = compiled(lambda rows, scores: (rows * scores[..., None]).sum(1).bfloat16(), args)

        def whole(mlp: Mlp) -> Tensor:
            x, scores, *weights = leaves
            rows = mlp(Sorted.apply(x, place, back, 4), *weights, offs=offs)
            found: Tensor = total(Sorted.apply(rows, back, place, 1).unflatten(0, (-1, 4)), scores)
            return found

        ours, theirs = mlps(ACTIVATIONS["swiglu_oai"], experts, args)
        without = torch.no_grad()
        calls = {n: without(partial(whole, m)) for n, m in (("operators", ours), ("torch", theirs))}
        own = Contender("megamoe", without(layers[forward].contender(args.tokens).timed))
        yield Case("layer forward", {"bf16": flops}, tensors, [own, *alone(**calls)])
        steps: dict[str, Call] = {
            n: partial(lambda m: torch.autograd.grad(whole(m), leaves, dy), m)
            for n, m in (("operators", ours), ("torch", theirs))
        }
        own = Contender("megamoe", layers[step].contender(args.tokens).timed)
        yield Case("layer step", {"bf16": 3 * flops}, (*tensors, dy), [own, *alone(**steps)])


Kind = Callable[[Sizes, argparse.Namespace], Iterator[Case]]
KINDS: dict[str, Kind] = {
    "product": product,
    **{name: partial(activation, name) for name in FAMILY},
    "fp8": fp8,
    "channel": channel,
    "mlp": mlp,
    "cute": cute,
}
# rows of each expert, K, N; and the kinds that run unless others are named
QUICK = (128, 64, 0, 256, 192, 32, 128, 64)
NAMED: dict[str, tuple[tuple[tuple[int, ...], int, int], tuple[str, ...]]] = {
    "torchao": (((4096,) * 8, 7168, 2048), ("fp8",)),
    "quickstart": ((QUICK, 2048, 2048), ("swiglu", "fp8", "mlp", "cute")),
    "family": (((4096,) * 8, 8192, 4096), tuple(KINDS)[:-1]),
}
MODELS: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
    "gpt-oss": gpt_oss,
    "layer": layer,
    **{f"wgrad-{n}": partial(model_wgrad, n) for n in MODEL_ROWS},
}


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, Iterator[Case]]]:
    """Yield sizes, kind, and the cases that --sizes and --only name."""
    for kind in args.only or (() if args.sizes else ("layer", "gpt-oss")):
        if kind in MODELS:
            yield "", kind, MODELS[kind](args)
    for text in args.sizes or NAMED:
        usual = NAMED[text][1] if text in NAMED else tuple(KINDS)[:-1]
        for kind in args.only or usual:
            if kind in KINDS:
                yield text, kind, KINDS[kind](sizes_of(text, args.device), args)
