"""Whether torch can use the cards that there are, and whether they are well. Pure: facts -> rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.distributed.driver import reinstall, too_old
from pipeline.doctor.driver import Driver
from pipeline.doctor.probe import Answered
from pipeline.doctor.rows import HOST, Fault, Row, Seen, rows_of


def check_driver(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    """Whether torch can use the cards, and whether they are well."""
    faults: list[Fault] = []
    kinds: dict[str, None] = {}
    for host, each in facts.items():
        driver = each["driver"]
        faults += _of_torch(seen, host, driver, each.get("versions", {}))
        faults += _of_cards(seen, host, driver)
        kinds[_named(driver)] = None
    return rows_of("driver", faults, "; ".join(kinds))


def _named(driver: Driver) -> str:
    if driver["nvidia"] is None:
        return "AMD" if driver["amd_cards"] else "no card, no driver"
    known = f", up to CUDA {driver['cuda']}" if driver["cuda"] else ""
    return f"{'WSL2, ' * driver['wsl']}NVIDIA {driver['nvidia']}{known}"


def _of_torch(seen: Seen, host: str, driver: Driver, versions: Mapping[str, str | None]) -> Iterator[Fault]:
    torch, cuda, hip = versions.get("torch"), versions.get("CUDA"), versions.get("ROCm")
    if torch is None:
        return  # told by the versions
    nvidia, cards = driver["nvidia"], driver["cards"]
    if nvidia is None and cards:
        found = f"{cards} NVIDIA card{'s' * (cards > 1)} and no driver"
        install = f"install it on {HOST} (apt-get install nvidia-driver-580), restart, and see nvidia-smi"
        yield Fault(host, "fail" if cuda else "warning", found, install)
    elif nvidia is None and cuda is not None and driver["wsl"]:
        fix = "install NVIDIA's driver in Windows, and none in Linux; then wsl --shutdown"
        yield Fault(host, "warning", f"torch is built for CUDA {cuda}, and WSL2 has no driver", fix)
    elif nvidia is None and cuda is not None and not driver["amd_cards"]:
        found = (
            f"torch is built for CUDA {cuda}, and there is neither card nor driver: it computes on the CPU"
        )
        yield Fault(host, "warning", found, "where there is a card: docker run --gpus all, srun --gpus")
    elif nvidia is not None and driver["problem"] is not None:
        fix = f"restart {HOST}, or load the module of the installed version" + " (modprobe -r nvidia)"
        yield Fault(host, "fail", f"nvidia-smi fails: {driver['problem'][:150]}", fix)
    elif nvidia is not None and cuda is None and driver["given"]:
        install = seen.on_host(f"python -m {reinstall(torch, 'CUDA')}")
        yield Fault(host, "fail", f"driver {nvidia}, and torch {torch} is built without CUDA", install)
    elif nvidia is not None and cuda is not None and (oldest := _oldest(driver, nvidia, cuda)) is not None:
        knows = f" (up to CUDA {driver['cuda']})" if driver["cuda"] else ""
        fix = f"install driver {oldest} or newer on {HOST}, or torch's build of an earlier CUDA"
        yield Fault(host, "fail", f"driver {nvidia}{knows} is too old for torch's CUDA {cuda}", fix)
    elif nvidia is not None and not driver["given"] and not driver["wsl"]:
        found = f"driver {nvidia}, and no /dev/nvidia0: this container or job was given no card"
        yield Fault(host, "warning", found, "docker run --gpus all, srun --gpus, or the like")
    if driver["amd_cards"] and hip is None and nvidia is None:
        fix = f"on {HOST}: {reinstall(torch, 'ROCm')}"
        yield Fault(host, "warning", f"AMD's cards, and torch {torch} is built without ROCm", fix)
    if driver["amd_problem"] is not None and hip is not None:
        fix = seen.on_host("sudo usermod -aG render,video $USER") + "; then log in anew"
        yield Fault(host, "fail", f"/dev/kfd: {driver['amd_problem']}", fix)


def _oldest(driver: Driver, nvidia: str, cuda: str) -> str | None:
    """The driver that is needed, where this one is older. What it says that it knows counts first: a library
    for compatibility may lie beside it.
    """
    if driver["cuda"] is not None and int(driver["cuda"].split(".")[0]) >= int(cuda.split(".")[0]):
        return None
    return too_old(nvidia, cuda)


def _of_cards(seen: Seen, host: str, driver: Driver) -> Iterator[Fault]:
    for gpu in driver["health"]:
        reset = seen.on_host(f"sudo nvidia-smi --gpu-reset -i {gpu['index']}")
        if gpu["uncorrected"].isdigit() and int(gpu["uncorrected"]):
            found = f"GPU {gpu['index']}: {gpu['uncorrected']} uncorrectable ECC errors"
            yield Fault(host, "warning", found, f"{reset}; where they come back, leave it out")
        if gpu["pending"] == "Yes":
            yield Fault(host, "warning", f"GPU {gpu['index']}: pages wait to be retired", reset)
    off = [gpu["index"] for gpu in driver["health"] if gpu["persistence"] == "Disabled"]
    if off and not driver["wsl"]:
        found = f"GPU {', '.join(off)}: no persistence mode, so the driver is loaded anew for each job"
        yield Fault(host, "warning", found, seen.on_host("sudo nvidia-smi -pm 1"))
    if driver["xids"]:
        found = f"the kernel's log has faults of cards, last {driver['xids'][-1]}"
        yield Fault(
            host, "warning", found, seen.on_host("dmesg") + " | grep Xid; 48, 79, 94, 95: leave it out"
        )
