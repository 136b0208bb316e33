"""Machines as the doctor's probe would describe them, all well: a test spoils one."""

from __future__ import annotations

import copy
from typing import Any

from pipeline.distributed.doctor.network_facts import Connection
from pipeline.distributed.doctor.probe import Answered
from pipeline.distributed.doctor.rows import Row, Seen, Wanted

GIB = 1 << 30


def well(names: list[str], gpus: int = 0) -> dict[str, Any]:
    """Hosts 10.0.0.1, 10.0.0.2, ... on eth0, who know each other's names."""
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
    return {
        name: {
            "project": {"commit": "a" * 40, "digest": "d"},
            "versions": {
                "python": "3.11.7",
                "torch": "2.13.0",
                "CUDA": None,
                "ROCm": None,
                "NCCL": None,
                "deepspeed": "0.19.8",
            },
            "devices": {
                "cores": 8,
                "gpus": [
                    {"index": n, "name": "H100", "total": 80 * GIB, "used": GIB // 2} for n in range(gpus)
                ],
            },
            "driver": {
                "nvidia": None,
                "cuda": None,
                "problem": None,
                "given": False,
                "cards": 0,
                "amd_cards": 0,
                "amd_problem": None,
                "wsl": False,
                "health": [],
                "xids": [],
            },
            "memory": 100 * GIB,
            "disks": [
                {"path": path, "free": 500 * GIB, "files_left": 1_000_000}
                for path in ("runs", "/tmp", "/dev/shm")
            ],
            "folders": [{"path": "runs", "problem": None}],
            "ops": {
                "compiler": "/c++",
                "ninja": "/ninja",
                "libaio": True,
                "nvcc": "/nvcc",
                "built": [],
                "locks": [],
            },
            "network": {
                "hostname": name,
                "boot_id": f"boot of {name}",
                "interfaces": [
                    {"name": "lo", "addresses": ["127.0.0.1"]},
                    {"name": "eth0", "addresses": [address]},
                    {"name": "docker0", "addresses": ["172.17.0.1"]},
                ],
                "names": {other: [there] for other, there in addresses.items()},
                "own_address": address,
            },
            "environment": {},
            "address": address,
            "port": 4000,
            "unknown": {},
        }
        for name, address in addresses.items()
    }


def here() -> Answered:
    """The machine the job starts on: another one than all hosts."""
    return copy.deepcopy(well(["start"])["start"])


def seen(facts: dict[str, Any], **more: Any) -> Seen:
    """All devices of every host, and every way open."""
    links = {
        source: [
            Connection(name=name, address=address, problem=None, source=facts[source]["address"])
            for name, each in facts.items()
            for address in dict.fromkeys([each["address"], each["network"]["own_address"]])
            if name != source and address is not None
        ]
        for source in facts
    }
    given = {"here": here(), "facts": facts, "links": links} | more
    of_wanted = {name: given.pop(name) for name in Wanted.__dataclass_fields__ if name in given}
    return Seen(Wanted(**({"devices": dict.fromkeys(facts)} | of_wanted)), **given)


def bad(rows: list[Row]) -> list[Row]:
    """The rows that are not green."""
    return [row for row in rows if row.status != "ok"]
