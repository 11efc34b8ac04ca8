"""A rank that raises an error instead of a launch ends the launches of the others: the host's side of Window.abort()."""

TWO_RANKS = """
import threading, traceback
from dataclasses import replace
from megamoe.group.group import ThreadGroup
from megamoe.layer.layer import Layer
from megamoe.backends import select

problem = replace(problem, precision="bf16", ep_size=2)
def cells(layer):
    return layer._runtime.backend.window.regions["window_abort"].view(layer._runtime.backend.window.memory).tolist()
def on_ranks(body):
    found, members = [None, None], ThreadGroup.create(2, timeout_s=20)
    def run(member):
        mine = replace(problem, rank=member.rank)
        layer = Layer(mine, member)
        w = ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(mine).items()})
        x, ids = torch.zeros(5, 272, dtype=torch.bfloat16), torch.zeros(5, 3, dtype=torch.int64)
        try:
            found[member.rank] = body(layer, x, ids, torch.zeros(5, 3), w)
        except BaseException as error:
            found[member.rank] = traceback.format_exc()
    threads = [threading.Thread(target=run, args=(m,)) for m in members]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    return found
def outcome(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
select.open_backend = lambda name, p, group, device, options, opening: mega.MegaBackend(p, group, device="cpu", reserve_sms=20)
import megamoe.layer.layer
megamoe.layer.layer.open_backend = select.open_backend
"""


CASES = {
    "dtype": "ArgumentError: topk_ids.dtype is torch.float32",
    "shape": "ArgumentError: topk_weights.shape is [2, 3]",
    "freed": "ArgumentError: x.untyped_storage() is of 0 bytes",
    "backward": "RuntimeError: one of the variables needed for gradient computation has been modified",
    "planted": "ValueError: planted in the backend",
}


def test_an_error_reaches_the_window_of_the_others(run):
    """The kernel is a stub: what its last CTA leaves, a peer_abort record, is written here."""
    there, here = run(
        TWO_RANKS
        + """
def body(layer, x, ids, scores, w):
    rank, found = layer.ranks.rank, []
    leaf = x.clone().requires_grad_()
    good = x, ids, scores, w
    def trained(change):
        rows = leaf * 1
        y = layer(rows, ids, scores, w)
        layer.ranks.barrier()
        if change:
            rows.add_(1)
        y.float().sum().backward()
    def planted():
        window = layer._runtime.backend.window
        with mock.patch.object(window, "poll", side_effect=ValueError("planted in the backend")):
            layer(*good)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    wrong = {
        "dtype": lambda: layer(x, ids.float(), scores, w),
        "shape": lambda: layer(x, ids, scores[:2], w),
        "freed": lambda: layer(freed, ids, scores, w),
        "backward": lambda: trained(True),
        "planted": planted,
    }
    layer(*good)
    trained(False)
    backend = layer._runtime.backend
    window = backend.window
    for name, call in wrong.items():
        layer.ranks.barrier()
        told = outcome(call if rank else lambda: trained(False) if name == "backward" else layer(*good))
        layer.ranks.barrier()
        if rank == 0:
            window.fault.edge = abi.Edge.peer_abort
        at = cells(layer)
        then = outcome(lambda: layer(*good)), outcome(layer.check)
        layer.ranks.barrier()
        layer.reset()
        found.append([name, told, at, *then, cells(layer), outcome(lambda: layer(*good))])
    layer.close()
    return found
with on_cpu():
    print(json.dumps(on_ranks(body)))
"""
    )
    assert [name for name, *_ in here] == list(CASES)
    for (name, told, at, then, check, clean, again), (_, own, mine, *broken) in zip(
        there, here, strict=True
    ):
        assert own.startswith(CASES[name])
        assert told == ""  # the launch was made
        assert (at, mine) == ([1, 2], [0, 0])  # 1 + the rank
        assert then.startswith(
            "PeerFault: rank 1 raised an error before its launch, so rank 0 left"
        )
        assert check.startswith("WindowBroken: ")
        assert broken[0].startswith(
            "WindowBroken: call reset() on all ranks first. The fault was: "
        )
        assert CASES[name] in broken[0]
        assert clean == broken[2] == [0, 0]
        assert again == broken[3] == ""


def test_nobody_is_told_of_an_error_behind_the_launch(run):
    there, here = run(
        TWO_RANKS
        + """
def body(layer, x, ids, scores, w):
    layer(x, ids, scores, w)
    layer.ranks.barrier()
    def late():  # what comes behind the launch in a call
        launches = mega.Forward.__call__
        def made(self, call):
            y = launches(self, call)
            if layer.ranks.rank:
                raise ValueError("planted")
            return y
        with mock.patch.object(type(layer._runtime.backend._forward), "__call__", made):
            layer(x, ids, scores, w)
    told = outcome(late if layer.ranks.rank else lambda: layer(x, ids, scores, w))
    layer.ranks.barrier()
    return [told, cells(layer), outcome(lambda: layer(x, ids, scores, w))]
with on_cpu():
    print(json.dumps(on_ranks(body)))
"""
    )
    assert there == ["", [0, 0], ""]
    assert here == ["ValueError: planted", [0, 0], ""]
