"""Launching without a GPU: tests/stub/libcuda.c stands in for the driver and records what it is told."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_launch_passes_the_argument_and_the_attributes(run):
    seen = run("""
args = abi.aligned(abi.LAUNCHES["forward"])
args.num_tokens, args.act_alpha, args.window[3] = 77, 0.5, 1 << 45
kernel = module.Kernel(b"cubin", "megamoe_forward", 0, 200000)
out = []
for pdl, cooperative in ((False, True), (True, True), (False, False)):
    launcher = module.Launcher(kernel, 130, args, cooperative=cooperative, pdl=pdl)
    launcher.launch(0x7000)
    launcher.launch(0x7100)
    out.append(config())
got = argument()
args.num_tokens = 78  # after the launch: the driver has its copy
print(json.dumps({"configs": out, "args": [got.num_tokens, got.act_alpha, got.window[3]],
                  "launches": number("stub_launches").value,
                  "max_smem": number("stub_max_smem").value}))
""")
    cooperative, both, neither = seen["configs"]
    assert cooperative["grid"] == [130, 1, 1]
    assert cooperative["block"] == [512, 1, 1]
    assert cooperative["smem"] == seen["max_smem"] == 200000
    assert cooperative["stream"] == 0x7100
    assert (cooperative["ids"], cooperative["values"]) == (
        [2],
        [1],
    )  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert (both["ids"], both["values"]) == (
        [2, 6],
        [1, 1],
    )  # and PROGRAMMATIC_STREAM_SERIALIZATION
    assert neither["ids"] == []
    assert seen["args"] == [77, 0.5, 1 << 45]
    assert seen["launches"] == 6


def test_a_thread_without_a_context_launches_once(run):
    seen = run("""
kernel = module.Kernel(b"cubin", "megamoe_forward", 0, 200000)
launcher = module.Launcher(kernel, 130, abi.aligned(abi.LAUNCHES["forward"]))
number("stub_no_context").value = 1
launcher.launch(0x7000)
counts = [number("stub_launches").value]
number("stub_max_smem").value = 0
try:
    launcher.launch(0x7000)
except MegaMoEError as error:
    counts.append(str(error))
number("stub_max_smem").value = 200000
print(json.dumps(counts))
""")
    assert seen[0] == 1
    assert "INVALID_VALUE" in seen[1]


def test_too_large_grids_are_refused(run):
    seen = run("""
kernel = module.Kernel(b"cubin", "megamoe_forward", 0, 200000)
kernel.check_resident(132)
messages = []
for act in (lambda: kernel.check_resident(133), lambda: module.Kernel(b"cubin", "k", 0, 300000)):
    try:
        act()
    except NotCoResident as error:
        messages.append(str(error))
number("stub_blocks_per_sm").value = 0
try:
    kernel.check_resident(1)
except NotCoResident as error:
    messages.append(str(error))
print(json.dumps(messages))
""")
    assert len(seen) == 3
    assert "133 CTAs, 132 fit" in seen[0]
    assert "300000 bytes of shared memory" in seen[1]


def test_driver_errors_become_exceptions(run):
    seen = run("""
try:
    encode(4096 + 8, (64, 64), (128,), (64, 64), 2)
except MegaMoEError as error:
    print(json.dumps(str(error)))
""")
    assert "INVALID_VALUE" in seen
    assert "the stub refuses" in seen


def test_tensor_maps(run):
    seen = run("""
w13 = (1 << 20, (7168, 2048, 2, 64), (7168, 7168 * 2048, 7168 * 4096), (128, 128, 1, 1), 1)
first, again, pool = encode(*w13), encode(*w13), encode(1 << 21, (64, 256), (128,), (64, 64), 2)
print(json.dumps({"maps": maps(), "same": first == again, "sizes": [len(first), len(pool)],
                  "last": [first[127], pool[127]]}))
""")
    w13, pool = seen["maps"]  # the second call came from the cache
    assert seen["same"]
    assert seen["sizes"] == [128, 128]
    assert seen["last"] == [1, 2]
    assert (w13["type"], w13["rank"]) == (0, 4)  # uint8
    assert w13["dims"][:4] == [7168, 2048, 2, 64]
    assert w13["strides"][:3] == [7168, 7168 * 2048, 7168 * 4096]
    assert w13["box"][:4] == [128, 128, 1, 1]
    assert (pool["type"], pool["rank"], pool["dims"][:2]) == (9, 2, [64, 256])  # bfloat16
    for tensor_map in (w13, pool):  # 128-byte swizzle, 256-byte promotion, zeros outside
        assert (tensor_map["swizzle"], tensor_map["promotion"], tensor_map["fill"]) == (3, 3, 0)


def test_backend_launches_what_the_call_says(run):
    seen = run("""
with on_cpu():
    backend = mega.MegaBackend(problem, device="cpu", reserve_sms=20, timeout_s=2, profile=True)
    backend.prepare(weights)
    count = torch.ones(1, dtype=torch.int32)
    x, y = call(backend, num_tokens_device=count)
    got, made = argument(), len(maps())
    facts = {
        "config": config(), "y": list(y.shape), "maps": made,
        "pointers": [got.rows_in == x.data_ptr(), got.rows_out == y.data_ptr(),
                     got.num_tokens_device == count.data_ptr(),
                     got.epoch == backend.window.epoch_address, got.fault == backend.window.fault_address,
                     got.profile == backend.profile.data_ptr(), got.window[0] == backend.window.bases[0],
                     got.gemm[0].b_scale == weights.w13_scale.data_ptr(),
                     got.gemm[0].b.words[0] == weights.w13.data_ptr(),
                     bytes(got.gemm[0].out) == bytes(got.gemm[1].a), got.gemm[0].a[0].words[0] == got.x_pool],
        "sizes": [got.num_tokens, got.ids_are_int64, got.timeout_ns],
    }
    out = torch.zeros(0, 272, dtype=torch.bfloat16)
    _, empty = call(backend, tokens=0, out=out)
    facts["empty"] = [argument().num_tokens, empty is out, len(maps()) == made]
    moved = ExpertWeights(**{n: t.clone() for n, t in weights.named().items()})
    call(backend, weights=moved)
    facts["moved"] = [argument().gemm[0].b.words[0] == moved.w13.data_ptr(), len(maps()) - made]
    backend.close(); backend.close()
print(json.dumps(facts))
""")
    assert seen["config"]["grid"] == [112, 1, 1]
    assert seen["config"]["ids"] == [2]
    assert seen["config"]["stream"] == 0x5000
    assert seen["y"] == [5, 272]
    assert seen["maps"] == 7
    assert all(seen["pointers"]), seen["pointers"]
    assert seen["sizes"] == [5, 1, 2_000_000_000]
    assert seen["empty"] == [0, True, True]
    assert seen["moved"] == [True, 2]


def test_calls_of_many_tokens_take_the_kernel_with_panels(run):
    """Both kernels have one argument block; layers of few tokens and other precisions have one kernel."""
    seen = run("""
KERNELS = [KERNEL, module.Kernel(b"cubin", "megamoe_forward", 0, 200000)]
asked, built = [], []
module.compile_variant = lambda variant: built.append(str(variant))
def load(variant, device):
    asked.append(str(variant))
    return KERNELS[variant.panels]
def launched(max_tokens, precision, *tokens):
    problem = Problem(288, 160, 7, 3, max_tokens=max_tokens, precision=precision)
    made = {n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(problem).items()}
    backend, found = mega.MegaBackend(problem, device="cpu"), []
    for t in tokens:
        x, ids = torch.zeros(t, 288, dtype=torch.bfloat16), torch.zeros(t, 3, dtype=torch.int64)
        y = y_of(backend, x, ids, torch.zeros(t, 3), ExpertWeights(**made))
        expanded = argument("packed").own
        found.append([backend._forward.launcher.kernel is KERNELS[1], argument().num_tokens == t == len(y),
                      (expanded.rooms, expanded.above) == (7, 7 * 640)])
    backend.close()
    return found
with on_cpu(), mock.patch.object(module, "load_kernel", load):
    # an even load of 1494 tokens: 640.3 rows of each of seven experts
    found = launched(1600, "fp8xmxfp4", 5, 1493, 1494, 1600, 5, 1600)
    few = launched(1493, "fp8xmxfp4", 1493), launched(1600, "fp8", 1600), launched(1600, "bf16xmxfp4", 1600)
module.compile_variant = lambda variant: None
print(json.dumps([found, few, asked, sorted(built)]))
""")
    found, few, asked, built = seen
    assert found == [[panels, True, True] for panels in (False, False, True, True, False, True)]
    assert few == [[[False, True, False]]] * 3
    names = [
        "fp8xmxfp4-swiglu",
        "fp8xmxfp4-swiglu-panels",
        "fp8xmxfp4-swiglu",
        "fp8-swiglu",
        "bf16xmxfp4-swiglu",
    ]
    assert asked == names
    assert built == names[:2]  # at the same time; what is alone is compiled where it is loaded


def test_weights_that_move_are_followed(run):
    seen = run("""
with on_cpu():
    backend = mega.MegaBackend(problem, device="cpu")
    def launched(w, known=None):  # whether the kernel was given these weights, as they are now
        call(backend, weights=w, known=known)
        one, two = argument().gemm
        return [one.b.words[0], two.b.words[0], one.b_scale, two.b_scale] == [
            t.data_ptr() for t in (w.w13, w.w2, w.w13_scale, w.w2_scale)]
    named = weights.named()
    first, plain = ExpertWeights(**named), ExpertWeights(**{n: t.clone() for n, t in named.items()})
    found = [launched(w) for w in (first, first, plain, first, plain)]
    one, two = object(), object()  # as a layer has one for each call that it knows
    for w, known in ((first, one), (first, one), (plain, two), (first, one), (plain, None), (first, one), (plain, two),
                     (plain, two), (first, None), (plain, two)):
        found.append(launched(w, known))
    backend.prepare(first)
    found.append(launched(plain, two))
    plain.w2.data = plain.w2.clone()
    found.append(launched(plain))
    plain.w13 = plain.w13.clone()
    found.append(launched(plain))
    wide = torch.zeros(7, 272, 160, dtype=plain.w2.dtype)
    strides = []
    dense = torch.as_strided(wide, (7, 272, 144), (144 * 272, 144, 1))  # the same address
    for w2 in (dense, wide[:, :, :144], dense):  # the last map comes from the cache
        plain.w2.data = w2
        call(backend, weights=plain)
        which = bytes(argument().gemm[1].b)[127]
        strides.append(maps()[which - 1]["strides"][0])
print(json.dumps([found, strides]))
""")
    assert seen == [[True] * 18, [144, 160, 144]]


def test_a_launch_keeps_no_weights_alive(run):
    """Else those of a model that was moved off the GPU would stay there; biases are copied, and do."""
    seen = run("""
from dataclasses import replace
from torch.multiprocessing.reductions import StorageWeakRef
with on_cpu():
    plain = replace(problem, precision="bf16", bias=True)
    given = ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(plain).items()})
    backend = mega.MegaBackend(plain, device="cpu")
    call(backend, weights=given)
    kept = {n: StorageWeakRef(t.untyped_storage()) for n, t in given.named().items()}
    del given
print(json.dumps([n for n, storage in kept.items() if storage.expired()]))
""")
    assert seen == ["w13", "w2"]


# A layer of backend="mega", its calls, and whether the kernel was told what each is.
LAYER = """
from megamoe import Layer
from megamoe.backends import select as functional
checks, check = [], Layer._checked
def counted(self, *call):
    checks.append(1)
    return check(self, *call)
class Inner:
    def __init__(self, **options):
        self.layer = Layer(problem, backend="mega", **options)
    def __call__(self, w, tokens=5, dtype=torch.int64, lead=(), out=False, x=None, scale=None, count=None):
        x = torch.zeros(*lead, tokens, 272, dtype=torch.bfloat16) if x is None else x
        ids, scores = torch.zeros(*lead, tokens, 3, dtype=dtype), torch.zeros(*lead, tokens, 3)
        y = torch.zeros(*lead, tokens, 272, dtype=torch.bfloat16) if out else None
        made = self.layer(x, ids, scores, w, out=y, x_scale=scale, num_tokens_device=count)
        got = argument()
        one, two = got.gemm
        mine = self.layer._runtime.weights(w)
        return [
            got.num_tokens == tokens, got.ids_are_int64 == (dtype == torch.int64), made.shape == x.shape,
            y is None or made is y, made.dtype == torch.bfloat16,
            *[(found or 0) == (0 if t is None else t.data_ptr()) for found, t in (
                (got.rows_in, x), (got.rows_out, made), (got.topk_ids, ids), (got.topk_weights, scores),
                (got.in_scale, scale), (got.num_tokens_device, count))],
            [one.b.words[0], two.b.words[0], one.b_scale, two.b_scale] == [
                t.data_ptr() for t in (mine.w13, mine.w2, mine.w13_scale, mine.w2_scale)]]
def opened():
    return mock.patch.multiple("megamoe.layer.layer.Layer", _checked=counted), mock.patch.object(
        functional, "why_not_mega", lambda *_: None)
def copies(w):
    return ExpertWeights(**{n: t.clone() for n, t in w.named().items()})
"""


@pytest.mark.parametrize("guards", ["torch._C._dynamo.guards.TensorGuards", "None"])
def test_known_calls_of_a_layer_are_told_apart(run, guards):
    """Calls that were checked, in turn: what the kernel has of the last one is filled anew, whatever differs."""
    checked, wrong = run(f"""{LAYER}
from contextlib import ExitStack
with ExitStack() as stack:
    stack.enter_context(mock.patch.object(torch._C._dynamo.guards, "TensorGuards", {guards}))
    for patch in (on_cpu(), torch.no_grad(), *opened()):
        stack.enter_context(patch)
    inner, first = Inner(), copies(weights)
    second, third = copies(weights), copies(weights)
    count, q = torch.ones(1, dtype=torch.int32), torch.zeros(5, 272).to(torch.float8_e4m3fn)
    quantized = dict(x=q[None], scale=torch.ones(1, 5, 3), lead=(1,))
    calls = [
        dict(w=first), dict(w=first, tokens=6, dtype=torch.int32), dict(w=first, tokens=0),
        dict(w=second, lead=(1, 1)), dict(w=first, lead=(1, 1, 1), dtype=torch.int32),
        dict(w=second, lead=(1,) * 4, count=count), dict(w=second, lead=(1,) * 5, out=True),
        dict(w=third, tokens=2), dict(w=first, **quantized)]
    for each in calls:
        inner(**each)
    checked = [len(checks)]
    wrong = []
    def look(title, found):
        if not all(found):
            wrong.append([title, found])
    for i, before in enumerate(calls):
        for j, after in enumerate(calls):
            for each in (before, after, after):
                look([i, j], inner(**each))
    checked.append(len(checks))
    backend = inner.layer._runtime.backend
    for other in (first, second, third):  # what does not go by way of a known call
        for i, each in enumerate(calls):
            inner(**each)
            backend.prepare(other)
            look(["prepare", i], inner(**each))
            call(backend, tokens=7, weights=other)
            look(["backend", i], inner(**each))
            inner.layer.prepare(other)
            look(["layer.prepare", i], inner(**each))
    checked.append(len(checks))
    inner.layer.close()
print(json.dumps([checked, wrong]))
""")
    assert wrong == []
    assert checked == [9] * 3, "a call that is known was checked again, or is none"


@pytest.mark.parametrize("guards", ["torch._C._dynamo.guards.TensorGuards", "None"])
def test_weights_of_known_calls_of_a_layer_that_move_are_followed(run, guards):
    """e4m3 weights, and masters whose copies the layer makes: other tensors, the same with other data, one of them."""
    wrong = run(f"""{LAYER}
from contextlib import ExitStack
from dataclasses import replace
plain = replace(problem, precision="bf16")
with ExitStack() as stack:
    stack.enter_context(mock.patch.object(torch._C._dynamo.guards, "TensorGuards", {guards}))
    for patch in (on_cpu(), torch.no_grad(), *opened()):
        stack.enter_context(patch)
    wrong = []
    masters = ExpertWeights(**{{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(plain).items()}})
    for kind, given in (("stored", copies(weights)), ("masters", masters)):
        inner = Inner()
        def look(title, w):
            for turn in range(3):  # checked, and then known
                found = inner(w)
                if not all(found):
                    wrong.append([kind, title, turn, found])
        look("first", given)
        look("others", copies(given))
        look("first again", given)
        for name in given.named():
            t = getattr(given, name)
            t.data = t.data.clone()
            look(name + ".data", given)
            setattr(given, name, t.clone())
            look(name, given)
            look(name + ", of new weights", replace(given, **{{name: t.clone()}}))
            look(name + ", of the old ones", given)
        inner.layer.close()
print(json.dumps(wrong))
""")
    assert wrong == []


def test_biases_that_move_beside_the_same_matrices_are_followed(run):
    seen = run("""
from dataclasses import replace
with on_cpu():
    biased = Problem(272, 144, 7, 3, max_tokens=70, bias=True)
    backend, expected = mega.MegaBackend(biased, device="cpu"), expected_weights(biased)
    w, found = ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected.items()}), []
    for name in ("b13", "b2"):
        call(backend, weights=w)
        w = replace(w, **{name: getattr(w, name).clone()})
        call(backend, weights=w)
        found.append([gemm.bias for gemm in argument().gemm] == [w.b13.data_ptr(), w.b2.data_ptr()])
print(json.dumps(found))
""")
    assert seen == [True, True]


def test_calls_of_other_shapes_and_types_are_noticed(run):
    seen = run("""
def sizes(tokens, dtype):
    x, scores = torch.zeros(tokens, 272, dtype=torch.bfloat16), torch.zeros(tokens, 3)
    y_of(backend, x, torch.zeros(tokens, 3, dtype=dtype), scores, weights)
    return [argument().num_tokens, argument().ids_are_int64]
with on_cpu():
    found, refused = [], []
    for guards in (torch._C._dynamo.guards.TensorGuards, None):
        with mock.patch.object(torch._C._dynamo.guards, "TensorGuards", guards):
            backend = mega.MegaBackend(problem, device="cpu")
            for tokens, dtype in ((5, torch.int64), (5, torch.int32), (6, torch.int32), (0, torch.int32)) * 2:
                found.append(sizes(tokens, dtype) == [tokens, dtype == torch.int64])
            good = torch.zeros(6, 272, dtype=torch.bfloat16), torch.zeros(6, 3, dtype=torch.int32), torch.zeros(6, 3)
            y_of(backend, *good, weights)
            for position, bad in (
                (0, good[0].float()), (0, torch.zeros(272, 6, dtype=torch.bfloat16).t()), (0, good[0][:, :256]),
                (1, good[1].short()), (1, good[1][:5]), (2, torch.zeros(3, 6).t()), (2, good[2].to("meta")[:, :2]),
            ):
                given = list(good)
                given[position] = bad
                launches = number("stub_launches").value
                try:
                    y_of(backend, *given, weights)
                    refused.append(False)
                except ArgumentError:
                    refused.append(number("stub_launches").value == launches)
            y_of(backend, *good, weights)
            found.append(argument().num_tokens == 6)
print(json.dumps([found, refused]))
""")
    assert seen == [[True] * 18, [True] * 14]


def test_a_quantized_x_is_never_taken_for_another(run):
    """Its scales go with its call, and bf16 behind it is looked at anew: the kernel would read twice as much."""
    seen = run("""
from megamoe.formats.quantized import QuantizedRows
with on_cpu():
    backend = mega.MegaBackend(problem, device="cpu")
    q = torch.zeros(5, 272).to(torch.float8_e4m3fn)
    scale, x = torch.ones(5, 3), torch.zeros(5, 272, dtype=torch.bfloat16)
    rest = torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, 3), weights
    found, refused = [], []
    for _ in range(2):
        y = y_of(backend, QuantizedRows(q, scale), *rest)
        found.append([argument().in_scale == scale.data_ptr(), argument().rows_in == q.data_ptr(), y.dtype == x.dtype])
        for bad in (q, QuantizedRows(x, scale), QuantizedRows(q, scale[:, :2]), QuantizedRows(q, scale.double())):
            launches = number("stub_launches").value
            try:
                y_of(backend, bad, *rest)
                refused.append(False)
            except ArgumentError:
                refused.append(number("stub_launches").value == launches)
        y_of(backend, x, *rest)
        found.append([not argument().in_scale, argument().rows_in == x.data_ptr()])
    plain = Problem(272, 144, 7, 3, max_tokens=70)
    none = ExpertWeights(**{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(plain).items()})
    try:
        y_of(mega.MegaBackend(plain, device="cpu"), QuantizedRows(q, scale), *rest[:2], none)
        refused.append(False)
    except ArgumentError:
        refused.append(True)
print(json.dumps([found, refused]))
""")
    assert seen == [[[True] * 3, [True] * 2] * 2, [True] * 9]


def test_faults_are_raised_and_reset(run):
    seen = run("""
with on_cpu():
    backend = mega.MegaBackend(problem, device="cpu", timeout_s=2)
    call(backend)
    fault = backend.window.fault
    fault.peer, fault.index, fault.expected, fault.seen = 8, 17, 128, 96
    fault.edge = int(abi.Edge.rows_ready)
    messages = []
    for _ in range(2):
        try:
            call(backend)
        except MegaMoEError as error:
            messages.append([type(error).__name__, str(error)])
    backend.reset()
    call(backend)
    abort = backend.window.regions["window_abort"].view(backend.window.memory)
    abort[0] = 4
    call(backend)  # nothing on the host says so yet
    try:
        backend.check()
    except MegaMoEError as error:
        messages.append([type(error).__name__, str(error)])
    backend.reset()
    backend.check()
    messages.append([int(abort[0]), number("stub_launches").value])
print(json.dumps(messages))
""")
    (first, text), (second, _), (third, _), after = seen
    assert (first, second, third) == ("ProtocolTimeout", "WindowBroken", "PeerFault")
    assert "2.0 s at edge rows_ready" in text
    assert "expected 128, saw 96" in text
    assert after == [0, 3]


# Of a program: streams by their handles, `waited(stream, event's stream)`, and a backend that has not launched.
STREAMS = """
class Side:
    def __init__(self, handle): self.cuda_stream = handle
    def wait_event(self, event): waited(self.cuda_stream, event.stream.cuda_stream)
class Event:
    def record(self, stream): self.stream = stream
with on_cpu():
    launches._orders.clear()
    backend = mega.MegaBackend(problem, device="cpu")
    backend.prepare(weights)
"""


def test_launches_on_another_stream_wait_for_the_last(run):
    seen = run(f"""
log, handles = [], [1, 1, 2, 2, 1]
waited = lambda stream, other: log.append([stream, "waits for", other])
{STREAMS}
with on_cpu():
    with mock.patch.multiple("torch.cuda", Event=Event, current_stream=lambda *a: Side(handles[0])):
        launches.current_stream_handle = lambda ordinal: handles[0]
        while handles:
            call(backend)
            log.append([config()["stream"], "launches", 0])
            handles.pop(0)
    launches._orders.clear()
print(json.dumps(log))
""")
    one, two = [1, "launches", 0], [2, "launches", 0]
    assert seen == [one, one, [2, "waits for", 1], two, two, [1, "waits for", 2], one]


def test_captures_are_ordered_among_themselves(run):
    """Same streams, other captures: what is captured waits for what that capture holds, and for nothing else."""
    seen = run(f"""
log, calls = [], [(1, 0), (1, 5), (2, 5), (2, 0), (1, 0), (1, 6), (1, 0), (2, 0)]
waited = lambda stream, other: log[-1].append(other)
{STREAMS}
with on_cpu():
    with mock.patch.multiple("torch.cuda", Event=Event, current_stream=lambda *a: Side(handle)):
        launches.current_stream_handle = lambda ordinal: handle
        with mock.patch.object(launches, "_capture_id", lambda stream: capture):
            for handle, capture in calls:
                log.append([handle, capture])
                call(backend)
    launches._orders.clear()
print(json.dumps(log))
""")
    # behind a capture the order of launches outside of it is the user's; within one it is ours
    assert seen == [[1, 0], [1, 5], [2, 5, 1], [2, 0], [1, 0, 2], [1, 6], [1, 0], [2, 0, 1]]


@pytest.mark.parametrize("stream", [0, 0x5000])
def test_tensors_of_a_launch_are_kept_for_its_stream(run, stream):
    """By the allocator: memory that the caller frees behind a launch on a side stream must not be given away."""
    seen = run(f"""
from dataclasses import replace
Stream.cuda_stream = {stream}
from megamoe.formats.quantized import QuantizedRows
kept = []
def note(self, stream):
    kept.append([self.data_ptr(), stream.cuda_stream])
def missing(*tensors):
    found = [[t.data_ptr(), {stream}] in kept for t in tensors]
    kept.clear()
    return found
plain = replace(problem, precision="bf16")
masters = ExpertWeights(**{{n: torch.zeros(s, dtype=d) for n, (s, d) in expected_weights(plain).items()}})
x, count = torch.zeros(5, 272, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)
ids, scores = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(5, 3)
q, scale = torch.zeros(5, 272).to(torch.float8_e4m3fn), torch.ones(5, 3)
launches._orders.clear()
with on_cpu():
    backend, trained = mega.MegaBackend(problem, device="cpu"), mega.MegaBackend(plain, device="cpu")
    backend.prepare(weights)
    trained.prepare(masters)
    with mock.patch.multiple(torch.Tensor, is_cuda=True, record_stream=note, create=True):
        out = torch.zeros_like(x)
        y_of(backend, x, ids, scores, weights, num_tokens_device=count, out=out)
        found = [missing(x, ids, scores, out, count)]
        y_of(backend, QuantizedRows(q, scale), ids, scores, weights)
        found.append(missing(q, scale))
        y, state = trained.forward(Call(x, ids, scores, masters, count), keep=True)
        found.append(missing(x, ids, scores, y, state, count))
        dy = torch.zeros_like(x)
        wanted = Wanted(Needs(b13=False, b2=False))
        dx, d_scores, *_ = trained.backward(Call(x, ids, scores, masters, count), dy, state, wanted)
        found.append(missing(dy, x, ids, state, dx, d_scores, count))
launches._orders.clear()
print(json.dumps(found))
""")
    assert [len(of_call) for of_call in seen] == [5, 2, 6, 7]
    assert {one for of_call in seen for one in of_call} == {bool(stream)}


def test_grids_are_even_and_leave_what_is_reserved(run):
    seen = run("""
grids = []
with on_cpu():
    for reserve in (0, 1, 2, 3, 19, 20, 129, 130):
        backend = mega.MegaBackend(problem, device="cpu", reserve_sms=reserve)
        call(backend)
        grids.append([reserve, config()["grid"][0]])
        backend.close()
print(json.dumps(grids))
""")
    expected = {0: 132, 1: 130, 2: 130, 3: 128, 19: 112, 20: 112, 129: 2, 130: 2}
    assert dict(seen) == expected


def test_statistics_come_from_the_tables_of_the_last_launch(run):
    seen = run("""
with on_cpu():
    window_ = Window(problem, device="cpu")
    layer, other = [mega.MegaBackend(problem, window=window_, pool_rows=2048) for _ in range(2)]
    messages, found = [], []
    def ask(backend):
        try:
            s = backend.statistics()
            found.append([s.tokens_per_expert.tolist(), s.passes.tolist()])
        except MegaMoEError as error:
            messages.append(str(error))
    ask(layer)
    call(layer)
    routes = layer.plan.window["window_routes"].view(window_.memory)
    prefix = layer.plan.views(window_.workspace(layer.plan))["chunk_prefix"]
    prefix[:] = 99
    prefix[:, :3] = torch.tensor([[0, 1000, 1990]] + [[0, 0, 32]] * 6)
    window_.epoch_cell[0] = 7
    routes[0, :, 0], routes[1, :, 0] = 70, 64  # of launch 6, of launch 7
    ask(layer)
    prefix[0, :3] = torch.tensor([0, 900, 1024])
    ask(layer)
    call(other)
    ask(layer)
    window_.close()
print(json.dumps([found, messages]))
""")
    (two, one), messages = seen
    assert two == [[1990] + [32] * 6, [2]]  # 2048 + 6 * 128 rows
    assert one == [[1024] + [32] * 6, [1]]
    assert len(messages) == 2
    assert all("another layer's, or there was none" in text for text in messages)


def test_layers_share_a_window(run):
    seen = run("""
from dataclasses import replace
with on_cpu():
    window = Window(replace(problem, max_tokens=200), device="cpu")
    layers = [mega.MegaBackend(problem, window=window) for _ in range(2)]
    small = mega.MegaBackend(replace(problem, max_tokens=30), window=window, pool_rows=2048)
    workspaces, hashes = [], []
    for layer in (*layers, small):
        call(layer)
        got = argument()
        workspaces.append([got.x_pool, got.max_tokens, got.epoch == window.epoch_address])
        hashes.append(got.config_hash)
    refused = []
    for other in (replace(problem, hidden=256), replace(problem, max_tokens=201), replace(problem, precision="bf16")):
        try:
            mega.MegaBackend(other, window=window)
        except ConfigError as error:
            refused.append(str(error))
    for layer in layers:
        layer.close()
    open_still = not window.closed
    window.close()
    try:
        call(small)
    except WindowBroken as error:
        refused.append(str(error))
print(json.dumps({"workspaces": workspaces, "refused": refused, "open": open_still, "hashes": len(set(hashes))}))
""")
    assert seen["hashes"] == 3, "a layer called in place of its equal would not be noticed"
    first, second, small = seen["workspaces"]
    assert first == second  # equal layers share the workspace, too
    assert small[0] != first[0]
    assert first[1:] == small[1:] == [200, True]
    assert [
        next(
            word
            for word in ("hidden is 256", "max_tokens is 201", "precision is bf16", "closed")
            if word in text
        )
        for text in seen["refused"]
    ] == ["hidden is 256", "max_tokens is 201", "precision is bf16", "closed"]
    assert seen["open"]


def test_bad_calls_are_refused_before_the_launch(run):
    seen = run("""
with on_cpu():
    backend = mega.MegaBackend(problem, device="cpu")
    names = []
    for tokens in (71, 3):
        try:
            x = torch.zeros(tokens, 272, dtype=torch.bfloat16)
            scores = torch.zeros(tokens, 3, dtype=torch.float64 if tokens == 3 else torch.float32)
            y_of(backend, x, torch.zeros(tokens, 3, dtype=torch.int32), scores, weights)
        except ArgumentError as error:
            names.append(error.argument)
    try:
        mega.MegaBackend(problem, device="cpu", reserve_sms=132)
    except ConfigError as error:
        names.append(error.argument)
print(json.dumps([names, number("stub_launches").value, mega.why_not(problem, None, torch.device("cpu"))]))
""")
    assert seen[0] == ["x.shape[0]", "topk_weights.dtype", "reserve_sms"]
    assert seen[1] == 0
    assert "needs a CUDA device" in seen[2]


def test_a_step_is_at_least_a_group(run):
    seen = run("""
with on_cpu():
    try:
        mega.MegaBackend(problem, device="cpu", step_blocks=15)
    except ConfigError as error:
        message = str(error)
    backend = mega.MegaBackend(problem, device="cpu", step_blocks=17)
    call(backend)
print(json.dumps([message, argument().step_blocks, mega.MAX_RUN]))
""")
    assert seen[0] == "step_blocks is 15, expected 0 (automatic) or at least 16"
    assert seen[1] == 17
    order = (ROOT / "csrc" / "megamoe" / "schedule" / "order.h").read_text()
    assert f"constexpr int max_run = {seen[2]};" in order
