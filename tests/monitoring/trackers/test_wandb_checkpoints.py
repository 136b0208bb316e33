"""Checkpoints as artifacts of W&B, the real client and the real store: references, never the files."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.wandb_server import KEY, WandbServer, make_environment, read_run_id

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]

# Word by word: save STEP LOSS SEED, distrust STEP (later ones are set aside), back STEP, wait VERSIONS.
PROGRAM = """
    import json, logging, sys, time
    from pathlib import Path
    import torch
    from plain_engine import PlainEngine
    from pipeline.checkpoint.catalog import Retention
    from pipeline.checkpoint.store import CheckpointStore
    from pipeline.config.data_schema import DigitsDataConfig
    from pipeline.config.model_schema import CNNConfig
    from pipeline.config.schema import RunConfig, WandbConfig
    from pipeline.distributed.process_group import Job
    from pipeline.distributed.ranks import Ranks
    from pipeline.monitoring.trackers import build_trackers

    run_dir, start_step, words = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    logging.basicConfig(stream=sys.stdout)
    config = RunConfig(name="trial", max_steps=99, model=CNNConfig(kind="cnn"),
                       data=DigitsDataConfig(kind="digits"), wandb=WandbConfig())
    run_dir.mkdir(exist_ok=True)
    job = Job(Ranks(0, 0, 1, 1), torch.device("cpu"))
    store = CheckpointStore(run_dir / "checkpoints", Retention(2, keep_best=True), job, "plain PyTorch")
    with build_trackers(config, run_dir=run_dir, is_main_process=True, start_step=start_step, max_steps=99,
                     run_config={}) as trackers:
        store.set_listener(trackers.show)
        for word, step, *rest in words:
            if word == "wait":
                while Path(sys.argv[4]).read_text().count("COMMITTED") < step:
                    time.sleep(0.1)
                continue
            trackers.write(step, {"train/loss": step / 7})
            if word == "save":
                loss, seed = rest
                best_by = loss and {"metric": "loss", "value": loss, "mode": "min"}
                state = {"global_step": step, "tokens_seen": 1.0, "eval_loss": loss, "best_by": best_by}
                store.save(PlainEngine(0, 1, seed=seed), state, wait=True)
            elif word == "distrust":
                store.distrust_after(step)
            elif word == "back":
                store.roll_back(PlainEngine(0, 1), step)
        store.close()
"""


def run(folder: Path, env: dict[str, str], start: int, *words: list, kept: Path = Path("none")) -> str:
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    command = [*program, str(folder), str(start), json.dumps(words), str(kept)]
    env = env | {"PYTHONPATH": str(TESTS / "checkpoint")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def aliases(server: WandbServer) -> list[tuple[int, list[str]]]:
    """Files of each version, oldest first."""
    return [(each["metadata"]["step"], sorted(each["aliases"])) for each in server.artifacts()]


SAVES = [["save", 10, 0.5, 1], ["save", 20, 0.4, 2], ["save", 30, 0.6, 3], ["save", 40, None, 4]]
EXPECTED = [
    (10, ["step-10"]),
    (20, ["best", "step-20"]),
    (30, ["step-30"]),
    (40, ["latest", "step-40"]),
]


def check_nothing_was_uploaded(server: WandbServer, run: Path) -> None:
    """Every entry is a reference to a file, by its name and size, and no file went over the wire."""
    for version in server.artifacts():
        folder = run / "checkpoints" / f"step-{version['metadata']['step']:08d}"
        assert version["metadata"]["folder"] == str(folder)
        assert version["type"] == "model"
        assert version["state"] == "COMMITTED"
        assert set(version["manifest"]) == {"manifest.json", "rank-00000.safetensors", "shards.safetensors"}
        for name, entry in version["manifest"].items():
            assert entry["ref"] == (folder / name).as_uri()
            assert not folder.exists() or entry["size"] == (folder / name).stat().st_size
    sent = [path.read_bytes() for path in (server.folder / "files").rglob("*") if path.is_file()]
    for path in (run / "checkpoints").rglob("*.*"):
        assert not any(path.read_bytes() in content for content in sent), path


def test_each_checkpoint_is_a_version_that_says_where_it_lies(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    kept = server.folder / "artifacts.json"
    kept.write_text("[]")
    # The third save deletes the first one's files.
    words = [*SAVES[:2], ["wait", 2], *SAVES[2:]]
    said = run(folder, make_environment(tmp_path, server.url, **KEY), 0, *words, kept=kept)
    assert "dropped" not in said
    assert aliases(server) == EXPECTED
    assert {each["name"] for each in server.artifacts()} == {f"checkpoint-{read_run_id(folder)}"}
    assert [each["metadata"]["eval_loss"] for each in server.artifacts()] == [0.5, 0.4, 0.6, None]
    check_nothing_was_uploaded(server, folder)
    kept = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert kept == {"step-00000020", "step-00000030", "step-00000040"}


@pytest.mark.nightly
def test_what_is_set_aside_or_given_up_is_not_the_latest(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY)
    kept = server.folder / "artifacts.json"
    kept.write_text("[]")
    run(folder, env, 0, *SAVES[:2], ["wait", 2], ["distrust", 10], kept=kept)
    assert aliases(server) == [(10, ["best", "latest", "step-10"]), (20, ["step-20"])]
    assert (folder / "checkpoints" / "suspect-step-00000020").exists()
    run(folder, env, 10, ["save", 20, 0.4, 5], *SAVES[2:], ["wait", 5], ["back", 20], kept=kept)
    assert aliases(server)[-3:] == [
        (20, ["best", "latest", "step-20"]),  # saved anew, so another version
        (30, ["step-30"]),
        (40, ["step-40"]),
    ]
    assert len(server.artifacts()) == 5


@pytest.mark.nightly
def test_offline_they_are_uploaded_with_the_rows(tmp_path: Path, server: WandbServer):
    folder = tmp_path / "runs" / "trial-1"
    folder.mkdir(parents=True)
    run(folder, make_environment(tmp_path, server.url), 0, *SAVES[:2])
    run(folder, make_environment(tmp_path, server.url), 20, *SAVES[2:])
    sync = [sys.executable, "-m", "wandb", "sync", *sorted(map(str, folder.glob("wandb/offline-run-*")))]
    env = make_environment(tmp_path, server.url, **KEY)
    subprocess.run(sync, env=env, capture_output=True, timeout=100, check=True)
    assert aliases(server) == EXPECTED
    check_nothing_was_uploaded(server, folder)
    assert [row["global_step"] for row in server.rows(read_run_id(folder))] == [10, 20, 30, 40]


@pytest.mark.nightly
def test_a_server_that_takes_no_artifact_costs_one_line(tmp_path: Path, server: WandbServer):
    (server.folder / "artifacts.json").write_text("no JSON")  # its every answer fails
    folder = tmp_path / "trial-1"
    said = run(folder, make_environment(tmp_path, server.url, **KEY), 0, *SAVES)
    # It fails sooner or later than the end of the run waits for it.
    assert said.count("W&B's list of checkpoints is dropped") == 1, said
    assert [row["global_step"] for row in server.rows(read_run_id(folder))] == [10, 20, 30, 40]
