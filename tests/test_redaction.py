"""Keys do not leave the machine: not in what W&B shows of a run, not in the difference to the commit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.wandb_server import KEY, Server, environment

from pipeline.redaction import REDACTED, redact, redact_text
from pipeline.working_tree import git_diff

# Made for this test.
SECRETS = {
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "hub": "hf_" + "AbCdEfGhIjKlMnOpQrStUv",
    "model server": "sk-" + "proj-abcDEF123456789012",
    "cloud": "AKIA" + "IOSFODNN7EXAMPLE",
    "forge": "ghp_" + "0123456789abcdefghijABCDEFGHIJ123456",
    "in a url": "user:correct-horse",
    "by its name": "correct horse battery staple",
    "of the environment": "a value like any other",
}


def planted() -> dict:
    arguments = {"cloud_id": SECRETS["cloud"], "database_password": SECRETS["by its name"]}
    model = {"kind": "code:Model", "arguments": arguments, "revision": "0" * 40, "max_new_tokens": 48}
    known = {name: SECRETS[name] for name in ("hub", "model server", "forge", "of the environment")}
    urls = [f"https://{SECRETS['in a url']}@localhost/data"]
    return {"recipe": {"model": model, "data": {"paths": urls}, "one": known, "wandb": SECRETS["wandb"]}}


@pytest.fixture
def server(tmp_path: Path):
    with Server(tmp_path / "server") as server:
        yield server


def repository(folder: Path) -> Path:
    """One with a commit, and secrets written into a tracked file since."""
    folder.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost"]
    (folder / "settings.py").write_text("steps = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    lines = ["steps = 2", f'wandb.login("{SECRETS["wandb"]}")', f'password = "{"x1" * 9}"']
    lines += [f"use {SECRETS[name]}" for name in ("hub", "cloud", "of the environment")]
    (folder / "settings.py").write_text("\n".join(lines) + "\n")
    return folder


PROGRAM = """
    import json, logging, sys
    from pathlib import Path
    from pipeline.config.data_schema import DigitsDataConfig
    from pipeline.config.model_schema import CNNConfig
    from pipeline.config.schema import RunConfig, WandbConfig
    from pipeline.sinks import build_sinks
    from pipeline.working_tree import git_diff

    logging.basicConfig(stream=sys.stdout)
    folder, planted = Path(sys.argv[1]), json.loads(sys.stdin.read())
    folder.mkdir()
    (folder / "git.diff").write_text(git_diff())
    wandb = WandbConfig(notes=planted["recipe"]["one"]["hub"])
    config = RunConfig(name="trial", max_steps=40, model=CNNConfig(kind="cnn"),
                       data=DigitsDataConfig(kind="digits"), wandb=wandb)
    with build_sinks(config, run_dir=folder, is_main_process=True, start_step=0, max_steps=40,
                     run_config=planted) as sinks:
        sinks.write(1, {"train/loss": 1.0})
"""


@pytest.mark.slow
def test_secrets_are_in_no_file_of_the_run_and_in_nothing_that_is_sent(tmp_path: Path, server: Server):
    run, cwd = tmp_path / "run-1", repository(tmp_path / "code")
    more = {"SOME_TOKEN": SECRETS["of the environment"], **KEY}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(run), f"model.token={SECRETS['forge']}"],
        input=json.dumps(planted()),
        env=environment(tmp_path, server.url, **more),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (kept,) = server.runs().values()
    assert json.loads(kept["config"])["recipe"]["value"]["model"]["revision"] == "0" * 40
    (sent,) = server.folder.glob("files/**/git.diff")
    assert "+steps = 2" in sent.read_text()
    secrets = {**SECRETS, "password": "x1" * 9, "key": KEY["WANDB_API_KEY"]}
    for file in [*run.rglob("*"), *server.folder.rglob("*")]:
        if file.is_file():
            found = [name for name, secret in secrets.items() if secret.encode() in file.read_bytes()]
            assert not found, file
    assert not [name for name, secret in secrets.items() if secret in done.stdout + done.stderr]


@pytest.mark.parametrize(
    "text",
    [
        "token = tokenizer.encode(text)",
        "for key in keys:",
        'tokenizer: "gpt2"',
        "num_key_value_heads: 8",
        "data.tokenizer.vocab_size=32000",
        "index 0123456..89abcde 100644",
        "revision: " + "0" * 40,
        'group_key = "name"',
    ],
)
def test_what_is_no_secret_stays(text: str):
    assert redact_text(text) == text


@pytest.mark.parametrize(
    ("name", "value", "stays"),
    [
        ("prompt", "def ", True),
        ("git_commit", "0" * 40, True),
        ("tokenizer", "some/hub-name", True),
        ("apiKey", "abcdefgh", False),
        ("WANDB_API_KEY", "abcdefgh", False),
        ("hf_token", "abcdefgh", False),
        ("value", "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----", False),
    ],
)
def test_fields(name: str, value: str, stays: bool):
    assert redact({"deep": [{name: value}]}) == {"deep": [{name: value if stays else REDACTED}]}


def test_no_diff_outside_of_a_repository(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_diff() is None
