"""Who takes part in a group: the peers by default and on request, under which split, and what they need."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

from processes import on_cuda
from workload import FP8, FULL, JSON_FILES, Workload

PLAIN = ["pytorch", "pytorch+our-loss", "trainer"]
DEEPSPEED = ["deepspeed", "deepspeed+our-loss", "trainer"]
ON_REQUEST = ["pytorch-compiled", "fsdp2-compiled", "trainer-liger", FP8]
# Beside an adapter: without our loss, which peft's wrapper would have to make logits for.
ADAPTER_PLAIN, ADAPTER_DEEPSPEED = [FULL, "pytorch", "trainer"], [FULL, "deepspeed", "trainer"]
ADAPTER_ON_REQUEST = ["pytorch-compiled", "trainer-liger", "trainer-unsloth"]
PLAIN_ONLY = {"pytorch", "pytorch+our-loss", "pytorch-compiled", "fsdp2-compiled", "trainer-unsloth"}
DEEPSPEED_ONLY = {"deepspeed", "deepspeed+our-loss"}
NEEDS = {"trainer-liger": "liger_kernel", FP8: "torchao", "trainer-unsloth": "unsloth"}
ON_GPU = {"trainer-unsloth"}
LOOPS = {"trainer-unsloth": "unsloth_first"}  # where it is not `participants`


def choices(adapter: bool | None = None) -> list[str]:
    """All peers that can be asked for, beside an adapter or not; None: either."""
    both = {
        False: PLAIN + DEEPSPEED + ON_REQUEST,
        True: ADAPTER_PLAIN + ADAPTER_DEEPSPEED + ADAPTER_ON_REQUEST,
    }
    asked = both[False] + both[True] if adapter is None else both[adapter]
    return list(dict.fromkeys(asked))


def on_request() -> str:
    """Those that no group has by default."""
    return ", ".join(dict.fromkeys(ON_REQUEST + ADAPTER_ON_REQUEST))


def files_of(asked: list[str] | None, split: str, ranks: int, adapter: bool) -> dict[str, list[str | None]]:
    """Participant -> the files of ds_configs/ that it runs with, None: without one. Ours first: at several
    ranks plain ours is DDP twice, PyTorch's and DeepSpeed's stage 0.

    Args:
        asked: The peers; None: the default ones.
    """
    is_plain = split == "plain"
    default = {
        (True, False): PLAIN,
        (False, False): DEEPSPEED,
        (True, True): ADAPTER_PLAIN,
        (False, True): ADAPTER_DEEPSPEED,
    }[is_plain, adapter]
    left_out = DEEPSPEED_ONLY if is_plain else PLAIN_ONLY
    peers = [peer for peer in (default if asked is None else asked) if peer not in left_out]
    files: dict[str, list[str | None]]
    files = {name: [None if is_plain else JSON_FILES.get(split, split)] for name in ("ours", *peers)}
    if is_plain and ranks > 1:
        ddp: dict[str, list[str | None]] = {"ours": ["torch_ddp.json", "ddp.json"], FULL: ["torch_ddp.json"]}
        files |= {name: ddp[name] for name in files if name in ddp}
    return files


def leave_out(asked: list[str]) -> None:
    """Tells of those that cannot run here, and takes them off the list."""
    for peer in list(asked):
        lacks = f"the package {NEEDS[peer]}" if peer in NEEDS and find_spec(NEEDS[peer]) is None else ""
        lacks = "a GPU" if peer in ON_GPU and not on_cuda() else lacks
        if lacks:
            print(f"left out: {peer}, which needs {lacks}", file=sys.stderr)
            asked.remove(peer)


def work_of(peer: str, work: Workload) -> Workload:
    """What this one trains."""
    return replace(work, adapter=work.adapter and peer != FULL, fp8=peer == FP8)
