"""What a checkpoint's table of shards costs at a size that no test has: python benchmarks/checkpoint_scale.py

A model of 70 billion parameters under ZeRO 3 on 1,000 ranks, without its values: what a rank hands over, what
the one that publishes makes of it, and what a rank that goes on reads: processor time, and most memory.
The exit code says whether it holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from pipeline.checkpoint.manifest import (
    MANIFEST,
    TABLE,
    FileRecord,
    Manifest,
    ShardTable,
    TableRecord,
    read_manifest,
)
from pipeline.checkpoint.shard_file import Layout
from pipeline.checkpoint.shards import Region, Shard

SECONDS, MEGABYTES = 1.0, 200.0
HIDDEN, INNER, KEYS, VOCABULARY, LAYERS = 8192, 28672, 1024, 128256, 80
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in LAYER.items()},
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
}


def shards(rank: int, ranks: int) -> Iterator[Shard]:
    """What a rank writes: its share of every tensor, as ZeRO 3 divides it."""
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        share = -(-size // ranks)
        start = min(rank * share, size)
        region = Region(shape, None, start, min(share, size - start))
        if region.length:
            for number, kind in enumerate(("weight", "exp_avg", "exp_avg_sq")):
                checksum = f"{xxhash.xxh3_64_intdigest(name.encode(), seed=rank * 3 + number):016x}"
                yield Shard(name, kind, region, torch.float32, checksum=checksum)


def published(folder: Path, ranks: int) -> dict[str, Any]:
    """Writes table and manifest as the rank does that publishes; what it took."""
    own, handed_over = 0.0, []
    for rank in range(ranks):
        mine = list(shards(rank, ranks))
        began = time.process_time()
        table = ShardTable.of(mine)
        own = max(own, time.process_time() - began)
        layout = Layout.of(mine)
        record = FileRecord(
            name=f"rank-{rank:05d}.safetensors",
            rank=rank,
            host=f"node{rank // 8}",
            place=0,
            bytes=layout.num_bytes,
            xxh3_128="0" * 32,
            shards=len(mine),
        )
        handed_over.append(pickle.dumps((record, table)))
    before, began = resident(), time.process_time()
    written = [pickle.loads(each) for each in handed_over]
    files, table = tuple(record for record, _ in written), ShardTable.joined([part for _, part in written])
    del written
    content = table.encode()
    summed = TableRecord.of(content)
    fields = {"global_step": 1, "world_size": ranks, "split": "ZeRO 3", "state": {}, "scalars": {}}
    manifest = Manifest.with_table(table, folder, files=files, shard_table=summed, **fields)
    sealed = manifest.encode()
    seconds, megabytes = time.process_time() - began, resident() - before
    (folder / TABLE).write_bytes(b"".join(content))
    (folder / MANIFEST).write_bytes(sealed)
    return {
        "shards": len(table),
        "on the disk, MB": (summed.bytes + len(sealed)) / 1e6,
        "handed over by a rank, MB": max(map(len, handed_over)) / 1e6,
        "a rank's own part, s": own,
        "published by one rank, s": seconds,
        "published by one rank, MB": megabytes,
    }


def read(folder: Path, ranks: int) -> dict[str, Any]:
    """Reads it as every rank does that goes on, in a fresh process."""
    _ = xxhash.xxh3_128_hexdigest(b""), ShardTable.of([]).check()  # what is imported late
    own = list(shards(ranks // 2, ranks))
    before, began = resident(), time.process_time()
    manifest = read_manifest(folder)
    places = [manifest.table.rows_of(shard.name, shard.kind, shard.region) for shard in own]
    layout = manifest.layout_of(manifest.files[len(manifest.files) // 2])
    seconds = time.process_time() - began
    assert all(rows is not None and len(rows) == 1 for rows in places)
    assert layout.num_bytes > 0
    return {"read by a rank, s": seconds, "read by a rank, MB": resident() - before}


def resident() -> float:
    """The most MB that this program held until now; rusage would have its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="JSON file of all numbers")
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(json.dumps(read(arguments.read, arguments.ranks)))
        return 0
    with tempfile.TemporaryDirectory(prefix="checkpoint-scale-") as folder:
        measured = published(Path(folder), arguments.ranks)
        command = [sys.executable, __file__, "--read", folder, "--ranks", str(arguments.ranks)]
        measured |= json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for what, value in measured.items():
        print(f"{what:32} {value:,.4g}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"cores": os.cpu_count(), **measured}, indent=1) + "\n")
    limits = {"s": SECONDS, "MB": MEGABYTES}
    failures = [
        what for what, value in measured.items() if value > limits.get(what.rpartition(", ")[2], math.inf)
    ]
    for what in failures:
        print(f"not reached: {what}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
