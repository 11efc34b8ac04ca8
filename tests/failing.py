"""One rank raises an error before it meets the others in a call: what the others see, how soon, and what follows."""

import time

import torch
import torch.distributed as dist

from megamoe import Layer, Problem
from megamoe.testing import make_inputs, make_weights, same_bits


def one_rank_fails(rank, backend, device):
    """Return name -> (error, its text, seconds, whether the next call has the bits of the first one).

    The last rank fails. Its x is of another type or shape, or its memory was freed: in eager mode, compiled, and in the
    call before a graph is captured. In backward what the call has saved is changed.
    """
    ranks = dist.get_world_size()
    problem = Problem(128, 96, 2 * ranks, 2, ep_size=ranks, rank=rank, max_tokens=32)
    layer = Layer(problem, dist.group.WORLD, backend=backend, timeout_s=20.0, reserve_sms=0)
    i = make_inputs(problem, 20, rank=rank, device=device)
    weights = make_weights(problem, device=device)
    freed = i.x.clone()
    freed.untyped_storage().resize_(0)
    xs = {"type": i.x.double(), "shape": i.x[:-1], "freed": freed}

    def call(x, run=lambda *given: layer(*given)):
        with torch.no_grad():
            return run(x, i.topk_ids, i.topk_weights, weights)

    graph = torch.compile(lambda *given: layer(*given), backend="eager", fullgraph=True)

    def compiled(x):
        return call(x, graph)

    def trained(changed):
        x = i.x.clone().requires_grad_() * 1
        y = layer(x, i.topk_ids, i.topk_weights, weights)
        if changed:
            x.add_(1)
        y.float().sum().backward()

    def captured(x):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(x)
            layer.check()  # the warm-up has failed, or the graph is captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            y = call(x)
        graph.replay()
        return y

    layer.prepare(weights)
    expected, found, last = call(i.x), {}, rank == ranks - 1
    compiled(i.x)
    trained(False)
    cases = {f"{name}, eager": (lambda x=x: call(x), call) for name, x in xs.items()}
    cases |= {f"{name}, compiled": (lambda x=x: compiled(x), compiled) for name, x in xs.items()}
    cases["backward"] = lambda: trained(True), lambda x: trained(False)
    if device == "cuda":
        cases["before a graph"] = lambda: captured(xs["type"]), captured
    for name, (wrong, right) in cases.items():
        layer.check()
        dist.barrier()
        begin, error = time.monotonic(), None
        try:
            wrong() if last else right(i.x)
            layer.check()
        except Exception as caught:
            error = caught
        seconds = time.monotonic() - begin
        dist.barrier()
        layer.reset()
        after = same_bits(call(i.x), expected)
        if name == "before a graph":
            after = after and same_bits(captured(i.x), expected)
        found[name] = type(error).__name__, str(error), seconds, after
    layer.close()
    return found


def judge(of_ranks, bound_s):
    """Return what is wrong with what one_rank_fails() returned on each rank."""
    *others, own = of_ranks
    wrong, last = [], len(others)
    for name, (kind, text, _, after) in own.items():
        expected = kind == "ArgumentError"
        if name == "backward":
            expected = "modified by an inplace operation" in text
        if not (expected and after):
            wrong.append(f"rank {last}, {name}: {kind}: {text}, then equal bits: {after}")
    for rank, found in enumerate(others):
        for name, (kind, text, seconds, after) in found.items():
            named = kind == "PeerFault" and text.startswith(f"rank {last} raised ")
            if not (named and after and seconds < bound_s):
                wrong.append(f"rank {rank}, {name}: {kind}: {text} ({seconds:.1f} s), then {after}")
    return wrong
