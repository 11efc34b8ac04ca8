"""Launches that train, without a GPU: arguments, memory, order, refusals. tests/unit/conftest.py has the driver."""

import pytest

# bf16 and fp8 layers with biases; masters in bf16. step() is one forward and backward of a layer.
SETUP = """
from dataclasses import replace
loaded = []
def load(variant, device):
    loaded.append(str(variant))
    return KERNEL
module.load_kernel = load
problem = Problem(272, 144, 7, 3, max_tokens=70, precision=PRECISION, bias=True)
masters = replace(problem, precision="bf16")
def make_weights(p):
    return ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(p).items()})
weights, master = make_weights(problem), make_weights(masters)
turned = TurnedWeights.of(problem, weights) if PRECISION == "fp8" else None
biased = turned.forward if turned else master
ALL = [True] * 6
def tensors(tokens=5):
    return (torch.zeros(tokens, 272, dtype=torch.bfloat16), torch.zeros(tokens, 3, dtype=torch.int64),
            torch.zeros(tokens, 3))
def forward(layer, tokens=5, **options):
    x, ids, scores = tensors(tokens)
    return (x, ids, scores, *layer.forward(Call(x, ids, scores, weights, **options), keep=True))
def backward(layer, call, needs=ALL, dy=None, w=master, num_tokens_device=None, **options):
    x, ids, scores, y, state = call
    if problem.precision == "fp8":
        options.setdefault("turned", turned)
    given = Call(x, ids, scores, w, num_tokens_device), torch.zeros_like(x) if dy is None else dy, state
    return layer.backward(*given, Wanted(Needs(*needs), **options))
def at(region, base, table):
    return base + table[region].offset
def map_of(tensor_map):
    return maps()[bytes(tensor_map)[127] - 1]
"""


@pytest.fixture(params=["bf16", "fp8"])
def train(run, request):
    return lambda body: run(f"PRECISION = {request.param!r}\n" + SETUP + body)


def test_a_step_launches_both_kernels_with_their_arguments(train):
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu", reserve_sms=20, timeout_s=2)
    layer.prepare(weights)
    before = list(loaded)
    count = torch.ones(1, dtype=torch.int32)
    call = forward(layer, num_tokens_device=count)
    x, ids, scores, y, state = call
    one, plan, s = argument("train"), layer.plan, state.data_ptr()
    t, table = one.state, plan.train_state
    tokens_at = at("tokens", s, table)
    first = [
        one.rows_in == x.data_ptr(), one.rows_out == y.data_ptr(), one.topk_ids == ids.data_ptr(), one.num_tokens == 5,
        one.topk_weights == scores.data_ptr(), one.num_tokens_device == count.data_ptr(),
        one.gemm[0].b.words[0] == weights.w13.data_ptr(), one.gemm[0].bias == weights.b13.data_ptr(),
        t.header == s, t.tokens == tokens_at, one.gu[0].words[0] == at("gu", s, table),
        one.gu[1].words[0] == at("gu", s, table) + 144 * 2, one.chunk_prefix == at("chunk_prefix", s, table),
        one.timeout_ns == 2_000_000_000, one.epoch == layer.window.epoch_address,
        state.dtype == torch.uint8, list(state.shape) == [layer.state_bytes], config()["grid"] == [112, 1, 1]]
    dy = torch.zeros_like(x)
    gradients = backward(layer, call, dy=dy, num_tokens_device=count)
    two, work = argument("backward"), layer._training.workspace.data_ptr()
    t, dx, dw = two.own, gradients[0], gradients[2]
    rows = dict(zip(abi.GEMMS, two.gemm))
    second = [
        two.rows_in == dy.data_ptr(), t.x == x.data_ptr(), two.rows_out == dx.data_ptr(),
        two.topk_ids == ids.data_ptr(),
        t.d_topk_weights == gradients[1].data_ptr(), two.num_tokens_device == count.data_ptr(), two.num_tokens == 5,
        two.gemm[0].b.words[0] == (turned or master).w2.data_ptr(),
        two.gemm[1].b.words[0] == (turned or master).w13.data_ptr(),
        rows["recompute"].bias == biased.b13.data_ptr(), t.b2 == biased.b2.data_ptr(),
        two.state.header == s, two.state.tokens == tokens_at,
        two.gu[0].words[0] == at("gu", s, plan.train_state), t.x_rows == at("x_rows", work, plan.backward),
        rows["dw13"].out[0].words[0] == dw.data_ptr(), rows["dw2"].out[0].words[0] == gradients[3].data_ptr(),
        rows["dw13"].bias == gradients[4].data_ptr(), rows["dw2"].bias == gradients[5].data_ptr(),
        (rows["dw13"].m, rows["dw2"].m, t.dw_bytes, t.accumulate) == (144, 272, 2, 0), two.epoch == one.epoch,
        two.config_hash == one.config_hash, not dx.any(), not gradients[1].any()]  # zeros behind the count
    kinds = [[list(g.shape), str(g.dtype)] for g in gradients]
    forward(layer); backward(layer, call)
    call_again = number("stub_launches").value
print(json.dumps([before, loaded, first, second, kinds, call_again]))
""")
    before, loaded, first, second, kinds, launches = seen
    precision = before[0].split("-")[0]
    assert before == [f"{precision}-swiglu"]
    assert loaded[1:] == [f"train-{precision}-swiglu", f"backward-{precision}-swiglu"]
    assert all(first), first
    assert all(second), second
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    experts = [[[7, 288, 272], bf16], [[7, 272, 144], bf16], [[7, 288], fp32], [[7, 272], fp32]]
    assert kinds == [[[5, 272], bf16], [[5, 3], fp32], *experts]
    assert launches == 4


def test_both_kernels_are_compiled_at_the_same_time(train):
    """Either compilation waits here until the other one runs; loading waits for both."""
    compiled, at_loading = train("""
import threading
both, compiled, at_loading = threading.Barrier(2, timeout=20), [], []
def compiling(variant):
    both.wait()
    compiled.append(str(variant))
def loading(variant, device):
    at_loading.append(len(compiled))
    return KERNEL
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    layer.prepare(weights)
    with mock.patch.multiple(module, compile_variant=compiling, load_kernel=loading):
        call = forward(layer)
        backward(layer, call)
        forward(layer)
print(json.dumps([sorted(compiled), at_loading]))
""")
    precision = compiled[0].split("-")[1]
    assert compiled == [f"{kernel}-{precision}-swiglu" for kernel in ("backward", "train")]
    assert at_loading == [2, 2]


def test_threads_without_a_context_encode_maps(train):
    """Autograd's thread has none until something of torch runs in it: both directions, their first and next calls."""
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    layer.prepare(weights)
    layer.forward(Call(*tensors(), weights), keep=True)
    launches = []
    for tokens in (5, 6):
        number("stub_no_context").value = 1
        call = forward(layer, tokens)
        number("stub_no_context").value = 1
        backward(layer, call)
        number("stub_no_context").value = 1
        y_of(layer, *tensors(tokens), make_weights(problem))
        launches.append(number("stub_launches").value)
print(json.dumps(launches))
""")
    assert seen == [4, 7]


def test_weight_gradients_alone_are_said_to_the_launch_and_no_longer_to_the_next(train):
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    call, found = forward(layer), []
    for only in (True, False):
        gradients = backward(layer, call, needs=[not only] * 2 + [True] * 4, only_weights=only)
        found.append([g is None for g in gradients] + [argument("backward").own.only_weights])
    try:
        backward(layer, call, only_weights=True)
    except ArgumentError as error:
        found.append(str(error))
print(json.dumps(found))
""")
    only, whole, error = seen
    assert only == [True, True, False, False, False, False, 1]
    assert whole == [False] * 6 + [0]
    assert "no dx and no d_topk_weights with only_weights" in error


def test_rows_that_are_kept_and_the_launch_of_several_passes(train):
    """Backward's rows go to memory of the pass, and back to the workspace; one launch reads all that were kept."""
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu", reserve_sms=20)
    call = forward(layer)
    state = layer.plan.train_state["header"].view(call[-1]).fill_(5)
    prefix = layer.plan.train_state["chunk_prefix"].view(call[-1]).fill_(6)
    layer.prepare_kept()
    found, passes = [], [layer.new_kept() for _ in range(3)]
    compiled = loaded[-1]
    loaded.clear()
    for kept in [*passes, None]:
        gradients = backward(layer, call, needs=[True] * 2 + [False] * 4 if kept else ALL, kept=kept)
        two, table = argument("backward"), layer.plan.kept if kept else layer.plan.backward
        base = kept.memory.data_ptr() if kept else layer._training.workspace.data_ptr()
        rows, scaled = dict(zip(abi.GEMMS, two.gemm)), problem.precision == "fp8"
        pool = at("x_pool", layer.window.workspace(layer.plan).data_ptr(), layer.plan.workspace)
        dy, hs = ((at(n, base, table) if n in table else two.x_pool if n == "dy_rows" else rows["dw2"].b.words[0])
                  for n in ("dy_rows", "hs"))
        found.append([
            two.own.x_rows == at("x_rows", base, table), two.own.row_weight == at("row_weight", base, table),
            rows["gemm1"].out[0].words[0] == rows["dw13"].a[0].words[0] == at("dgu", base, table),
            rows["recompute"].out[1].words[0] == rows["dw13"].a[1].words[0] == at("dgu", base, table) + 144 * 2,
            rows["dw13"].b.words[0] == two.own.x_rows, rows["dw2"].a[0].words[0] == dy,
            two.hs.words[0] == rows["dw2"].b.words[0] == hs, not scaled or two.own.dy_rows == dy,
            (two.x_pool == pool) == (scaled or not kept), rows["gemm1"].a[0].words[0] == two.x_pool,
            (rows["dw13"].m, rows["dw2"].m) == (144, 272),
            (rows["dw13"].n, rows["dw2"].n) == ((0, 0) if kept else (272, 144)),
            [g is None for g in gradients] == [False] * 2 + [bool(kept)] * 4])
        if kept:
            copies = [layer.plan.kept[n].view(kept.memory) for n in ("header", "chunk_prefix")]
            found[-1] += [torch.equal(copies[0], state), torch.equal(copies[1], prefix)]
    into = {"w13": torch.zeros_like(master.w13, dtype=torch.float32)}
    wanted = Wanted(Needs(False, False, True, False, True, True), into)
    gradients = layer.weight_gradients(master, passes, wanted)
    three, workspace = argument("kept_weights"), layer.window.workspace(layer.plan).data_ptr()
    own, (dw13, dw2) = three.own, three.gemm
    table = [layer.plan.kept, [kept.memory.data_ptr() for kept in passes]]
    found.append([
        compiled == "grouped-kept-2", loaded == [], own.num_passes == 3, (own.dw_bytes, own.accumulate) == (4, 1),
        (dw13.m, dw13.n, dw2.m, dw2.n) == (144, 272, 272, 144), dw13.out[0].words[0] == into["w13"].data_ptr(),
        dw13.bias == gradients[4].data_ptr(), dw2.bias == gradients[5].data_ptr(),
        three.fault == layer.window.fault_address, three.pool_rows == layer.plan.pool_rows,
        three.fault_ticket == at("fault_ticket", workspace, layer.plan.workspace),
        three.abort == at("window_abort", layer.window.bases[0], layer.plan.window),
        (three.num_local_experts, three.num_ranks, three.max_chunks) == (7, 1, 3),
        config()["grid"] == [112, 1, 1], config()["ids"] == [],
        [g is None for g in gradients] == [True] * 4 + [False] * 2])
    for one, base in zip(own.passes, table[1]):
        places = [one.dgu[0], one.dy, one.x, one.hs]
        found.append([t.words[0] == at(n, base, table[0]) for t, n in
                      zip(places, ("dgu", "dy_rows", "x_rows", "hs"))])
        found[-1] += [getattr(one, n) == at(n, base, table[0]) for n in ("row_weight", "header", "chunk_prefix")]
        found[-1] += [one.dgu[1].words[0] == one.dgu[0].words[0] + 144 * 2]
    layer.window.resets += 1
    try:
        layer.weight_gradients(master, passes, wanted)
    except MegaMoEError as error:
        found.append([str(error)])
print(json.dumps(found))
""")
    *checks, error = seen
    assert len(checks) == 4 + 1 + 3
    for found in checks:
        assert all(found), found
    assert "reset() was called since 3 of 3 backward passes" in error[0]


def test_gradients_have_their_masters_layout_and_only_what_is_needed_is_made(train):
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    found = []
    w13 = torch.zeros(7, 144, 2, 272, dtype=torch.bfloat16).transpose(1, 2)  # gate and up interleaved
    gap = torch.zeros(7, 272, 160, dtype=torch.bfloat16)[:, :, :144]
    other = ExpertWeights(w13, gap, torch.zeros(7, 2, 144).transpose(1, 2).contiguous().transpose(1, 2), master.b2)
    call = forward(layer)
    gradients = backward(layer, call, w=other)
    found.append([list(g.stride()) for g in gradients[2:5]])
    dw13 = argument("backward").gemm[2].out[0]
    found.append([dw13.words[0] == gradients[2].data_ptr(), map_of(dw13)["strides"][:3]])
    found.append([g is None for g in backward(layer, call, needs=[True, False, False, True, False, False])])
    dw13, dw2 = argument("backward").gemm[2:4]
    found.append([dw13.m, dw2.m, dw13.bias, dw2.bias])
    nothing = backward(layer, call, needs=[False] * 6)
    two = argument("backward")
    found.append([g is None for g in nothing] + [any(row.m for row in two.gemm), two.rows_out != 0])
print(json.dumps(found))
""")
    strides, given, partly, wanted, nothing = seen
    assert strides == [[144 * 544, 272, 544, 1], [272 * 144, 144, 1], [288, 144, 1]]
    assert given == [True, [1088, 544, 144 * 1088]]
    assert partly == [False, True, True, False, True, True]
    assert wanted == [0, 272, None, None]
    assert nothing == [True] * 6 + [False, True]


def test_gradients_are_added_where_the_caller_says(train):
    # The launch computes nothing: what was there stays, what the kernel cannot add to gets zeros added.
    seen = train("""
def ones(name, dtype=torch.float32):
    return torch.ones(getattr(master, name).shape, dtype=dtype)
def given():
    dw13, dw2 = argument("backward").gemm[2:4]
    return [dw13.out[0].words[0], dw2.out[0].words[0], dw13.bias, dw2.bias]
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    call, found = forward(layer), {}
    for name, into in {
        "all": {n: ones(n) for n in ("w13", "w2", "b13", "b2")},
        "bf16": {n: ones(n, torch.bfloat16) for n in ("w13", "w2")},
        "one": {"w13": ones("w13")},
        "mixed": {"w13": ones("w13"), "w2": ones("w2", torch.bfloat16)},
        "bias": {"b2": ones("b2", torch.bfloat16)},
        "strided": {"w2": torch.ones(7, 144, 272).transpose(1, 2)},
    }.items():
        gradients = backward(layer, call, into=into)
        t, named = argument("backward"), ("w13", "w2", "b13", "b2")
        wanted = sum(1 << i for i, row in enumerate(t.gemm[2:4]) if row.m)
        found[name] = {
            "returned": [g is not None for g in gradients[2:]], "flags": [wanted, t.own.dw_bytes, t.own.accumulate],
            "direct": [n in into and into[n].data_ptr() == at for n, at in zip(named, given())],
            "kept": all(bool((v == 1).all()) for v in into.values()),
            "zero": all(bool((g == 0).all()) for g in gradients[2:] if g is not None),
            "types": [None if g is None else g.element_size() for g in gradients[2:]]}
print(json.dumps(found))
""")
    wrong = {n: s for n, s in seen.items() if not (s["kept"] and s["zero"])}
    assert not wrong
    yes, no = True, False
    assert {n: s["returned"] for n, s in seen.items()} == {
        "all": [no] * 4,
        "bf16": [no, no, yes, yes],
        "one": [no, yes, yes, yes],
        "mixed": [no, no, yes, yes],
        "bias": [yes, yes, yes, no],
        "strided": [yes, no, yes, yes],
    }
    assert {n: s["flags"] for n, s in seen.items()} == {
        "all": [3, 4, 1],
        "bf16": [3, 2, 1],
        "one": [3, 4, 1],
        "mixed": [3, 4, 1],
        "bias": [3, 2, 1],
        "strided": [3, 4, 1],
    }
    assert seen["all"]["direct"] == [yes] * 4
    assert seen["mixed"]["direct"] == [yes, no, no, no]
    assert seen["strided"]["direct"] == [no] * 4
    assert seen["one"]["types"] == [None, 2, 4, 4]  # in the master's type, whatever the launch had


REFUSALS = {
    "dy.dtype is torch.float32": "dy=torch.zeros(5, 272)",
    "dy.shape is [4, 272]": "dy=torch.zeros(4, 272, dtype=torch.bfloat16)",
    "dy.stride()": "dy=torch.zeros(272, 5, dtype=torch.bfloat16).t()",
    "dy is 0x": "dy=torch.zeros(5 * 272 + 1, dtype=torch.bfloat16)[1:].view(5, 272)",
    "dy.device is meta": "dy=torch.zeros(5, 272, dtype=torch.bfloat16, device='meta')",
    "state.shape": "call=(*call[:4], call[4][:-16])",
    "state.dtype": "call=(*call[:4], call[4].view(torch.int32))",
    "state is 0x": "call=(*call[:4], torch.zeros(layer.state_bytes + 8, dtype=torch.uint8)[8:])",
    "topk_ids.shape": "call=(call[0], call[1][:3], *call[2:])",
    "x.shape[0] is 71": "call=(torch.zeros(71, 272, dtype=torch.bfloat16), *call[1:])",
    "weights.w13.dtype is torch.float8_e4m3fn": "w=make_weights(replace(problem, precision='fp8'))",
    "weights.w2.shape": "w=replace(master, w2=master.w2[:, :, :128])",
    "into is 'x'": "into={'x': call[0]}",
    "into['w2'].dtype is torch.float64": "into={'w2': master.w2.double()}",
    "into['w2'].shape is [6, 272, 144]": "into={'w2': master.w2[1:]}",
    "into['w2'].device is meta": "into={'w2': master.w2.to('meta')}",
    "into is 'w2'": "needs=[True, True, True, False, True, True], into={'w2': master.w2.clone()}",
    "num_tokens_device.dtype is torch.int64": "num_tokens_device=torch.ones(1, dtype=torch.int64)",
}


def test_bad_backward_calls_are_refused_by_name_before_the_launch(train):
    cases = ", ".join(f"({text!r}, lambda: dict({how}))" for text, how in REFUSALS.items())
    seen = train(f"""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    found, good = [], forward(layer)
    for text, how in [{cases}]:
        call = good
        options = how()
        launches = number("stub_launches").value
        try:
            backward(layer, options.pop("call", call), **options)
            found.append(text + ": not refused")
        except ArgumentError as error:
            if text not in str(error):
                found.append(text + ": " + str(error))
        if number("stub_launches").value != launches:
            found.append(text + ": launched")
    backward(layer, good)
    fresh = mega.MegaBackend(problem, device="cpu")
    try:
        backward(fresh, good)
    except ArgumentError as error:
        found.append(str(error))
print(json.dumps(found))
""")
    assert seen == ["state is given, expected one that a forward of this layer has kept"]


def test_weights_refused_halfway_are_not_taken_for_those_before(train):
    seen = train("""
def crooked(w):  # w2 where no tensor map can begin
    raw = torch.zeros(w.w2.numel() + 1, dtype=w.w2.dtype)
    if w is turned:
        return replace(turned, w2=raw[1:].view(w.w2.shape))
    moved = make_weights(problem if w is weights else masters)
    return replace(moved, w2=raw[1:].view(w.w2.shape))
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    call_of, found = forward(layer), []
    call(layer, weights=weights)
    def tries():
        x, ids, scores = tensors()
        yield "forward", weights, 0, lambda w: call(layer, weights=w)
        yield "train", weights, 0, lambda w: layer.forward(Call(x, ids, scores, w), keep=True)
        yield "backward", turned or master, 1, lambda w: backward(layer, call_of, **{"turned" if turned else "w": w})
    for kind, good, place, launch in tries():
        launch(good)
        try:
            launch(crooked(good))
        except ArgumentError as error:
            found.append("16-byte aligned" in str(error))
        launch(good)
        found.append(argument(kind).gemm[place].b.words[0] == good.w13.data_ptr())
        found.append(argument(kind).gemm[1 - place].b.words[0] == good.w2.data_ptr())
print(json.dumps(found))
""")
    assert seen == [True] * 9


def test_nothing_is_made_in_a_capture_nor_on_one_rank_alone(run):
    seen = run(
        'PRECISION = "fp8"\n'
        + SETUP
        + """
from megamoe.group.group import Group
class Apart(Group):  # a group whose other rank could not make its kernel, while `failing`
    failing = False
    def gather(self, mark, value):
        return {0: value, 1: "CompileError: no"} if self.failing else {0: value}
with on_cpu():
    group = Apart()
    layer = mega.MegaBackend(problem, group, device="cpu")
    layer.prepare(weights)
    found = []
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True):
        try:
            forward(layer)
        except MegaMoEError as error:
            found.append(str(error))
    found.append([len(loaded), len(layer.window._backward_workspaces)])
    for group.failing in (True, True, False):
        try:
            forward(layer)
        except MegaMoEError as error:
            found.append(str(error))
    call = forward(layer)
    with mock.patch("torch.cuda.is_current_stream_capturing", lambda: True), mock.patch.object(
        launches, "_capture_id", lambda handle: 9):
        backward(layer, forward(layer))
    found.append(number("stub_launches").value)
    twin = mega.MegaBackend(problem, window=layer.window)
    other = mega.MegaBackend(problem, window=layer.window, pool_rows=4096)
    for each in (twin, other):
        forward(each)
    found.append([layer._training.workspace is twin._training.workspace, len(layer.window._backward_workspaces)])
    cells = layer.plan.backward["grads_ready"].view(layer._training.workspace)
    cells.fill_(3)
    layer.reset()
    found.append(int(cells))
print(json.dumps(found))
"""
    )
    capture, made, first, second, launches, shared, cell = seen
    assert "run one step, forward and backward, before CUDA graph capture" in capture
    assert made == [1, 0]
    assert first == second == "rank 1 could not prepare the kernels of training: CompileError: no"
    assert launches == 4
    assert shared == [True, 2]
    assert cell == 0


def test_statistics_and_intermediates_are_of_the_last_call(train):
    seen = train("""
def fill(prefix, first):
    prefix.zero_()
    prefix[0, 1:] = first
def ask():
    try:
        s = layer.statistics()
        return [s.tokens_per_expert.tolist()[0], sorted(layer.intermediates())]
    except MegaMoEError as error:
        return str(error)
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu")
    x, ids, scores = tensors()
    y_of(layer, x, ids, scores, weights)
    routes = layer.plan.window["window_routes"].view(layer.window.memory)
    routes[:, :, 0] = 5
    inside = layer.plan.views(layer.window.workspace(layer.plan))["chunk_prefix"]
    fill(inside, 7)
    found = [ask()]
    call = forward(layer)
    fill(layer.plan.train_state["chunk_prefix"].view(call[4]), 11)
    found.append(ask())
    backward(layer, call)
    del call
    found.append(ask())
    forward(layer)
    found.append(ask())
    y_of(layer, x, ids, scores, weights)
    found.append(ask())
print(json.dumps(found))
""")
    forward, train, backward, gone, again = seen
    assert [forward[0], train[0], backward[0], again[0]] == [7, 11, 11, 11]
    assert set(train[1]) == {*forward[1], "gate_up"}
    rows = {"dy_rows", "dgu", "hs", "d_s", "dx_rows", "x_rows", "row_weight", "route_rows"}
    assert set(backward[1]) == rows | {"partials"}
    assert "its state is gone" in gone
    assert again[1] == forward[1]


def test_faults_of_a_backward_are_raised_and_reset(train):
    seen = train("""
with on_cpu():
    layer = mega.MegaBackend(problem, device="cpu", timeout_s=2)
    call = forward(layer)
    fault = layer.window.fault
    fault.peer, fault.expected, fault.seen = 0, 4, 9
    fault.edge = int(abi.Edge.state)
    messages = []
    for act in (lambda: backward(layer, call), lambda: forward(layer), lambda: backward(layer, call)):
        try:
            act()
        except MegaMoEError as error:
            messages.append([type(error).__name__, str(error)])
    layer.reset()
    backward(layer, call)
print(json.dumps([messages, number("stub_launches").value]))
""")
    messages, launches = seen
    assert [kind for kind, _ in messages] == ["RankMismatch", "WindowBroken", "WindowBroken"]
    assert "a state that no forward of this layer completed" in messages[0][1]
    assert launches == 2


def test_launches_that_train_keep_the_order_of_streams(run):
    seen = run(
        'PRECISION = "fp8"\n'
        + SETUP
        + """
log, handles = [], [1, 2, 2]
class Side:
    def __init__(self, handle): self.cuda_stream = handle
    def wait_event(self, event): log.append([self.cuda_stream, "waits for", event.stream.cuda_stream])
class Event:
    def record(self, stream): self.stream = stream
with on_cpu():
    launches._orders.clear()
    layer = mega.MegaBackend(problem, device="cpu")
    x, ids, scores = tensors()
    with mock.patch.multiple("torch.cuda", Event=Event, current_stream=lambda *a: Side(handles[0])):
        launches.current_stream_handle = lambda ordinal: handles[0]
        call = forward(layer)
        log.append([config()["stream"], "launches", 0]); handles.pop(0)
        backward(layer, call)
        log.append([config()["stream"], "launches", 0]); handles.pop(0)
        y_of(layer, x, ids, scores, weights)
        log.append([config()["stream"], "launches", 0])
    launches._orders.clear()
print(json.dumps(log))
"""
    )
    assert seen == [
        [1, "launches", 0],
        [2, "waits for", 1],
        [2, "launches", 0],
        [2, "launches", 0],
    ]
