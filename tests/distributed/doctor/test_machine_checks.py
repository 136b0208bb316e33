"""The checks that a machine makes of itself: each fault is named with what to do."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import asdict, replace
from pathlib import PosixPath
from types import SimpleNamespace

import pytest

from pipeline.distributed.doctor import machine_checks, probe
from pipeline.distributed.doctor.machine_checks import (
    CHECKS,
    MachineQuestion,
    check_driver,
    read_gpus,
    read_source_and_versions,
)
from pipeline.distributed.doctor.probe import run_checks
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER

GIB = 1 << 30
HERE = read_source_and_versions()
SMI = """#!/bin/sh
case "$*" in
*query*)
    echo "0, H100, 81920, 4, GPU-a, 0"
    echo "1, H100, 81920, {used}, GPU-b, {errors}" ;;
*) echo "{said}"; exit {code} ;;
esac
"""
KNOWS_13 = "| NVIDIA-SMI 580.65   Driver Version: 580.65.06   CUDA Version: 13.0 |"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  x\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A question of a machine on which all is well, and its folder of programs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    for name in ("CUDA_VISIBLE_DEVICES", "CXX"):
        monkeypatch.delenv(name, raising=False)
    folders = [str(tmp_path / "runs" / "a"), str(tmp_path / "cache")]
    return MachineQuestion(token="t", host="b", hosts=["a", "b"], folders=folders, launching_machine=HERE)


def add_program(folder, name, text):
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def add_gpus(folder, said=KNOWS_13, code=0, used=4, errors="[N/A]"):
    add_program(folder, "nvidia-smi", SMI.format(said=said, code=code, used=used, errors=errors))


def the_fault(finding):
    (fault,) = finding.faults
    return fault


def test_a_well_machine_has_no_faults(machine, tmp_path):
    assert list(CHECKS)[:3] == ["project", "versions", "devices"]
    for name, check in CHECKS.items():
        finding = check(machine)
        assert not [fault for fault in finding.faults if fault.status == "fail"], name
        assert finding.ok_text
    assert [path.name for path in tmp_path.iterdir()] == [".doctor-t-b"]


@pytest.mark.parametrize(
    ("check", "here", "status", "found", "fix"),
    [
        ("project", {"commit": "b" * 40}, "fail", "machine has bbbbbbbbbb", "rsync -a --delete"),
        ("project", {"digest": "e"}, "fail", "source files differ from the launching machine's", "<host>:"),
        (
            "versions",
            {"python": "2.7.1"},
            "fail",
            "machine has 2.7.1",
            "environment on <host> with Python 2.7.1",
        ),
        ("versions", {"python": "3.{minor}.99"}, "warning", ".99", ""),
        ("versions", {"torch": "2.0"}, "fail", "machine has 2.0", "-m pip install torch==2.0"),
        ("versions", {"NCCL": "2.0"}, "fail", "machine has 2.0", "same torch"),
        ("versions", {"transformers": "4.0"}, "warning", "machine has 4.0", "ssh <host> "),
    ],
)
def test_another_source_or_version_than_here(machine, check, here, status, found, fix):
    here = {name: text.format(minor=sys.version_info.minor) for name, text in here.items()}
    fault = the_fault(CHECKS[check](replace(machine, launching_machine=HERE | here)))
    assert fault.status == status
    assert found in fault.description
    assert fix in fault.fix


def test_without_git_the_files_decide_and_a_missing_torch_is_named(machine, monkeypatch):
    assert (
        CHECKS["project"](replace(machine, launching_machine=HERE | {"commit": None})).ok_text
        == "same source files"
    )
    monkeypatch.setattr(machine_checks, "read_versions", lambda: HERE | {"torch": None})
    fault = the_fault(CHECKS["versions"](replace(machine, is_remote=False)))
    assert fault.description == "torch is not installed"
    assert fault.fix == f"{sys.executable} -m pip install torch=={HERE['torch']}"


@pytest.mark.parametrize(
    ("devices", "gpus", "status", "found", "fix"),
    [
        ([0, 1], {}, None, "", ""),
        (None, {}, None, "", ""),
        ([0, 2], {}, "fail", "device 2 is requested, but the machine has 2 GPUs", "<host> slots=2"),
        ([0], {"used": 60_000}, None, "", ""),  # another one's
        (None, {"used": 60_000}, "fail", "GPU 1: 58.59 GiB of 80.00 GiB is in use", "ssh <host> nvidia-smi"),
        (None, {"used": 10_240}, "warning", "GPU 1: 10.00 GiB of 80.00 GiB is in use", "end it"),
        (None, {"errors": 3}, "warning", "GPU 1: 3 uncorrectable ECC errors", "--gpu-reset -i 1"),
        (list(range(9999)), None, "warning", "9999 slots share ", "slots="),
    ],
)
def test_devices(machine, tmp_path, devices, gpus, status, found, fix):
    if gpus is not None:
        add_gpus(tmp_path, **gpus)
    finding = CHECKS["devices"](replace(machine, devices=devices))
    assert ("2 x H100" if gpus is not None else " cores") in finding.ok_text
    assert [fault.status for fault in finding.faults] == ([status] if status else [])
    if status:
        assert found in the_fault(finding).description
        assert fix in the_fault(finding).fix


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, "01"), ("1,0", "10"), ("", ""), ("1,7,0", "1"), ("GPU-b", "1"), (" 0 , 1", "01")],
)
def test_visible_gpus(machine, tmp_path, monkeypatch, visible, indices):
    add_gpus(tmp_path)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["index"] for gpu in read_gpus()] == list(indices)


@pytest.mark.parametrize(
    ("driver", "smi", "cuda", "status", "found", "fix"),
    [
        ("580.65.06", {}, "13.0", None, "", ""),
        ("570.86.15", {"said": "CUDA Version: 12.8"}, "13.0", "fail", "is too old for torch's CUDA", "580"),
        ("550.54.15", {}, "13.0", None, "", ""),  # a library for compatibility
        (
            "580.65.06",
            {"said": "NVML: mismatch", "code": 9},
            "13.0",
            "fail",
            "nvidia-smi fails: NVML",
            "restart",
        ),
        ("580.65.06", {}, None, "fail", "is a CPU build", "on <host>: pip install --force-reinstall torch=="),
        (None, None, "13.0", "warning", "but there is no GPU", "docker run --gpus all"),
    ],
)
def test_driver(machine, tmp_path, monkeypatch, driver, smi, cuda, status, found, fix):
    versions = {"torch": "2.13.0", "CUDA": cuda, "ROCm": None}
    monkeypatch.setattr(machine_checks, "read_versions", lambda: versions)
    root = tmp_path / "root"
    if driver is not None:
        for name, text in {"dev/nvidia0": "", "proc/driver/nvidia/version": DRIVER.format(driver)}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        add_gpus(tmp_path, **smi)
    add_program(tmp_path, "dmesg", "#!/bin/sh\n")
    finding = check_driver(machine, root)
    assert driver is None or f"NVIDIA {driver}" in finding.ok_text
    assert [fault.status for fault in finding.faults] == ([status] if status else [])
    if status:
        assert found in the_fault(finding).description
        assert fix in the_fault(finding).fix


def test_faults_of_cards_in_the_kernels_log(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "read_versions", lambda: {"torch": None})
    line = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, fallen off the bus"
    add_program(tmp_path, "dmesg", f"#!/bin/sh\necho '{line}'\n")
    fault = the_fault(check_driver(machine, tmp_path / "root"))
    assert fault.description.endswith("last one Xid (PCI:0000:3b:00): 79")
    assert "grep Xid" in fault.fix


@pytest.mark.parametrize(
    ("free", "status", "found"),
    [(8 * GIB, None, ""), (3 * GIB, "warning", "3.00 GiB free for 2 ranks"), (GIB, "fail", "1.00 GiB free")],
)
def test_memory(machine, monkeypatch, free, status, found):
    monkeypatch.setattr(machine_checks, "available_memory", lambda: free)
    finding = CHECKS["memory"](replace(machine, devices=[0, 1]))
    assert [fault.status for fault in finding.faults] == ([status] if status else [])
    assert all(found in fault.description and "ssh <host> ps" in fault.fix for fault in finding.faults)


@pytest.mark.parametrize(
    ("path", "free", "files", "status", "found", "fix"),
    [
        ("runs", 1 << 20, 9999, "fail", "1 MiB free", "ssh <host> df -h"),
        ("runs", 5 * GIB, 9999, "warning", "5.00 GiB free", "make room"),
        ("/dev/shm", 60 << 20, 9999, "fail", "/dev/shm: 60 MiB free", "--shm-size"),
        ("/tmp", 5 * GIB, 3, "fail", "/tmp: room for only 3 more files", "ssh <host> df"),
    ],
)
def test_disk(machine, monkeypatch, path, free, files, status, found, fix):
    def state(folder):
        is_it = str(folder).startswith(path)
        sizes = (free, files) if is_it else (500 * GIB, 9999)
        return SimpleNamespace(f_bavail=sizes[0], f_frsize=1, f_files=10_000, f_favail=sizes[1])

    monkeypatch.setattr(machine_checks, "find_existing_folder", lambda folder: folder)
    monkeypatch.setattr(machine_checks.os, "statvfs", state)
    fault = the_fault(CHECKS["disk"](replace(machine, folders=["runs"])))
    assert fault.status == status
    assert found in fault.description
    assert fix in fault.fix


def test_a_folder_that_cannot_be_written(machine, tmp_path):
    (tmp_path / "file").touch()
    folders = [str(tmp_path / "a"), str(tmp_path / "file")]
    fault = the_fault(CHECKS["folders"](replace(machine, folders=folders)))
    assert fault.description == f"{tmp_path}/file cannot be written: Not a directory"
    assert f"ls -ld {tmp_path}/file" in fault.fix


@pytest.mark.parametrize(
    ("ops", "missing", "status", "found"),
    [
        ([], "c++", None, ""),
        (None, "c++", "warning", "no C++ compiler for DeepSpeed's CPU Adam"),
        ([CPU_ADAM], "c++", "warning", "no C++ compiler for DeepSpeed's CPU Adam"),
        ([ASYNC_IO], "c++", "fail", "no C++ compiler for DeepSpeed's async_io"),
        ([ASYNC_IO], "libaio.h", "fail", "no libaio for DeepSpeed's async_io"),
        ([QUANTIZER], "nvcc", "fail", "no nvcc for DeepSpeed's quantizer (ZeRO++)"),
        ([CPU_ADAM], "nvcc", None, ""),
    ],
)
def test_a_run_is_asked_for_the_ops_that_it_needs(
    machine, tmp_path, monkeypatch, ops, missing, status, found
):
    class There(PosixPath):
        def exists(self):
            return self.name != missing

    monkeypatch.setattr(machine_checks, "Path", There)
    monkeypatch.setattr(
        machine_checks.shutil, "which", lambda name, path=None: None if name == missing else name
    )
    labels = None if ops is None else [op.label for op in ops]
    finding = CHECKS["native ops"](replace(machine, ops=labels))
    assert [(fault.status, fault.description) for fault in finding.faults] == (
        [(status, found)] if status else []
    )
    for op in ops or []:
        for name in op.folders:
            (tmp_path / "ops" / name).mkdir(parents=True)
            (tmp_path / "ops" / name / f"{name}.so").touch()
    if ops:
        assert not CHECKS["native ops"](replace(machine, ops=labels)).faults, "they are built"


def test_a_network_that_cannot_be_read_is_a_fault(machine, monkeypatch):
    def fail(names, port):
        raise OSError("no interfaces")

    monkeypatch.setattr(probe.network, "read_network", fail)
    answer = probe.Probe().examine(asdict(machine), lambda step: None)
    assert answer["network"] is None
    (fault,) = answer["findings"]["network"]["faults"]
    assert fault["description"] == "could not be checked: OSError: no interfaces"


@pytest.mark.slow
def test_a_check_that_fails_or_takes_too_long_is_a_fault():
    gate = threading.Event()
    steps = []
    checks = {"a": lambda: 1, "b": gate.wait, "c": lambda: {}["x"]}
    found = run_checks(checks, 2.5, steps.append)
    gate.set()
    assert found["a"] == 1
    assert the_fault(found["b"]).description == "could not be checked: no answer within 2.5 s"
    assert "file server" in the_fault(found["b"]).fix
    assert the_fault(found["c"]).description == "could not be checked: KeyError: 'x'"
    assert steps[0] == "a, b, c"
    assert steps[-1] == "b", "what is waited for is said"
