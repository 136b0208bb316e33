"""W&B's own environment variables fill what the recipe leaves out.

The real client talks to a server on this machine.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from monitoring.trackers.wandb_program import run
from support.wandb_server import KEY, make_environment, read_offline_rows, read_run_id

from pipeline.config.schema import WandbConfig
from pipeline.monitoring.trackers.weights_and_biases import build_run_arguments

ALL = {
    "WANDB_PROJECT": "theirs",
    "WANDB_ENTITY": "team",
    "WANDB_NAME": "a name",
    "WANDB_RUN_GROUP": "ablation",
    "WANDB_TAGS": "one,two",
    "WANDB_NOTES": "why",
    "WANDB_JOB_TYPE": "train",
}
RECIPE = {"project": "ours", "group": "g", "tags": ["t"], "notes": "n", "job_type": "j", "entity": "me"}


def start(folder: Path, env: dict[str, str], step: int = 0, **section: object) -> list[str]:
    """Run three steps; the answer is what was said of W&B."""
    said = run(folder, env, step, ["rows", step + 1, step + 3, 0], **section)
    return [line for line in said.splitlines() if "W&B" in line]


@pytest.fixture
def variables(monkeypatch):
    for name in (*ALL, "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return lambda given: [monkeypatch.setenv(name, value) for name, value in given.items()]


@pytest.mark.parametrize(
    ("section", "given", "expected", "said"),
    [
        ({}, {}, {"project": "deepspeed-pipeline", "group": "trial", "name": "run-1"}, ""),
        (
            {},
            ALL,
            {
                "project": "theirs",
                "entity": "team",
                "name": "a name",
                "group": "ablation",
                "tags": ["one", "two"],
                "notes": "why",
                "job_type": "train",
            },
            "",
        ),
        (RECIPE, {}, RECIPE, ""),
        (RECIPE, {"WANDB_PROJECT": "ours", "WANDB_TAGS": "t"}, RECIPE, ""),
        (
            RECIPE,
            {"WANDB_PROJECT": "theirs", "WANDB_TAGS": "t,u"},
            RECIPE,
            "W&B: project ours from the recipe, not theirs from WANDB_PROJECT; "
            "tags ['t'] from the recipe, not ['t', 'u'] from WANDB_TAGS",
        ),
        (
            {"mode": "online"},
            {"WANDB_MODE": "offline"},
            {},
            "W&B: mode online from the recipe, not offline from WANDB_MODE",
        ),
    ],
)
def test_a_variable_stands_for_what_the_recipe_leaves_out(
    section, given, expected, said, variables, caplog, tmp_path
):
    variables(given)
    with caplog.at_level(logging.INFO, logger="pipeline"):
        found = build_run_arguments(WandbConfig(**section), "trial", tmp_path / "run-1", {})
    assert found | expected == found
    assert caplog.messages == [said] * bool(said)


@pytest.mark.slow
def test_the_server_has_what_the_variables_say_and_a_resume_its_own_id(tmp_path, server):
    folder = tmp_path / "trial-1"
    env = make_environment(tmp_path, server.url, **KEY, **ALL, WANDB_RUN_ID="my-id", WANDB_RESUME="never")
    (said,) = start(folder, env)
    assert said.startswith("LOG W&B run: ")
    ((name, kept),) = server.runs().items()
    assert name == read_run_id(folder) == "my-id"
    assert (kept["project"], kept["displayName"], kept["groupName"]) == ("theirs", "a name", "ablation")
    assert kept["tags"] == ["one", "two"]
    other = env | {"WANDB_RUN_ID": "another"}
    said = start(folder, other, 3)
    assert said[0] == "LOG W&B: this run continues under its own id my-id, not under WANDB_RUN_ID"
    assert list(server.runs()) == ["my-id"]
    assert [row["_step"] for row in server.rows("my-id")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.nightly
@pytest.mark.slow
def test_empty_variables_are_none(tmp_path):
    folder = tmp_path / "trial-1"
    names = (*ALL, "WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
    (said,) = start(folder, make_environment(tmp_path, "http://127.0.0.1:9", **dict.fromkeys(names, "")))
    assert "W&B is offline (no API key" in said
    assert len(read_offline_rows(folder)) == 3
    assert len(read_run_id(folder)) == 8


@pytest.mark.nightly
@pytest.mark.slow
def test_files_lie_where_wandb_dir_says_and_a_resume_finds_them(tmp_path):
    folder = tmp_path / "trial-1"
    elsewhere = tmp_path / "large" / "disk"
    env = make_environment(tmp_path, "http://127.0.0.1:9", WANDB_DIR=str(elsewhere), WANDB_MODE="offline")
    start(folder, env)
    start(tmp_path / "trial-2", env)  # another run's files beside them
    start(folder, env, 3)
    own = read_run_id(folder)
    files = sorted(elsewhere.glob(f"wandb/offline-run-*-{own}"))
    assert len(files) == 2
    assert not any(path.is_symlink() for path in files)
    assert sorted(each.resolve() for each in folder.glob("wandb/offline-run-*")) == files
    assert [row["_step"] for row in read_offline_rows(folder)] == [1, 2, 3, 4, 5, 6]
    start(folder, env)  # begins anew
    assert not list(elsewhere.glob(f"wandb/offline-run-*-{own}"))
    assert len(list(elsewhere.glob("wandb/offline-run-*"))) == 2
