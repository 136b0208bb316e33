"""Runs commands in children forked after the imports are done: JSON lines in, JSON lines out.

A process of its own: no thread of torch's, no pool and no lock of a test is in it when it forks.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 120  # for one command on a busy machine; most take a tenth of a second


def import_all() -> None:
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import jinja2.sandbox  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import rich.progress  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.utils.chat_template_utils  # noqa: F401
    import wandb  # noqa: F401

    import pipeline.__main__
    import pipeline.checkpoint.catalog
    import pipeline.checkpoint.export
    import pipeline.cli.inspect_view
    import pipeline.cli.train
    import pipeline.data.custom
    import pipeline.data.images
    import pipeline.data.prepared
    import pipeline.data.prepared.chat_encoder
    import pipeline.distributed.launch.multi_node
    import pipeline.engine.deepspeed_engine
    import pipeline.training.run_rank  # noqa: F401


def child(request: dict[str, Any], folder: Path) -> None:
    """Becomes the command; does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        import pipeline.__main__
        import pipeline.cli.train
        import pipeline.distributed.launch.multi_node

        entries = {
            "train": pipeline.cli.train.main,
            "pipeline": pipeline.__main__.main,
            "multi_node": pipeline.distributed.launch.multi_node.main,
        }
        code = entries[request["entry"]](request["argv"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # as the interpreter does it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any], folder: Path, status: int) -> None:
    said = {name: (folder / name).read_text(errors="replace") for name in ("stdout", "stderr")}
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"number": request["number"], "code": code, **said}), flush=True)


def serve(scratch: Path, at_once: int) -> None:
    import_all()
    gc.collect()
    gc.freeze()  # a collection in a child would copy all that was imported
    print(json.dumps({"ready": True}), flush=True)
    running: dict[int, tuple[dict[str, Any], Path, float]] = {}
    is_open = True
    while is_open or running:
        wants = is_open and len(running) < at_once
        if wants and select.select([0], [], [], 0 if running else 60)[0]:
            line = sys.stdin.buffer.raw.readline()
            if not line:
                is_open = False
                continue
            request = json.loads(line)
            folder = scratch / str(request["number"])
            folder.mkdir()
            process = os.fork()
            if process == 0:
                child(request, folder)
            running[process] = (request, folder, time.monotonic())
        for process, (request, folder, start) in list(running.items()):
            if time.monotonic() - start > SECONDS:
                os.killpg(process, signal.SIGKILL)
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del running[process]
                answer(request, folder, status)
        if running:
            time.sleep(0.005)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
