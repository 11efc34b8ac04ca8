"""tools/peer_bench.py: the layer and DeepGEMM's mega-MoE kernel for SM90, timed in turns, their results compared."""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megamoe
from bench.ranks import Rank
from bench.shapes import local_shapes, problem_of
from bench.tables import header
from bench.timing import Contender, Timer
from megamoe.backends.call import Call
from megamoe.backends.select import make_backend
from megamoe.formats.quantization import quantize_rows
from megamoe.formats.quantized import QuantizedRows
from megamoe.testing import compare, make_inputs, make_weights
from megamoe.testing.shapes import Shape

COLUMNS = "shape,ranks,tokens,experts_touched,mode,kernel,us,relative"
# Of y, relative: the peer scales h by 64 columns, and sums in bf16 at some loads; 0.035 to 0.038 was seen.
LIMIT = 0.06


def load(path: Path) -> Any:
    """Return the module deep_gemm of a built checkout."""
    if not (path / "deep_gemm" / "__init__.py").exists():
        raise SystemExit(f"--deepgemm {path}: expected a checkout with the folder deep_gemm")
    sys.path.insert(0, str(path.resolve()))
    try:
        return importlib.import_module("deep_gemm")
    except ImportError as error:
        raise SystemExit(f"--deepgemm {path}: {error}; build it there first") from error


class Peer:
    """DeepGEMM's kernel with a layer's weights and its own buffer."""

    def __init__(
        self, library: Any, problem: megamoe.Problem, weights: megamoe.ExpertWeights
    ) -> None:
        self.library = library
        sizes = problem.max_tokens, problem.top_k, problem.hidden, problem.intermediate
        make = library.get_symm_buffer_for_sm90_mega_moe
        self.buffer = make(dist.group.WORLD, problem.num_experts, *sizes)
        pairs = (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
        self.weights = library.transform_weights_for_mega_moe_sm90(*pairs)

    def copy(self, call: Call) -> None:
        """Copy what a call brings to where the kernel takes it."""
        (x, scale), b = call.rows, self.buffer
        assert scale is not None
        of_call = x, scale, call.topk_ids, call.topk_weights
        for to, tensor in zip((b.x, b.x_sf, b.topk_idx, b.topk_weights), of_call, strict=True):
            to[: len(tensor)].copy_(tensor)

    def launch(self, y: Tensor) -> Tensor:
        """Compute y [T, H] from what was copied last."""
        self.library.fp8_mega_moe(y, *self.weights, self.buffer)
        return y


def touched(me: Rank, problem: megamoe.Problem, ids: Tensor) -> list[int]:
    """Return how many experts of each rank any rank's tokens take. Collective."""
    every = {expert for of_rank in me.gather(ids.flatten().tolist()) for expert in of_rank}
    begins = [problem.expert_begin(rank) for rank in range(me.size + 1)]
    return [len(every & set(range(*ends))) for ends in zip(begins, begins[1:], strict=False)]


def contenders_of(backend: Any, peer: Peer, call: Call) -> list[Contender]:
    y = torch.empty_like(call.rows[0], dtype=torch.bfloat16)

    def with_copies(_: Any) -> Tensor:
        peer.copy(call)
        return peer.launch(y)

    return [
        Contender("megamoe", lambda _: backend.forward(call)[0]),
        Contender("DeepGEMM", lambda _: peer.launch(y)),
        Contender("DeepGEMM with copies", with_copies),
    ]


def compare_shape(library: Any, shape: Shape, me: Rank, args: argparse.Namespace) -> bool:
    """Time both for each number of tokens; return whether they agree. Collective."""
    problem = problem_of(shape, max(args.tokens), me, "fp8")
    weights = make_weights(problem, device=me.device)
    backend = make_backend(args.backend, problem, me.group, device=me.device)
    backend.prepare(weights)
    peer, timer, good = Peer(library, problem, weights), Timer(me.device, args.samples), True
    for tokens in args.tokens:
        i = make_inputs(problem, tokens, device=me.device)
        call = Call(QuantizedRows(*quantize_rows(i.x)), i.topk_ids, i.topk_weights, weights)
        peer.copy(call)
        both = contenders_of(backend, peer, call)
        expected, found = both[0].timed(None).clone(), both[1].timed(None)
        error = max(me.gather(compare(found, expected).relative))
        good &= error <= LIMIT
        experts = "+".join(map(str, touched(me, problem, call.topk_ids)))
        row = f"{shape.name},{me.size},{tokens},{experts}"
        for mode in args.mode:
            for way, us in zip(both, timer.medians(both, mode), strict=True):
                me.print(f"{row},{mode},{way.name},{us:.1f},{error:.1e}")
    backend.close()
    return good


def worker(me: Rank, args: argparse.Namespace) -> int:
    """Print a CSV, with the relative difference between both y; return 1 if one is above LIMIT."""
    library = load(args.deepgemm)
    me.print(header(), COLUMNS, sep="\n")
    with torch.no_grad():
        good = [compare_shape(library, shape, me, args) for shape in local_shapes(args)]
    return 0 if all(good) else 1
