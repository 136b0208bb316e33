"""Checks of the machines and of the network between them: facts -> rows. Pure."""

from __future__ import annotations

import ipaddress
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from pipeline.distributed.doctor.facts import Driver, Ops
from pipeline.distributed.doctor.network_facts import Connection, Network
from pipeline.distributed.doctor.probe import Answered
from pipeline.distributed.doctor.rows import HOST, Fault, Row, Seen, Status, rows_of
from pipeline.distributed.doctor.session import STEPS, Measured, SilentError
from pipeline.distributed.launch.ssh import NO_FOLDER, NO_PYTHON
from pipeline.distributed.machine import reinstall, too_old
from pipeline.distributed.op_builds import ASYNC_IO, CPU_ADAM, QUANTIZER, NativeOp
from pipeline.files import GIB, format_bytes

MEMORY_A_RANK = (1 * GIB, 2 * GIB)
"""Bytes below which there is a failure, a warning: torch and DeepSpeed alone take about one."""
DISK = (1 * GIB, 10 * GIB)
SMALL_DISK = {"/tmp": (GIB // 4, GIB), "/dev/shm": (GIB // 16, GIB)}
"""NCCL and the loader's workers exchange through /dev/shm; containers often get 64 MiB of it."""
CLOCK = (2.0, 0.5)
"""Seconds."""
MUST_AGREE = ("torch", "CUDA", "ROCm", "NCCL", "deepspeed")


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


def silence(host: str, error: SilentError, folder: Path, python: str) -> Row:
    """Why a host did not answer, by what ssh said."""
    said = error.said
    known = {
        "Permission denied": ("asks for a password, or refuses the key", f"ssh-copy-id {host}"),
        "Host key verification failed": (
            "its host key is not known here",
            f"compare the fingerprint, then: ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
        ),
        "Could not resolve hostname": (
            "unknown host",
            f"correct the name in the hostfile, or give {host} an address in /etc/hosts or ~/.ssh/config",
        ),
        "Connection refused": ("no ssh server answers", f"start it there: systemctl start ssh; on {host}"),
        "timed out": ("does not answer", f"is {host} up? ping {host}; open port 22 in its firewall"),
        "No route to host": ("there is no way to it", f"is {host} up and on this network? ping {host}"),
        "No module named": (
            f"{python} lacks a package of the project: {said.rpartition('named ')[2].splitlines()[0]}"
            if "named " in said
            else "",
            f"ssh {host} 'cd {folder} && {python} -m pip install -e .'",
        ),
    }
    check = "ssh" if error.code in (None, 255) else "python"
    found, fix = next((meaning for words, meaning in known.items() if words in said), ("", ""))
    if error.code == NO_FOLDER:
        check, found, fix = "folder", f"no folder {folder}", f"rsync -a {folder}/ {host}:{folder}/"
    elif error.code == NO_PYTHON:
        found, fix = f"no program {python}", f"make the same environment on {host}, at the same path"
    elif not found:
        last = (said.splitlines() or ["it said nothing"])[-1]
        found = last if error.code is None else f"ended with code {error.code}: {last}"
        fix = f"try it by hand: ssh {host} {python} -c pass"
    return Row(check, "fail", found, fix, (host,))


def check_machines(seen: Seen) -> list[Row]:
    """Everything that can be said without the network between the hosts."""
    rows = []
    for needs, check in CHECKS.items():
        if needs == "ops" and seen.wanted.ops is not None and not seen.wanted.ops:
            continue  # nothing in the run needs them
        faults, known = [], {}
        for host, told in seen.facts.items():
            if needs in told:
                known[host] = told
            else:
                reason = told["unknown"].get(needs, "not asked")
                look = "a file server or name server that is gone" if "no answer" in reason else "the machine"
                fix = f"look for {look} on {HOST}"
                faults.append(Fault(host, "fail", f"could not be found out: {reason}", fix))
        rows += rows_of(needs, faults, "") if faults else []
        if known:
            rows += check(seen, known)
    return rows


def _project(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    here = seen.here["project"]
    root = Path(__file__).parents[3]
    faults = []
    for host, each in facts.items():
        there = each["project"]
        if there["commit"] != here["commit"] and None not in (there["commit"], here["commit"]):
            found = f"commit {_short(there['commit'])}, here {_short(here['commit'])}"
        elif there["digest"] != here["digest"]:
            found = "other source files than here, at the same commit"
        else:
            continue
        fix = f"rsync -a --delete --exclude runs {root}/ {HOST}:{root}/"
        faults.append(Fault(host, "fail", found, fix))
    fine = f"commit {_short(here['commit'])}" if here["commit"] else "the same files"
    return rows_of("project", faults, fine)


def _short(commit: str | None) -> str:
    return (commit or "none")[:10]


def _versions(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    here = seen.here["versions"]
    faults = []
    for host, each in facts.items():
        for name, version in each["versions"].items():
            wanted = here.get(name)
            install = seen.on_host(f"{sys.executable} -m pip install {name.lower()}=={wanted}")
            if version is None and name in ("torch", "deepspeed"):
                faults.append(Fault(host, "fail", f"no {name}", install))
            elif version != wanted:
                minor = [str(v).rpartition(".")[0] for v in (version, wanted)]
                serious = name in MUST_AGREE or (name == "python" and minor[0] != minor[1])
                fix = {
                    "python": f"make the environment on {HOST} with Python {wanted}",
                    "CUDA": f"install the torch of CUDA {wanted} on {HOST}",
                    "ROCm": f"install the torch of ROCm {wanted} on {HOST}",
                    "NCCL": f"install the same torch on {HOST}, with what it depends on",
                }.get(name, install)
                found = f"{name} {version}, here {wanted}"
                faults.append(Fault(host, "fail" if serious else "warning", found, fix))
    return rows_of("versions", faults, ", ".join(f"{k} {v}" for k, v in here.items() if v is not None))


def _devices(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    faults = []
    some_gpu = any(each["devices"]["gpus"] for each in facts.values())
    kinds: Counter[str] = Counter()
    for host, each in facts.items():
        gpus, cores, wanted = each["devices"]["gpus"], each["devices"]["cores"], seen.wanted.devices[host]
        kinds[f"{len(gpus)} x {gpus[0]['name']}" if gpus else f"{cores} cores"] += 1
        slots, highest = (len(wanted), max(wanted)) if wanted else (0, -1)
        if some_gpu and not gpus:
            fix = seen.on_host("nvidia-smi") + " says why; or leave the host out (--exclude)"
            faults.append(Fault(host, "fail", "no GPU, where other hosts have some", fix))
        elif gpus and highest >= len(gpus):
            fix = f"write {HOST} slots={len(gpus)} in the hostfile"
            found = f"device {highest} is asked for and there are {len(gpus)} GPUs"
            faults.append(Fault(host, "fail", found, fix))
        elif not gpus and slots > cores:
            fix = f"write {HOST} slots={cores} in the hostfile"
            faults.append(Fault(host, "warning", f"{slots} slots on {cores} cores: they share", fix))
        for position in wanted if wanted is not None else range(len(gpus)):
            gpu = gpus[position] if position < len(gpus) else None
            if gpu is not None and gpu["used"] > max(GIB, gpu["total"] // 20):
                used = f"{format_bytes(gpu['used'])} of {format_bytes(gpu['total'])}"
                taken = f"GPU {gpu['index']}: {used} is in use"
                fix = seen.on_host("nvidia-smi") + " names the process: end it, or leave the GPU out"
                status: Status = "fail" if gpu["used"] > gpu["total"] // 2 else "warning"
                faults.append(Fault(host, status, taken, fix))
    names = [f"{count} hosts of {kind}" if count > 1 else kind for kind, count in kinds.items()]
    return rows_of("devices", faults, "; ".join(names))


def _memory(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    faults = []
    for host, each in facts.items():
        wanted = seen.wanted.devices[host]
        ranks = len(wanted) if wanted is not None else len(each.get("devices", {}).get("gpus", [])) or 1
        status = _judge(each["memory"] / ranks, MEMORY_A_RANK)
        if status is not None:
            found = f"{format_bytes(each['memory'])} free for {ranks} rank{'s' * (ranks > 1)}"
            fix = seen.on_host("ps -eo rss,user,comm --sort=-rss") + " | head; or raise the job's limit"
            faults.append(Fault(host, status, found, fix))
    least = min(each["memory"] for each in facts.values())
    return rows_of("memory", faults, f"at least {format_bytes(least)} free")


def _disks(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    faults = []
    least: dict[str, int] = {}
    for host, each in facts.items():
        for disk in each["disks"]:
            path, free, files_left = disk["path"], disk["free"], disk["files_left"]
            least[path] = min(free, least.get(path, free))
            fix = seen.on_host(f"df -h {path}") + "; make room, or name another folder"
            if path == "/dev/shm":
                fix = seen.on_host("'mount -o remount,size=16G /dev/shm'") + " (docker: --shm-size=16g)"
            status = _judge(free, SMALL_DISK.get(path, DISK))
            if status is not None:
                faults.append(Fault(host, status, f"{path}: {format_bytes(free)} free", fix))
            elif files_left is not None and files_left < 1000:
                faults.append(Fault(host, "fail", f"{path}: room for {files_left} more files", fix))
    fine = "; ".join(f"{path} {format_bytes(free)}" for path, free in least.items())
    return rows_of("disk", faults, f"free: {fine}")


def _folders(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    faults = []
    for host, each in facts.items():
        for folder in each["folders"]:
            path, problem = folder["path"], folder["problem"]
            if problem is not None:
                look = seen.on_host(f"ls -ld {path}")
                fix = f"{look}; give this user the right to write, or free the disk"
                faults.append(Fault(host, "fail", f"{path} cannot be written: {problem}", fix))
    return rows_of("folders", faults, "can be written")


def _ops(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    faults, stale = [], []
    wanted = seen.wanted.ops
    ops = (CPU_ADAM,) if wanted is None else wanted
    folders = {folder for op in (wanted or (CPU_ADAM, ASYNC_IO)) for folder in op.folders}
    held = {lock["path"] for each in facts.values() for lock in each["ops"]["locks"] if lock["is_held"]}
    for host, each in facts.items():
        faults += [fault for op in ops if (fault := _op(seen, op, host, each["ops"])) is not None][-1:]
        for lock in each["ops"]["locks"]:
            # Held by a build of another host, where they share the folder.
            if lock["path"] not in held and Path(lock["path"]).parent.name in folders:
                found = f"a killed build left {lock['path']}: a run that needs the op removes it"
                stale.append(Fault(host, "warning", found, seen.on_host(f"rm {lock['path']}")))
    built = sorted({name for each in facts.values() for name in each["ops"]["built"]} & folders)
    fine = f"built: {', '.join(built)}" if built else "will be built when they are needed"
    if any(not each["ops"]["libaio"] and "async_io" not in each["ops"]["built"] for each in facts.values()):
        fine += "; async_io (NVMe) needs libaio-dev"
    return rows_of("native ops", faults, fine) + rows_of("build locks", stale, "none is stale")


def _op(seen: Seen, op: NativeOp, host: str, there: Ops) -> Fault | None:
    """What is missing on a machine to build an op."""
    # torch's AdamW takes the place of CPU Adam; nothing that of the others.
    is_asked_for = seen.wanted.ops is not None and op is not CPU_ADAM
    status: Status = "fail" if is_asked_for else "warning"
    if set(op.folders) <= set(there["built"]):
        return None
    if there["compiler"] is None:
        return Fault(host, status, f"no C++ compiler for {op.label}", seen.on_host("apt-get install g++"))
    if there["ninja"] is None:
        install = seen.on_host(f"{sys.executable} -m pip install ninja")
        return Fault(host, status, f"no ninja to build {op.label}", install)
    if is_asked_for and op is ASYNC_IO and not there["libaio"]:
        install = seen.on_host("apt-get install libaio-dev")
        return Fault(host, status, "no libaio: no offloading to NVMe", install)
    if op is QUANTIZER and there["nvcc"] is None:
        install = seen.on_host("printenv CUDA_HOME") + "; install CUDA with nvcc, in torch's version"
        return Fault(host, status, "no nvcc: no quantised ZeRO++", install)
    return None


def check_clocks(seen: Seen) -> list[Row]:
    """The clocks, against the one here."""
    faults = []
    for host, offset in seen.offsets.items():
        if abs(offset) > CLOCK[1]:
            found = f"{abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}"
            fix = seen.on_host("timedatectl set-ntp true") + " (or chronyc makestep)"
            faults.append(Fault(host, "fail" if abs(offset) > CLOCK[0] else "warning", found, fix))
    most = max(map(abs, seen.offsets.values()), default=0.0)
    return rows_of("clock", faults, f"within {max(most, 0.001):.3f} s")


def _judge(value: float, limits: tuple[float, float]) -> Status | None:
    return "fail" if value < limits[0] else "warning" if value < limits[1] else None


CHECKS: dict[str, Callable[[Seen, Mapping[str, Answered]], list[Row]]] = {
    "project": _project,
    "versions": _versions,
    "devices": _devices,
    "driver": check_driver,
    "memory": _memory,
    "disks": _disks,
    "folders": _folders,
    "ops": _ops,
}
"""By the fact that a check cannot do without."""


SLOW = 1 / 3
"""Share of the median below which a link is slow."""


def is_loopback(address: str) -> bool:
    """127.0.0.0/8 or ::1: of no use to another machine."""
    return ipaddress.ip_address(address).is_loopback


def addresses_of(network: Network) -> list[str]:
    """A machine's addresses that others may know it by."""
    found = [address for interface in network["interfaces"] for address in interface["addresses"]]
    return [a for a in found if not is_loopback(a) and not ipaddress.ip_address(a).is_link_local]


def address_of(host: str, facts: Mapping[str, Answered]) -> str | None:
    """Where others find a host: as most of them resolve its name; else where ssh found it; else its first."""
    own = addresses_of(facts[host]["network"])
    counts = Counter(
        address
        for other, each in facts.items()
        if other != host
        for address in each["network"]["names"].get(host, [])[:1]
        if address in own
    )
    if counts:
        return counts.most_common(1)[0][0]
    by_ssh = facts[host]["address"]
    return by_ssh if by_ssh in own else next(iter(own), None)


def chosen_interfaces(facts: Answered) -> dict[str, tuple[str | None, str | None]]:
    """Variable -> (interface, its address) that gloo, and on GPUs NCCL, would take. None: none of use."""
    network, set_by_user = facts["network"], facts["environment"]
    named = {each["name"]: each["addresses"][0] for each in network["interfaces"]}
    wanted = set_by_user.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = network["own_address"]
    found: dict[str, tuple[str | None, str | None]] = {
        "GLOO_SOCKET_IFNAME": (wanted, named.get(wanted)) if wanted else (interface_with(network, own), own)
    }
    if facts.get("devices", {"gpus": []})["gpus"]:
        rule = set_by_user.get("NCCL_SOCKET_IFNAME", "")
        fitting = sorted(
            (name for name in named if _nccl_takes(name, rule)), key=lambda n: not n.startswith("ib")
        )
        name = fitting[0] if fitting else rule or None
        found["NCCL_SOCKET_IFNAME"] = (name, named.get(name or ""))
    return found


def _nccl_takes(name: str, rule: str) -> bool:
    """NCCL's grammar: prefixes, `=` exact names, `^` all but these; else neither docker nor loopback."""
    exclude, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    words = [word for word in rule.lstrip("^=").split(",") if word]
    if not words:
        return not name.startswith(("lo", "docker"))
    fits = name in words if exact else name.startswith(tuple(words))
    return fits != exclude


def interface_with(network: Network, address: str | None) -> str | None:
    """The interface that has an address."""
    return next((each["name"] for each in network["interfaces"] if address in each["addresses"]), None)


def check_names(seen: Seen) -> list[Row]:
    """What each host takes the others' names for, and whether two names are one machine."""
    facts = {host: each for host, each in seen.facts.items() if "network" in each}
    machines: dict[tuple[str, str], list[str]] = {}
    for host, each in facts.items():
        machines.setdefault((each["network"]["hostname"], each["network"]["boot_id"]), []).append(host)
    rows = [
        Row(
            "hosts",
            "fail",
            f"{' and '.join(names)} are one machine",
            "leave one line, with all slots",
            tuple(names),
        )
        for names in machines.values()
        if len(names) > 1
    ]
    rows += _only_another_machine(seen, facts)
    return rows + rows_of("names", _wrong_names(facts), "every host knows every other's")


def _only_another_machine(seen: Seen, facts: Mapping[str, Answered]) -> list[Row]:
    here = seen.here.get("network")
    if len(seen.wanted.devices) != 1 or here is None or seen.wanted.force_multi:
        return []
    for host, each in facts.items():
        there = each["network"]
        if (there["hostname"], there["boot_id"]) != (here["hostname"], here["boot_id"]):
            found = f"{host} alone is chosen and is not this machine: deepspeed would run its ranks here"
            return [Row("hosts", "fail", found, f"add --force_multi, or start on {host}", (host,))]
    return []


def _wrong_names(facts: Mapping[str, Answered]) -> Iterator[Fault]:
    """The first host is where all ranks meet: that one's is fatal."""
    master = next(iter(facts), None)
    for host, each in facts.items():
        for name, named in facts.items():
            status: Status = "fail" if name == master else "warning"
            known = each["network"]["names"].get(name, [])
            fix = f'put "{address_of(name, facts)} {name}" into /etc/hosts of {HOST}'
            if not known:
                yield Fault(host, status, f"{name} is unknown", fix)
            elif host != name and is_loopback(known[0]):
                yield Fault(host, status, f"{name} is {known[0]}, which is {host} itself", fix)
            elif host != name and known[0] not in addresses_of(named["network"]):
                found = f"{name} is {known[0]}, an address that {name} does not have"
                yield Fault(host, status, found, fix)


def check_ports(seen: Seen) -> list[Row]:
    """Whether each host can open a connection to each other."""
    failed = {
        (source, link["name"]): link["problem"]
        for source, links in seen.links.items()
        for link in links
        if link["problem"] is not None and link["address"] == address_of(link["name"], seen.facts)
    }
    hosts = list(seen.links)
    rows = []
    for target in hosts:
        sources = [source for source in hosts if (source, target) in failed]
        if not sources:
            continue
        whom = "every other host" if 1 < len(sources) == len(hosts) - 1 else ", ".join(sources)
        reason = failed[sources[0], target]
        address = address_of(target, seen.facts)
        fix = f"let TCP from {', '.join(sources)} to {address} through, ports 1024 and up"
        fix += f": {seen.on_host('iptables -S').replace(HOST, target)}, and the network's own rules"
        rows.append(Row("ports", "fail", f"{whom} -> {target}: {reason}", fix, (*sources, target)))
    pairs = len(hosts) * (len(hosts) - 1)
    return rows or [Row("ports", "ok", f"all {pairs} ways are open")]


def check_interfaces(seen: Seen) -> list[Row]:
    """Whether gloo and NCCL would take the interface that leads to the first host."""
    faults = []
    ways = set()
    master = next(iter(seen.links), None)
    for host, links in seen.links.items():
        facts = seen.facts[host]
        way = interface_with(facts["network"], _way_out(host, master, links, seen))
        if way is None:
            continue  # the ports' own rows say it
        ways.add(way)
        for variable, (name, address) in chosen_interfaces(facts).items():
            fault = _interface(host, variable, name=name, address=address, way=way, seen=seen)
            if fault is not None:
                faults.append(fault)
    return rows_of("interface", faults, ", ".join(sorted(ways)) or "unknown")


def _way_out(host: str, master: str | None, links: Sequence[Connection], seen: Seen) -> str | None:
    """This host's address on the way to the first host; the first host's own, as others know it."""
    if host == master:
        return address_of(host, seen.facts)
    return next(
        (link["source"] for link in links if link["name"] == master and link["problem"] is None), None
    )


def _interface(
    host: str, variable: str, name: str | None, address: str | None, way: str, seen: Seen
) -> Fault | None:
    if name == way:
        return None
    library = "gloo" if variable.startswith("GLOO") else "NCCL"
    fix = f"export {variable}={way}"
    given = seen.facts[host]["environment"].get(variable)
    if given and address is None:
        return Fault(host, "fail", f"{variable}={given}: there is no such interface that is up", fix)
    if address is None or is_loopback(address):
        # gloo falls back to loopback where the host's own name is no address of it.
        name, address = name or "lo", address or "127.0.0.1"
        remedy = f", or in its /etc/hosts give its own name {address_of(host, seen.facts)}"
        return Fault(host, "fail", f"{library} would offer {address} ({name}) to the others", fix + remedy)
    reached = [
        link["problem"] is None
        for links in seen.links.values()
        for link in links
        if link["name"] == host and link["address"] == address
    ]
    status: Status = "warning" if reached and all(reached) else "fail"
    found = f"{library} would use {name} ({address}); the first host is reached by {way}"
    return Fault(host, status, found, fix)


def check_sharing(seen: Seen) -> list[Row]:
    """One run folder for all, one for each, or a mount that is missing on some."""
    hosts = [host for host in seen.sees if all(not f["problem"] for f in seen.facts[host].get("folders", []))]
    groups = Counter(frozenset(seen.sees[host]) & frozenset(hosts) for host in hosts)
    if len(hosts) < 2:
        return []
    if len(groups) == 1:
        return [Row("run folder", "ok", "one for all hosts")]
    if all(len(group) == 1 for group in groups):
        return [Row("run folder", "ok", "each host has its own: each keeps its part of a checkpoint")]
    largest = max(groups, key=len)
    apart = tuple(host for host in hosts if host not in largest)
    folder = seen.facts[hosts[0]]["folders"][0]["path"]
    found = f"{', '.join(sorted(largest))} share {folder}; the rest does not see it"
    return [Row("run folder", "warning", found, f"mount it on {', '.join(apart)} too", apart)]


def check_all_reduce(
    seen: Seen, places: Sequence[str], results: Sequence[Measured], problem: str
) -> list[Row]:
    """The rows of the all-reduce and of the links.

    Args:
        places: The host of each rank.
        problem: Why there are no results.
    """
    more = "NCCL_DEBUG=INFO" if seen.facts[places[0]]["devices"]["gpus"] else "TORCH_CPP_LOG_LEVEL=INFO"
    fix = f"look at the rows above; {more} in front of this command shows more"
    if problem:
        return [Row("all-reduce", "fail", problem, fix)]
    wrong = [each for each in results if "problem" in each]
    if wrong:
        # The others wait for the one that is furthest behind.
        first = min(wrong, key=lambda each: STEPS.index(each["step"]))
        behind = [each for each in wrong if each["step"] == first["step"]]
        hosts = tuple(dict.fromkeys(places[each["rank"]] for each in behind))
        return [Row("all-reduce", "fail", f"stopped at {first['step']}: {first['problem']}", fix, hosts)]
    size = min(each["size"] for each in results)
    bandwidth = min(each["bandwidth"] for each in results)
    ranks = f"{len(results)} rank{'s' * (len(results) > 1)}"
    over = f", {_speed(bandwidth)} a rank" if len(results) > 1 else ""
    rows = [Row("all-reduce", "ok", f"{size / (1 << 20):.1f} MiB over {ranks}{over}")]
    return rows + _links(places, results)


def _links(places: Sequence[str], results: Sequence[Measured]) -> list[Row]:
    speeds: dict[tuple[str, str], float] = {}
    for first, second, speed in (link for each in results for link in each["links"]):
        pair = places[first], places[second]
        speeds[pair] = min(speed, speeds.get(pair, speed))
    if not speeds:
        return []
    # Of two links the faster is what the slower is held against.
    usual = median(speeds.values()) if len(speeds) > 2 else max(speeds.values())
    slow = {pair for pair, speed in speeds.items() if speed < SLOW * usual}
    (source, target), least = min(speeds.items(), key=lambda item: item[1])
    found = f"slowest {source} -> {target} {_speed(least)}; usual {_speed(usual)}"
    if not slow:
        return [Row("links", "ok", found)]
    # All of a host's links: not the link is slow, but the host.
    guilty = [host for host in (source, target) if len({pair for pair in slow if host in pair}) > 1]
    hosts = tuple(guilty or (source, target))
    fix = f"on {', '.join(hosts)}: what else runs (top), the link's speed and errors (ip -s link; ethtool)"
    if len(guilty) == 1:
        found = f"{guilty[0]} is slow: {found}"
    return [Row("links", "warning", found, fix, hosts)]


def _speed(bytes_a_second: float) -> str:
    return f"{bytes_a_second * 8 / 1e9:.3g} Gbit/s"
