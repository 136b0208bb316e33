"""Devices are chosen with the deepspeed launcher's words; what it takes for something else is refused."""

from __future__ import annotations

import pytest

from pipeline.errors import LaunchError
from pipeline.launching.devices import Selection, choose_devices
from pipeline.launching.hostfile import Host

HOSTS = [Host("a", 2), Host("b", 4), Host("c", 2)]


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        (Selection(), {"a": [0, 1], "b": [0, 1, 2, 3], "c": [0, 1]}),
        (Selection(include="c@a:1"), {"a": [1], "c": [0, 1]}),  # in the hostfile's order: so are the ranks
        (Selection(include="b:2,0@b:3"), {"b": [0, 2, 3]}),
        (Selection(exclude="a@b:0,2"), {"b": [1, 3], "c": [0, 1]}),
        (Selection(num_nodes=2, num_gpus=1), {"a": [0], "b": [0]}),
        (Selection(visible="1,0"), {"a": [1, 0], "b": [1, 0], "c": [1, 0]}),
        (Selection(visible=""), {"a": [0, 1], "b": [0, 1, 2, 3], "c": [0, 1]}),
    ],
)
def test_what_is_chosen(wanted, devices):
    chosen = choose_devices(HOSTS, wanted)
    assert chosen == devices
    assert list(chosen) == list(devices)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Selection(include="d"), "--include d: 'd' is not in the hostfile, but a, b, c"),
        (Selection(include="a:2"), "--include a:2: a has no device 2; the hostfile gives it slots=2, 0 to 1"),
        (Selection(include="a:" + "9" * 5000), "write it as NAME or NAME:0,2"),
        (Selection(include="a:9"), "a has no device 9"),
        (Selection(include="a:9", source="this machine"), "a has no device 9; this machine gives it slots=2"),
        (Selection(include="a:0;1"), "write it as NAME or NAME:0,2"),
        (Selection(include="a:0,0"), "a device is named twice for a"),
        (Selection(include="a", exclude="b"), "--include and --exclude both choose the devices"),
        (Selection(exclude="b", num_gpus=1), "--exclude and --num_nodes/--num_gpus both choose"),
        (Selection(include="a", visible="0"), "--include and CUDA_VISIBLE_DEVICES=0 (of this shell) both"),
        (Selection(exclude="a@b@c"), "leaves no device"),
        (Selection(num_nodes=4), "--num_nodes 4: the hostfile has 3 machines"),
        (Selection(num_gpus=3), "--num_gpus 3: a has slots=2 in the hostfile"),
        (Selection(num_gpus=0), "--num_gpus 0"),
        (Selection(visible="3"), "CUDA_VISIBLE_DEVICES=3: a has no device 3"),
        (Selection(visible="GPU-8a1f"), "devices are chosen by number"),
    ],
)
def test_what_is_refused(wanted, message):
    with pytest.raises(LaunchError) as caught:
        choose_devices(HOSTS, wanted)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
