"""A process that hands rows to the trackers of a run, the real W&B client among them."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

# Word by word: rows FIRST LAST VALUE (evaluated at every fifth step), eval STEP, histograms STEP COUNTS,
# tasks STEP, back TO FROM, sample STEP, wait ROWS (until the server has them), fill (the disk of W&B's
# files), core (the death of W&B's own process), signal NAME PROCESS, close CODE, flushed (killed once a file
# has a row), kill.
PROGRAM = """
    import contextlib, json, logging, os, signal, subprocess, sys, time
    from pathlib import Path
    import numpy as np
    from pipeline.config.model_schema import CNNConfig
    from pipeline.config.data_schema import DigitsDataConfig
    from pipeline.config.schema import RunConfig, WandbConfig
    from pipeline.monitoring.events import ROLLBACK, Event, Histograms, TaskTable
    from pipeline.monitoring.trackers import build_trackers

    run_dir, start_step, words = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    kept, section = sys.argv[4], json.loads(sys.argv[5])
    logging.basicConfig(level=logging.INFO, format="LOG %(message)s", stream=sys.stdout)
    config = RunConfig(name="trial", max_steps=40, model=CNNConfig(kind="cnn"),
                       data=DigitsDataConfig(kind="digits"), wandb=WandbConfig(**section))
    run_dir.mkdir(exist_ok=True)
    with build_trackers(config, run_dir=run_dir, is_main_process=True, start_step=start_step, max_steps=40,
                     run_config={"seed": 7}) as trackers:
        for word, *rest in words:
            if word == "rows":
                for step in range(rest[0], rest[1] + 1):
                    trackers.write(step, {"train/loss": rest[2] + step / 7, "train/accuracy": step / 99,
                                          "train/grad_norm": float("nan")})
                    if step % 5 == 0:
                        trackers.write(step, {"eval/loss": rest[2] + step / 9})
            elif word == "eval":
                trackers.write(rest[0], {"eval/loss": rest[0] / 9})
            elif word == "back":
                step, from_step = rest
                fields = {"from_step": from_step, "first_sample": 8, "last_sample": from_step}
                trackers.tell(step, Event(ROLLBACK, "back", fields=fields))
            elif word == "sample":
                fields = {"prompt": "p", "text": f"text {rest[0]}"}
                trackers.tell(rest[0], Event("sample", "it wrote", level="info", fields=fields))
            elif word == "histograms":
                counts = np.array(rest[1])
                edges = np.arange(len(counts) + 1.0)
                trackers.show(Histograms(rest[0], edges, {"w": counts}, {"w": 2 * counts}))
            elif word == "tasks":
                row = ("sums", 7, "1 + 1 =", "2", f"answer {rest[0]}", 0.5)
                trackers.show(TaskTable(rest[0], [row] * 500))
            elif word == "wait":
                while not Path(kept).exists() or len(Path(kept).read_text().splitlines()) < rest[0]:
                    time.sleep(0.1)
            elif word == "fill":
                with (run_dir / "wandb" / "filler").open("wb", 0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(2**16))
            elif word == "core":
                subprocess.run(["pkill", "-9", "-P", str(os.getpid()), "wandb-core"], check=True)
                time.sleep(0.3)
            elif word == "signal":
                time.sleep(0.5)
                os.kill(rest[1], getattr(signal, rest[0]))
            elif word == "close":
                trackers.close(rest[0])
            elif word == "flushed":  # wandb writes its file every second
                (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
                # Each row has this name twice, in its history and its summary: with three the first row is
                # whole. train/loss would not do, since W&B writes its definition before any row.
                while path.read_bytes().count(b"train/grad_norm") < 3:
                    time.sleep(0.1)
            if word in ("flushed", "kill"):
                sys.stdout.flush()
                os._exit(9)
"""


def command(
    folder: Path, start: int, *words: list, kept: Path = Path("none"), **section: object
) -> list[str]:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    return [*program, str(folder), str(start), json.dumps(words), str(kept), json.dumps(section)]


def run(folder: Path, env: dict[str, str], start: int, *words: list, **how: object) -> str:
    """Return the process's output; stderr must be empty, without wandb's lines or a traceback."""
    done = subprocess.run(
        command(folder, start, *words, **how),  # type: ignore[arg-type]
        env=env,
        cwd=folder.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == (9 if words[-1] in (["kill"], ["flushed"]) else 0), done.stdout
    return done.stdout
