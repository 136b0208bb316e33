"""What the doctor says of drivers and cards, by their facts, and how it reads them."""

from __future__ import annotations

import os

import pytest
from distributed.doctor.machines import bad, here, seen, well

from pipeline.distributed.doctor.checks import check_machines
from pipeline.distributed.doctor.facts import read_driver

GOOD = {"index": "0", "persistence": "Enabled", "uncorrected": "0", "pending": "No"}
NEW = {"given": True, "nvidia": "580.65.06", "cuda": "13.0", "health": [GOOD]}
SMI = r"""#!/bin/sh
case "$*" in
*query*) echo "0, Enabled, 0, No"; echo "1, Disabled, 3, Yes" ;;
*) echo "| NVIDIA-SMI 570.86   Driver Version: 570.86.15   CUDA Version: 12.8 |" ;;
esac
"""


def told(driver, **versions):
    facts, of_here = well(["a"]), here()
    for each in (facts["a"], of_here):
        each["versions"] |= versions
    facts["a"]["driver"] |= driver
    return bad(check_machines(seen(facts, here=of_here)))


@pytest.mark.parametrize(
    ("driver", "versions", "status", "found", "fix"),
    [
        ({"cards": 2}, {"CUDA": "13.0"}, "fail", "2 NVIDIA cards and no driver", "nvidia-driver-580"),
        ({"cards": 1}, {}, "warning", "1 NVIDIA card and no driver", "nvidia-driver-580"),
        ({}, {"CUDA": "13.0"}, "warning", "CUDA 13.0, and there is neither card nor driver", "--gpus all"),
        ({"wsl": True}, {"CUDA": "13.0"}, "warning", "WSL2 has no driver", "driver in Windows"),
        (
            NEW,
            {},
            "fail",
            "torch 2.13.0 is built without CUDA",
            "pip install --force-reinstall torch==2.13.0",
        ),
        (
            NEW | {"nvidia": "570.86.15", "cuda": "12.8"},
            {"CUDA": "13.0"},
            "fail",
            "driver 570.86.15 (up to CUDA 12.8) is too old for torch's CUDA 13.0",
            "driver 580 or newer",
        ),
        (
            NEW | {"problem": "Failed to initialize NVML: Driver/library version mismatch"},
            {"CUDA": "13.0"},
            "fail",
            "nvidia-smi fails: Failed to initialize NVML",
            "restart a",
        ),
        (NEW | {"given": False}, {"CUDA": "13.0"}, "warning", "was given no card", "docker run --gpus all"),
        ({"amd_cards": 1}, {}, "warning", "AMD's cards, and torch 2.13.0 is built without ROCm", "for ROCm"),
        (
            {"amd_cards": 1, "amd_problem": "Permission denied"},
            {"ROCm": "7.0"},
            "fail",
            "/dev/kfd: Permission denied",
            "usermod -aG render,video",
        ),
        (
            NEW | {"health": [GOOD | {"uncorrected": "3"}]},
            {"CUDA": "13.0"},
            "warning",
            "GPU 0: 3 uncorrectable ECC errors",
            "--gpu-reset -i 0",
        ),
        (
            NEW | {"health": [GOOD | {"pending": "Yes"}]},
            {"CUDA": "13.0"},
            "warning",
            "pages wait to be retired",
            "--gpu-reset",
        ),
        (
            NEW | {"health": [GOOD | {"persistence": "Disabled"}]},
            {"CUDA": "13.0"},
            "warning",
            "no persistence mode",
            "nvidia-smi -pm 1",
        ),
        (
            NEW | {"xids": ["Xid (PCI:0000:3b:00): 79"]},
            {"CUDA": "13.0"},
            "warning",
            "last Xid (PCI:0000:3b:00): 79",
            "grep Xid",
        ),
    ],
)
def test_one_fault(driver, versions, status, found, fix):
    (row,) = told(driver, **versions)
    assert (row.check, row.status) == ("driver", status)
    assert found in row.found
    assert fix in row.fix
    assert "://" not in row.fix


def test_what_is_well():
    assert not told(NEW, CUDA="13.0")
    assert not told(NEW | {"cuda": "13.0", "nvidia": "550.54.15"}, CUDA="13.0"), "a library for compatibility"
    assert not told(NEW, CUDA="12.8")
    na = GOOD | {"uncorrected": "[N/A]", "pending": "[N/A]", "persistence": "[N/A]"}
    assert not told(NEW | {"health": [na]}, CUDA="13.0")


def test_it_is_read_from_the_tools_and_files_there_are(tmp_path, monkeypatch):
    programs = {
        "nvidia-smi": SMI,
        "dmesg": "#!/bin/sh\necho '[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, fallen off the bus'\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    driver = read_driver(tmp_path / "root")
    assert (driver["nvidia"], driver["cuda"], driver["problem"]) == ("570.86.15", "12.8", None)
    assert driver["health"] == [
        {"index": "0", "persistence": "Enabled", "uncorrected": "0", "pending": "No"},
        {"index": "1", "persistence": "Disabled", "uncorrected": "3", "pending": "Yes"},
    ]
    assert driver["xids"] == ["Xid (PCI:0000:3b:00): 79"]
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho Failed to initialize NVML; exit 9\n")
    version = tmp_path / "root" / "proc" / "driver" / "nvidia" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  x\n")
    driver = read_driver(tmp_path / "root")
    assert (driver["nvidia"], driver["problem"]) == ("580.65.06", "Failed to initialize NVML")
