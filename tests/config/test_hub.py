"""A name on the hub where the network is not there: one line soon, or the copy in the cache."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import yaml
from support.base_model import write_base_model
from support.launch import ROOT, make_environment

from pipeline.config import hub
from pipeline.config.hub import use_hub_or_cache
from pipeline.errors import ModelError

COMMIT = "0" * 40
COMMANDS = {
    "plan": ["plan", "--gpu", "h100"],
    "inspect": ["inspect"],
    "train": ["train"],
}


class Silent:
    """A server that takes connections and never answers, and how many it took."""

    def __init__(self) -> None:
        self.taken: list[socket.socket] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self.socket.accept()[0])
            except OSError:
                return


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    for each in (server.socket, *server.taken):
        each.close()


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The sky is blue. " * 400)
    data = {"kind": "text", "paths": [str(tmp_path / "texts")], "sequence_length": 16}
    data["cache_dir"] = str(tmp_path / "cache")
    tree = {"max_steps": 1, "model": {"kind": "causal_lm", "pretrained": "some/model"}, "data": data}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run(command: str, recipe: Path, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    home = str(folder / "hf")
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *COMMANDS[command], "--config", str(recipe)],
        cwd=folder,
        env=make_environment(PYTHONPATH=str(ROOT), HF_HOME=home, **extra),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.daily("refuses-plan", "never answers-train")
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("endpoint", ["refuses", "does not resolve", "never answers"])
def test_without_network_there_is_one_line(recipe, tmp_path, silent, command, endpoint):
    urls = {
        "refuses": "http://127.0.0.1:9",
        "does not resolve": "http://nowhere.invalid",
        "never answers": silent.url,
    }
    done = run(command, recipe, tmp_path, HF_ENDPOINT=urls[endpoint])
    assert (done.returncode, done.stdout) == (2, "")
    start = "error: model.pretrained: 'some/model': there is no such folder, the hub does not answer "
    assert done.stderr.startswith(f"{start}({urls[endpoint]}: ")
    assert done.stderr.endswith("download it on a machine with network access: hf download some/model\n")
    assert done.stderr.count("\n") == 1
    assert len(silent.taken) == (endpoint == "never answers"), "asked once"
    assert not (tmp_path / "runs").exists()


@pytest.mark.daily("train")
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_copy_in_the_cache_is_used_without_network(recipe, tmp_path, silent, command):
    repository = tmp_path / "hf" / "hub" / "models--some--model"
    write_base_model(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    done = run(command, recipe, tmp_path, HF_ENDPOINT=silent.url, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert "retry" not in done.stderr.lower()
    assert len(silent.taken) <= 2, "asked once in a minute, by each process"


def test_the_client_is_as_it_was_and_asked_again_later(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub._answers.clear()
    with (
        pytest.raises(ModelError, match="hf download some/model"),
        use_hub_or_cache("key", "some/model", ModelError),
    ):
        pass
    assert constants.HF_HUB_OFFLINE is False
    with use_hub_or_cache("key", str(tmp_path), ModelError):  # a folder: nothing is asked
        assert constants.HF_HUB_OFFLINE is False


def test_an_answer_counts_for_a_minute_from_when_it_was_asked_for(monkeypatch):
    clock = {"now": 59.0}
    asked = []
    monkeypatch.setattr(hub, "_answers", {})
    monkeypatch.setattr(hub, "_ask_hub", lambda endpoint: asked.append(clock["now"]))
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    for clock["now"] in (59.0, 61.0, 118.0, 119.0, 120.0):
        hub._find_problem("http://hub")
    assert asked == [59.0, 119.0]


@pytest.mark.parametrize("name", ["a b", "-x/y", "x..y"])
def test_what_no_hub_can_have_is_not_asked_for(name):
    with (
        pytest.raises(ModelError, match="no valid hub name"),
        use_hub_or_cache("key", name, ModelError),
    ):
        pass


@pytest.mark.slow
def test_a_plan_reads_a_folder_with_its_config_alone(recipe, tmp_path):
    write_base_model(tmp_path / "whole")
    (tmp_path / "some" / "model").mkdir(parents=True)
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "some" / "model")
    done = run("plan", recipe, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Memory of the fullest rank" in done.stdout
