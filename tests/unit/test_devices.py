"""What slots a host offers, and why not more."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nbdist import gpus
from nbdist.gpus import (
    Gpus,
    count_gpus,
    default_num_engines,
    num_cores,
    own_use,
    visible_names,
)
from nbdist.protocol.ids import Slot
from nbdist.supervisor import devices
from nbdist.supervisor.devices import SlotDevice, engine_environment, offered_slots


class NVMLError(Exception):
    """Stands for pynvml's."""


def fake_nvml(count=0, *, error=None):
    def init():
        if error:
            raise NVMLError(error)

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
    )


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Sets the number of GPUs that the driver tells, and no quota of cores."""
    monkeypatch.setattr(gpus, "_CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(gpus, "_FIRST_GPU", tmp_path / "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda nvml: monkeypatch.setitem(sys.modules, "pynvml", nvml)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        (" 1 , 02", ("1", "2")),
        ("0,7,1", ("0",)),
        ("0,-1,1", ("0",)),
        ("1,1", ()),
        ("GPU-8f3a,GPU-11", ("GPU-8f3a", "GPU-11")),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(value, names):
    """The list ends at the first entry that means nothing; a repeated one spoils it."""
    assert visible_names(3, value) == names


def test_gpus_are_counted_and_named(host):
    """Each GPU of the driver has a name for CUDA_VISIBLE_DEVICES, and no reason is given."""
    host(fake_nvml(2))
    assert count_gpus() == Gpus(names=("0", "1"))
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == Gpus(names=("1",))


@pytest.mark.parametrize(
    ("nvml", "environ", "reason"),
    [
        (None, {}, "no NVIDIA device"),
        (fake_nvml(error="Driver Not Loaded"), {}, "Driver Not Loaded"),
        (fake_nvml(0), {}, "has no GPU"),
        (fake_nvml(2), {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides all 2"),
    ],
)
def test_absent_gpus_have_a_reason(host, nvml, environ, reason):
    """Where there are none, the count says why."""
    host(nvml)
    found = count_gpus(environ)
    assert found.count == 0
    assert reason in found.reason


def test_gpus_without_the_package_that_counts_them_are_not_passed_over_in_silence(host):
    """A device file without nvidia-ml-py is a reason of its own."""
    host(None)
    gpus._FIRST_GPU.touch()
    assert "nvidia-ml-py is not installed" in count_gpus().reason


def test_engines_by_default_are_gpus_or_else_cores(host):
    """One engine for each GPU, or one for each core."""
    host(fake_nvml(3))
    assert default_num_engines() == 3
    host(None)
    assert default_num_engines() == num_cores() >= 1


@pytest.mark.parametrize("cuda", [None, SimpleNamespace(is_initialized=lambda: False)])
def test_a_notebook_without_a_gpu_of_its_own_is_not_warned(monkeypatch, cuda):
    """It has not loaded torch, or has, and computed on the CPU."""
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert own_use() == ()


def test_a_notebook_that_holds_gpu_memory_is_told(monkeypatch):
    """accelerate#182, #3925: CUDA in the kernel breaks nothing, since it is never forked; but it
    takes memory from the engines."""
    held = {0: 3 * 2**20, 1: 2**20}
    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=held.__getitem__
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    (text,) = own_use()
    assert "4 MiB" in text


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("", 8)]
)
def test_cores_are_those_of_the_control_group(host, monkeypatch, quota, cores):
    """A container's quota counts, not the host's cores."""
    host(None)
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    gpus._CPU_QUOTA.write_text(quota)
    assert num_cores() == cores


def offer(monkeypatch, names, *args, reason="no NVIDIA device"):
    found = Gpus(names=names) if names else Gpus(reason=reason)
    monkeypatch.setattr(devices, "count_gpus", lambda _environ: found)
    return offered_slots(*args)


def test_without_gpus_every_slot_is_a_cpu(monkeypatch):
    """CPU slots are not limited, and hide any GPU from torch."""
    slots = offer(monkeypatch, (), 5)
    assert [slot.slot for slot in slots] == list(range(5))
    assert {(slot.gpu, slot.label, slot.visible) for slot in slots} == {(None, "cpu", "")}


def test_gpus_are_given_out_in_order(monkeypatch):
    """Slot i has GPU i, pinned by the name that CUDA knows it by."""
    slots = offer(monkeypatch, ("4", "6", "7"), 2)
    assert slots == [
        SlotDevice(slot=Slot(0), gpu=0, visible="4"),
        SlotDevice(slot=Slot(1), gpu=1, visible="6"),
    ]
    assert [slot.label for slot in slots] == ["cuda:0", "cuda:1"]


def test_named_devices_are_given_out_as_named(monkeypatch):
    """devices= says which GPU each slot has."""
    slots = offer(monkeypatch, ("0", "1", "2", "3"), 2, (3, 1))
    assert [(slot.slot, slot.gpu, slot.visible) for slot in slots] == [(0, 3, "3"), (1, 1, "1")]


@pytest.mark.parametrize(
    ("names", "args", "message"),
    [
        (("0", "1"), (3,), "3 engines, one GPU each, but there are 2 GPUs; start at most 2"),
        (("0",), (2,), "there is 1 GPU;"),
        (("0", "1"), (2, (0, 2)), r"devices=\[0, 2\]: no GPU 2; there are 2 GPUs"),
        (("0", "1"), (1, (-1,)), "no GPU -1"),
        ((), (1, (0,)), r"devices=\[0\]: there is no GPU to use: no NVIDIA device"),
    ],
)
def test_more_gpus_than_there_are_is_an_error_with_the_count(monkeypatch, names, args, message):
    """The message names what was asked for and what there is."""
    with pytest.raises(ValueError, match=message):
        offer(monkeypatch, names, *args)


def test_an_engines_environment_pins_device_threads_and_interface():
    """What torch, OpenMP, MKL and gloo read."""
    wanted = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "lo"}
    gpu = SlotDevice(slot=Slot(0), gpu=1, visible="5")
    assert engine_environment(gpu, 3) == {**wanted, "CUDA_VISIBLE_DEVICES": "5"}
    assert engine_environment(SlotDevice(slot=Slot(0)), 3) == {**wanted, "CUDA_VISIBLE_DEVICES": ""}
