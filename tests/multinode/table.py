"""Writes the table of faults of docs/multi_node.md: python tests/multinode/table.py   (root; ten minutes)

Each happens for real to the second of two nodes; the job was started by launch/multi_node.sh.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from multinode.cluster import Cluster, what_is_missing
from multinode.faults import FAULTS, HANG_SECONDS, Outcome, endure, suffer
from multinode.launchers import LAUNCHERS
from parity.table import replace_block

DOCUMENT = Path(__file__).parents[2] / "docs" / "multi_node.md"
TELLING = re.compile(r"(rank \d+ on node\d+.*|hang: .*|node\d+ is lost.*)")


def row(fault: str, said: str, code: object, seconds: object, left: object) -> str:
    """One row; process ids and paths are left out."""
    said = re.sub(r" \(pid \d+\)|; stacks: .*", "", said)
    said = re.sub(r"/\S*/(pipeline|tests|run)/", r"\1/", said).strip().replace("|", "\\|")
    return f"| {fault} | {said} | {code} | {seconds} | {left} |"


def of_outcome(fault: str, outcome: Outcome) -> str:
    """A fault that ends the job."""
    said = TELLING.search(outcome.text)
    seconds, left = f"{outcome.seconds:.0f}", sum(map(len, outcome.left.values()))
    return row(fault, said[1] if said else "", outcome.code, seconds, left)


def main() -> None:
    """Every fault, then the table."""
    if reason := what_is_missing():
        sys.exit(f"no nodes here: {reason}")
    rows = []
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder, Cluster(2, Path(folder)) as cluster:
        for name, fault in FAULTS.items():
            cluster.begin()
            rows.append(of_outcome(name, suffer(cluster, LAUNCHERS["multi_node"], fault)))
            cluster.restore()
            print(rows[-1], flush=True)
        cluster.begin()
        survived = endure(cluster, LAUNCHERS["multi_node"])
        rows += [row(name, said, "goes on", "", "") for name, said in survived.items()]
        cluster.restore()
    where = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores for both nodes"
    text = [
        f"*By `python tests/multinode/table.py` on {where}; `distributed.hang_seconds` is {HANG_SECONDS}.*",
        "",
        "| happened to node2 | the console says | exit code | seconds to the end | processes left |",
        "|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(text))
    DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), "faults", "\n".join(text)))


if __name__ == "__main__":
    main()
