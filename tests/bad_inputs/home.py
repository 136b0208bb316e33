"""Files that the bad inputs share: texts, conversations, images, code, a finished run, a model folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bad_inputs.case import Case
from support.launch import ROOT, make_environment


class Server:
    """The process of server.py."""

    def __init__(self, scratch: Path) -> None:
        self._count = 0
        scratch.mkdir()
        own = make_environment(
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join([str(ROOT), str(Path(__file__).parents[1])]),
            HF_HUB_OFFLINE="1",
            HF_HOME=str(scratch / "hub"),
            TOKENIZERS_PARALLELISM="false",
            CXX="false",  # nothing here is built
        )
        command = [sys.executable, str(Path(__file__).with_name("server.py")), str(scratch), "4"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own, cwd=scratch, text=True
        )
        assert json.loads(self._line())["ready"]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks has ended"
        return line

    def run(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers in the order of the requests."""
        first = self._count
        self._count = self._count + len(requests)
        # Beside the reading: a pipe holds 64 KiB, and each side would wait for the other.
        writer = threading.Thread(target=self._write, args=(requests, first), daemon=True)
        writer.start()
        answers = [json.loads(self._line()) for _ in requests]
        writer.join()
        return sorted(answers, key=lambda answer: int(answer["number"]))

    def _write(self, requests: Sequence[dict[str, Any]], first: int) -> None:
        assert self._process.stdin is not None
        for number, request in enumerate(requests, first):
            self._process.stdin.write(json.dumps(request | {"number": number}) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_home(home: Path, server: Server) -> None:
    """Fill the folder: first the files that can be written directly, then those that runs leave."""
    write_files(home)
    (home / "good").mkdir()
    run = Case("a run that is right", [], recipe={"run_dir": "{home}/run", "checkpoint": {"keep_last": 2}})
    export = Case("", [], entry="pipeline", argv=["export", "{home}/run", "{home}/model"])
    for case in (run, export):
        (done,) = server.run([case.request(home, home / "good")])
        assert done["code"] == 0, done["stderr"]


def write_files(home: Path) -> None:
    from datasets import Dataset
    from PIL import Image

    texts = home / "texts"
    texts.mkdir(parents=True)
    for source in sorted((ROOT / "pipeline" / "config").glob("*.py")):
        (texts / source.name).write_text(source.read_text())
    turns = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well."}]
    (home / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    for number, name in enumerate(["cat", "dog"]):
        (home / "images" / name).mkdir(parents=True)
        for shade in range(4):
            Image.new("RGB", (8, 8), (60 * shade, 100 * number, 0)).save(
                home / "images" / name / f"{shade}.png"
            )
    Dataset.from_dict({"text": ["def f(): pass\n" * 20] * 30}).save_to_disk(str(home / "saved"))
