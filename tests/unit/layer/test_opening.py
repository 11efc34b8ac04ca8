"""Opening and closing where something comes in between: other threads, a destroyed group, Ctrl-C."""

import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_hosts import along, be_on_host
from outcomes import outcome

import megamoe
from megamoe.core.errors import ConfigError
from megamoe.layer import layer as layer_module
from megamoe.testing import launch, make_inputs, make_weights

PROBLEM = megamoe.Problem(64, 48, 6, 2, max_tokens=40, precision="fp8")


def test_threads_whose_first_calls_come_at_once_open_once():
    layer, inputs = megamoe.Layer(PROBLEM, "alone", backend="staged"), make_inputs(PROBLEM, 20)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    weights = [make_weights(megamoe.Problem(64, 48, 6, 2), seed=seed) for seed in range(3)]
    expected = [megamoe.Layer(PROBLEM, "alone", backend="staged")(*call, w) for w in weights]
    opened, found, start = [], {}, threading.Barrier(3)
    open_backend = layer_module.open_backend

    def slowly(*given):
        opened.append(given)
        time.sleep(0.1)
        return open_backend(*given)

    def run(number):
        start.wait()
        with torch.no_grad():
            found[number] = layer(*call, weights[number])

    with mock.patch.object(layer_module, "open_backend", slowly):
        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(opened) == 1
    for number, y in enumerate(expected):
        assert torch.equal(found[number], y)


def destroyed(rank):
    layer = megamoe.MegaMoE(64, 48, 6, 2, group=dist.group.WORLD, backend="staged", max_tokens=40)
    layer.prepare()
    dist.destroy_process_group()
    found = [outcome(layer.close) for _ in range(2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for launch()
    return found


def test_close_behind_destroy_process_group_says_what_to_do():
    for found in launch(destroyed, 2):
        for kind, message in found:
            assert kind == "MegaMoEError"
            assert "close() layers before destroy_process_group()" in message


def interrupted(rank):
    be_on_host(rank, 1)
    layer = megamoe.MegaMoE(
        64, 48, 6, 2, group=dist.group.WORLD, backend="reference", max_tokens=40, init_seed=1
    )
    inputs = make_inputs(layer.problem, 20, rank=rank)
    call = inputs.x, inputs.topk_ids, inputs.topk_weights
    with torch.no_grad():
        expected = layer(*call)
        with mock.patch.object(along(layer).inner, "forward", side_effect=KeyboardInterrupt):
            try:
                layer(*call)
            except KeyboardInterrupt:
                stopped = True
        behind = outcome(lambda: layer(*call))
        layer.reset()
        return stopped, behind, torch.equal(layer(*call), expected)


def test_ctrl_c_over_hosts_breaks_the_layer_until_reset():
    for stopped, (kind, message), same in launch(interrupted, 2):
        assert stopped
        assert same
        assert kind == "WindowBroken"
        assert "KeyboardInterrupt stopped a call" in message


@pytest.mark.parametrize("wrong", [["exact"], {"exact"}, {}, "", 0])
def test_an_exchange_of_another_type_is_named(wrong):
    with pytest.raises(ConfigError, match="exchange is .*, expected 'exact' or 'static'"):
        megamoe.Layer(PROBLEM, "alone", exchange=wrong)
