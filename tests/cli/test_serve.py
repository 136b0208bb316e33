"""The command `serve`: its refusals before a model is loaded, its key, its end, and vLLM in its place."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import openai
import pytest
from support.base_model import write_base_model, write_conversations
from support.fork_server import ForkedProgram
from support.launch import ROOT, make_environment
from support.serving import serving

from pipeline.__main__ import main
from pipeline.cli.train import main as train
from pipeline.config.command_lines import format_pipeline_command

KEY = "k3y-of-a-test-5f2c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_base_model(tmp_path_factory.mktemp("base") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 99_000}))
    return folder


@pytest.fixture
def refuse(capsys):
    """`refuse("serve", ...)` -> the line of the error, and stdout."""

    def call(*arguments):
        capsys.readouterr()
        assert main(["serve", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        return line, out

    return call


def test_another_address_needs_a_key(folder, refuse, monkeypatch):
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.com"):
        assert "--api-key-env NAME" in refuse(folder, "--host", host)[0]
    monkeypatch.setenv("EMPTY", " ")
    for name in ("EMPTY", "sk-no-such-variable"):
        line, _ = refuse(folder, "--api-key-env", name)
        assert "export NAME=KEY" in line
        assert name not in line


def test_a_port_in_use_is_one_line(folder, refuse):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line, _ = refuse(folder, "--port", port)
    assert f"--port {port}: [Errno 98] Address already in use" in line
    assert "0-65535" in refuse(folder, "--port", "70000")[0]
    assert "expected 1 or more" in refuse(folder, "--max-batch", "0")[0]


def test_a_missing_package_is_named(folder, refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert f"pip install -e '{ROOT}[serve]'" in refuse(folder)[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory, folder):
    here = tmp_path_factory.mktemp("trained")
    data = write_conversations(here / "conversations.jsonl")
    changes = [f"model.pretrained={folder}", f"data.paths=[{data}]", f"data.cache_dir={here / 'cache'}"]
    changes += ["max_steps=1", "data.sequence_length=64", "wandb.mode=disabled", "sample.max_new_tokens=0"]
    recipe = ROOT / "launch" / "recipes" / "finetune_chat.yaml"
    assert train(["--config", str(recipe), f"run_dir={here / 'run'}", *changes]) == 0
    return here / "run"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_served_with_a_key_and_ends_on_a_signal(tmp_path, run, number, refuse):
    line, _ = refuse(run, "--engine", "vllm")
    assert line.endswith(
        f"export it first: {format_pipeline_command('export', str(run), 'FOLDER', '--step=last')}"
    )
    with serving(tmp_path, run, "--api-key-env", "TEST_KEY", TEST_KEY=KEY) as server:
        for key in ("wrong", KEY + "x", "é"):
            with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
                openai.OpenAI(base_url=server.url, api_key=key, max_retries=0).models.list()
        client = openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0)
        assert client.models.list().data[0].id == "run"
        stream = client.completions.create(
            model="run", prompt="Hello!", temperature=0, max_tokens=90_000, stream=True
        )
        next(iter(stream))
        assert server.stop(number) == (130 if number == signal.SIGINT else 128 + number)
        with pytest.raises(openai.APIError, match="the server stops"):
            list(stream)
        said = server.log.read_text()
        assert "Traceback" not in said
        assert KEY not in said


@pytest.mark.slow
def test_vllm_takes_the_place_of_this_server(tmp_path, folder, refuse, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    line, out = refuse(folder, "--engine", "vllm", "--name", "my model", "--port", "8001")
    assert "vLLM is not installed here" in line
    words = f"vllm serve {folder} '--served-model-name=my model' --host=127.0.0.1 --port=8001"
    assert out == words + "\n"
    program = tmp_path / "vllm"
    program.write_text(
        f'#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.environ["VLLM_API_KEY"])\n'
    )
    program.chmod(0o755)
    words = ["-m", "pipeline", "serve", str(folder), "--engine", "vllm", "--api-key-env", "TEST_KEY"]
    environment = make_environment(TEST_KEY=KEY, PATH=f"{tmp_path}{os.pathsep}/usr/bin")
    process = ForkedProgram(words, environment, tmp_path / "out", tmp_path / "err")
    assert process.wait(timeout=120) == 0
    command, result = (tmp_path / "out").read_text().splitlines()
    assert KEY not in command
    assert result.endswith(f"] {KEY}")
    assert f"'serve', '{folder}', '--served-model-name=tiny'" in result
