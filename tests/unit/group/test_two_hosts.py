"""Two nodes of torchrun's launcher that call themselves two hosts: what "auto" does, and EP inside a host."""

import json
import logging
import os
import socket

import pytest
import torch
import torch.distributed as dist
from programs import fresh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from megamoe import ConfigError, MegaMoE, UnreachablePeer
from megamoe.backends.select import make_backend
from megamoe.group.hosts import Hosts, spans_hosts
from megamoe.testing import assert_close, make_inputs
from megamoe.window.window import Window

SHAPE = {"hidden": 48, "intermediate": 32, "num_experts": 6, "top_k": 2, "max_tokens": 16}
SHAPE |= {"activation": "relu2", "init_seed": 1}
TOKENS = 9
ROUNDED_ONCE_MORE = 4e-3  # gradients in bf16: one rank adds up four runs, or DDP two replicas


def exact(layer):
    """Let all sums of forward be exact in fp32, so that y has equal bits wherever its rows are multiplied."""
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_((16 * p).round() / 16)
    return layer


def gradients(layer, runs):
    """Return y of all runs and the gradients of the parameters, summed over them."""
    ys = []
    for x, ids, weights in runs:
        ys.append(layer(x, ids, weights))
        ys[-1].float().square().sum().backward()
    return [y.detach() for y in ys], [p.grad for p in layer.parameters()]


def own_experts(layer, whole):
    begin = layer.problem.expert_begin(layer.problem.rank)
    return whole[begin : begin + layer.problem.num_local_experts(layer.problem.rank)]


def program(folder):
    """One rank of four, two on each host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    alone = exact(MegaMoE(**SHAPE, backend="staged"))
    inputs = [make_inputs(alone.problem, TOKENS, rank=r) for r in range(4)]
    runs = [((4 * i.x).round() / 4, i.topk_ids, i.topk_weights) for i in inputs]
    expected_y, expected_gradients = gradients(alone, runs)

    # experts over both hosts: torch.distributed carries it
    logging.basicConfig(filename=folder / f"log{rank}")
    wide = exact(MegaMoE(**SHAPE, group=dist.group.WORLD))
    (y,), own = gradients(wide, [runs[rank]])
    chosen = make_backend("auto", wide.problem, dist.group.WORLD, device="cpu")
    found["backend"] = type(chosen).__name__
    assert y.float().norm() > 1
    assert torch.equal(y, expected_y[rank])
    for got, whole in zip(own, expected_gradients, strict=True):
        assert_close(got, own_experts(wide, whole), relative=ROUNDED_ONCE_MORE)
    try:
        Window(wide.problem, dist.group.WORLD, device="cpu")
    except UnreachablePeer as error:
        found["refused"] = str(error)
    wide.close()

    # experts inside a host, replicas of them on the other host
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "experts"))
    layer = exact(MegaMoE(**SHAPE, group=mesh.get_group("experts"), backend="staged"))
    replicated = DistributedDataParallel(layer, process_group=mesh.get_group("hosts"))
    replicated(*runs[rank]).float().square().sum().backward()
    for p, whole in zip(layer.parameters(), expected_gradients, strict=True):
        assert_close(
            p.grad, own_experts(layer, whole) / 2, relative=ROUNDED_ONCE_MORE
        )  # DDP averages
    layer.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def node(index, folder):
    """One of two hosts, as torchrun makes it: an agent, and the ranks that it starts."""
    config = LaunchConfig(
        min_nodes=2,
        max_nodes=2,
        nproc_per_node=2,
        run_id="two hosts",
        rdzv_backend="static",
        rdzv_endpoint=folder.joinpath("endpoint").read_text(),
        rdzv_configs={"rank": index, "timeout": 120},
        start_method="fork",  # they need not import torch again
        monitor_interval=0.1,
    )
    os.environ.update(MEGAMOE_HOST=f"host-{'ab'[index]}", GLOO_SOCKET_IFNAME="lo")
    elastic_launch(config, program)(folder)


def test_layers_compute_the_same_on_two_hosts(tmp_path):
    """The program compares y and gradients with one rank's; here: every rank came to its end, through staged."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "endpoint").write_text(f"127.0.0.1:{probe.getsockname()[1]}")
    nodes = [fresh(node, index, tmp_path) for index in range(2)]
    for process in nodes:
        process.start()
    for process in nodes:
        process.join(200)
    assert [process.exitcode for process in nodes] == [0, 0]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [f["backend"] for f in found] == ["StagedBackend"] * 4
    assert len({f["refused"] for f in found}) == 1
    assert 'use backend="staged"' in found[0]["refused"]
    # "auto" says once why it is staged
    texts = [(tmp_path / f"log{rank}").read_text() for rank in range(4)]
    assert texts[1:] == ["", "", ""]
    assert texts[0].count("not mega") == 1
    assert "the group spans 2 hosts" in texts[0]
    assert "ranks 0, 1 on host-a; 2, 3 on host-b" in texts[0]
    assert 'backend="mega" by name runs inside each' in texts[0]


def test_hosts_have_as_many_ranks_side_by_side():
    found = Hosts.of(["a", "a", "b", "b"])
    assert (found.names, found.per_host) == (("a", "b"), 2)
    assert [found.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Hosts.of(["a"] * 3) == Hosts(("a",), 3)
    assert Hosts.of(["a"] * 4, 2) == Hosts(("a #0", "a #1"), 2)
    assert Hosts.of(["a", "b"] * 1, 2) == Hosts(("a", "b"), 1)
    for names in (
        ["a", "a", "b"],
        ["a", "b", "a", "b"],
        ["a", "b", "b", "a"],
        ["a", "b", "c", "c"],
    ):
        with pytest.raises(ConfigError, match="expected as many ranks on each host, host by host"):
            Hosts.of(names)
    with pytest.raises(
        ConfigError, match="2 on b, expected rows of 2 ranks of one host each, as t"
    ):
        Hosts.of(["a", "a", "b", "a"], 2)
    with pytest.raises(ConfigError, match="ranks 0..2 on a, expected rows of"):
        Hosts.of(["a"] * 3, 2)


def test_hosts_are_told_apart_by_their_names():
    assert spans_hosts(["a"] * 4) is None
    text = spans_hosts(["a", "a", "a", "b", "c", "b"])
    assert text.endswith("(ranks 0..2 on a; 3, 5 on b; 4 on c)")
    text = spans_hosts(["a", "a", "b", "a"])
    assert text.endswith("(ranks 0, 1, 3 on a; 2 on b)")
