"""No secret leaves a process: every form, harmless text that looks similar, and every way out of a run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from monitoring.trackers.test_trackers_notify import Server as Webhook
from secret_forms import FORMS, HARMLESS, HARMLESS_VARIABLES, VARIABLES
from support.launch import TRAIN, CompletedCommand, launch, run_directories, run_python, write_recipe
from support.wandb_server import KEY, WandbServer

from pipeline.errors import ConfigError, escape_unprintable, summarize_error
from pipeline.monitoring.events import Event
from pipeline.monitoring.report.page import encode_runs
from pipeline.redaction import REDACTED, declare_secret_variable, redact, redact_text
from pipeline.training.api import evaluate
from pipeline.training.run_directory import read_git_diff


def rests(secret: str) -> set[str]:
    """The secret, or the longest parts of one that is long, none of which may be left."""
    return {secret} if len(secret) < 16 else {secret[i : i + 12] for i in range(len(secret) - 11)}


@pytest.mark.parametrize(("text", "secret"), FORMS, ids=[str(number) for number in range(len(FORMS))])
def test_a_secret_is_hidden_whatever_its_form(text: str, secret: str):
    hidden = redact_text(text)
    assert REDACTED in hidden
    assert not [rest for rest in rests(secret) if rest in hidden], hidden
    assert redact_text(hidden) == hidden
    assert not [rest for rest in rests(secret) if rest in redact_text(f"a line\n  {text}\nanother, {text}")]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text_stays_as_it_is(text: str, monkeypatch):
    for name, value in HARMLESS_VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert redact_text(text) == text
    assert redact({"text": text, "words": [text]}) == {"text": text, "words": [text]}


@pytest.mark.parametrize(
    "key",
    [
        "AKIA" + "ABCD1234" * 2,
        "gh" + "p_" + "Ab1" * 12,
        "gl" + "pat-" + "abc7" * 5,
        "SG." + "a1" * 11 + "." + "b2" * 21 + "c",
        "xox" + "b-" + "123456789012-" * 12 + "a1b2",
        "sq0" + "csp-" + "a1B\\" * 10 + "a1B",
        "sk_" + "live_" + "aB1" * 8,
        "AC" + "0a" * 16,
        "AccountKey=" + "aB1+" * 22,
        "pypi-" + "AgEIcHlwaS5vcmc" + "aB1_" * 20,
    ],
)
def test_a_key_is_hidden_directly_behind_a_word(key: str):
    for before in ("", "prefix", "prefix_", "9"):
        assert key[-8:] not in redact_text(f"got {before}{key} there")


def test_the_tables_are_as_long_as_they_must_be():
    assert len(FORMS) >= 60
    assert len(HARMLESS) >= 40


@pytest.mark.parametrize("name", VARIABLES)
def test_the_value_of_a_secret_variable_is_hidden_anywhere(name: str, monkeypatch):
    value = VARIABLES[name]
    monkeypatch.setenv(name, value)
    for written in (value, json.dumps(value), repr(value), shlex.quote(value)):
        assert redact_text(f"before {written} behind") != f"before {written} behind"
        assert value not in redact_text(f"before ({written}) behind")


@pytest.mark.parametrize("name", HARMLESS_VARIABLES)
def test_the_value_of_another_variable_is_not(name: str, monkeypatch):
    monkeypatch.setenv(name, HARMLESS_VARIABLES[name])
    text = f"before {HARMLESS_VARIABLES[name]} behind; nobody is true to one"
    assert redact_text(text) == text


def test_a_variable_can_be_declared_secret(monkeypatch):
    monkeypatch.setenv("MY_PLACE", "https://localhost/my-place")
    assert "my-place" in redact_text("to https://localhost/my-place")
    declare_secret_variable("MY_PLACE")
    assert "my-place" not in redact_text("to https://localhost/my-place")


@pytest.mark.slow
@pytest.mark.daily("a", "password=", "https://a@", "A7.")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part",
    [
        *("a", "key-", "password=", "--token ", "://", "a://b:c", "eyJ-", "https://a@", '\\"', "A7."),
        *("curl -u ", "-----BEGIN " + "PRIVATE KEY-----"),
    ],
)
def test_the_time_is_linear_in_the_length_of_a_line(part: str):
    """Quadratic, two million characters would take hours."""
    redact_text(part * (2_000_000 // len(part)))


def test_words_behind_an_option_and_entries_of_a_list_of_variables():
    words = ["train.py", "--token", "abc", "--api-key=abcdefgh", "--steps", "3", "--quiet"]
    assert redact(words) == [
        "train.py",
        "--token",
        REDACTED,
        f"--api-key={REDACTED}",
        "--steps",
        "3",
        "--quiet",
    ]
    variables = [{"name": "DB_PASSWORD", "value": "x"}, {"name": "STEPS", "value": "3"}]
    assert redact(variables) == [{"name": "DB_PASSWORD", "value": REDACTED}, {"name": "STEPS", "value": "3"}]


def test_numbers_are_hidden_in_a_password_alone():
    tree = {"password": 12345678, "tokens": 5, "max_tokens": 2048, "token": 7, "secrets": {"a": "b", "n": 3}}
    hidden = tree | {"password": REDACTED, "secrets": {"a": REDACTED, "n": 3}}
    assert redact(tree) == hidden
    assert redact(hidden) == hidden


def test_errors_events_and_log_lines_have_none_also_where_they_are_cut():
    secret = "hf" + "_" + "Ab1" * 12
    for start in range(0, 1200, 7):
        error = ConfigError("x" * start + f" token {secret} " + "y" * 1200)
        for said in (
            str(error),
            summarize_error(error),
            summarize_error(RuntimeError(f"{'x ' * start}{secret}"), 1000),
        ):
            assert secret[:8] not in said
    assert secret not in escape_unprintable(f"got {secret}")
    event = Event("run_failed", secret, secret, fields={"traceback": secret, "loss": 1.0, "password": "x"})
    assert event == Event(
        "run_failed", REDACTED, REDACTED, fields={"traceback": REDACTED, "loss": 1.0, "password": REDACTED}
    )


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
    assert read_git_diff() is None


def write_repository(folder: Path) -> None:
    """One with a commit, and secrets written into a tracked file since."""
    folder.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost"]
    (folder / "settings.py").write_text("steps = 1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    lines = ["steps = 2", f'wandb.login("{KEY["WANDB_API_KEY"]}")', 'password = "word-of-a-diff"']
    lines += [f"use {TAG}", f"use {VARIABLES['HF_TOKEN']}"]
    (folder / "settings.py").write_text("\n".join(lines) + "\n")


OWN = """
    import os
    from pathlib import Path

    import torch
    from torch.utils.data import TensorDataset

    from pipeline.monitoring.events import Event

    RANK = int(os.environ.get("RANK", "0"))
    SAVED = Path(__file__).parent / "runs"


    class Data(TensorDataset):
        def __getitem__(self, index):
            if RANK == int(os.environ["FAILS"]) and any(SAVED.glob("*/checkpoints/*/manifest.json")):
                raise RuntimeError(Path(os.environ["TEXT"]).read_text())
            return super().__getitem__(index)


    def data(split, **arguments):
        return Data(torch.randn(64, 3), torch.arange(64) % 4)


    def model(**arguments):
        return torch.nn.Linear(3, 4)


    class Tracker:
        def __init__(self, run_dir, start_step, run_config, password):
            assert password == "own-sinks-word"  # what it is given itself is true
            self.file = open(Path(run_dir) / "own_sink.txt", "a")
            print(run_config, file=self.file)

        def write(self, step, row):
            pass

        def tell(self, step, event):
            print(step, event, file=self.file, flush=True)

        def close(self, exit_code):
            self.file.close()
"""
KEEPER = "import os, sys; open(sys.argv[1], 'a').write(sys.stdin.read() + str(dict(os.environ)) + chr(10))"
IN_RECIPE = {
    "hub_token": "recipe-word-1",
    "url": "https://me:recipe-word-2@localhost/data",
    "words": ["--api-key", "recipe-word-3"],
    "password": 73218764,
}
TRUE_ARGUMENTS = {"eos_token": "</s>", "primary_key": "identifier", "max_tokens": 2048, "revision": "0" * 40}
WORDS = (*(f"recipe-word-{n}" for n in (1, 2, 3)), "73218764", "own-sinks-word", "command-line-word")
TAG = "hf" + "_" + "TagTagTag7" * 3


def failing_recipe(folder: Path, name: str) -> Path:
    """A run with every sink, whose recipe has secrets, and whose data raise an error that has them all."""
    write_repository(folder)
    (folder / "own_code.py").write_text(textwrap.dedent(OWN))
    (folder / "keeper.py").write_text(KEEPER)
    # A header hides the rest of its line, and a private key its lines: one form a line.
    text = "\n".join(
        [*(text for text, _ in FORMS), *HARMLESS, *(f"found {value} there" for value in VARIABLES.values())]
    )
    (folder / "message.txt").write_text(text)
    return write_recipe(
        folder,
        max_steps=40,
        model={"kind": "own_code:model", "args": {"api_key": "recipe-word-1", **TRUE_ARGUMENTS}},
        data={"kind": "own_code:data", "args": IN_RECIPE | TRUE_ARGUMENTS},
        objective={"kind": "classification"},
        eval={},
        batch={"micro_batch_size": 2, "global_batch_size": 4},
        log={
            "every": 1,
            "tensorboard": True,
            "trackers": [{"kind": "own_code:Tracker", "args": {"password": "own-sinks-word"}}],
        },
        wandb={"tags": [TAG], "notes": f"with {TAG}", "job_type": TAG, "group": TAG},
        notify={
            "command": f"{sys.executable} {folder / 'keeper.py'} {folder / 'told.txt'}",
            "webhook_env": "PLACE_OF_MINE",
        },
        checkpoint={"every": 1},
    )


@pytest.mark.daily("the main process fails")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2], ids=["the main process fails", "rank 1 of 2 fails"])
def test_no_secret_leaves_a_run_by_any_way(tmp_path: Path, ranks: int):
    """W&B's server, a command, a webhook, a tracker of the user's, the console and every file get none."""
    folder = tmp_path / "made"
    recipe = failing_recipe(folder, "run")
    webhook = Webhook()
    extra = VARIABLES | HARMLESS_VARIABLES
    extra |= {"FAILS": str(ranks - 1), "TEXT": str(folder / "message.txt"), "PLACE_OF_MINE": webhook.url}
    extra |= {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    words = ["--config", str(recipe), "data.args.client_secret=command-line-word"]
    launcher = ["-m", "pipeline.distributed.launch.multi_gpu", "--num_gpus", "2"]
    with WandbServer(tmp_path / "server") as server:
        extra |= {"WANDB_BASE_URL": server.url, **KEY}
        done = run_python(*([TRAIN] if ranks == 1 else launcher), *words, cwd=folder, **extra)
    webhook.http.shutdown()
    assert done.returncode == 1, done.stderr[-3000:]
    (run,) = run_directories(folder)
    assert webhook.posted
    told = folder / "told.txt"
    # The command has the run's own environment, as it has to.
    (folder / "told.json").write_text(
        "\n".join(line.partition("}{")[0] for line in told.read_text().splitlines())
    )
    told.unlink()
    (folder / "posted.json").write_text(json.dumps([body for _, body in webhook.posted]))
    check_that_nothing_leaked(folder, run, server.folder, done, ranks - 1, webhook.url)
    (kept,) = server.runs().values()
    arguments = json.loads(kept["config"])["recipe"]["value"]["model"]["args"]
    assert arguments.items() >= TRUE_ARGUMENTS.items()
    (sent,) = server.folder.glob("files/**/git.diff")
    assert "+steps = 2" in sent.read_text()


def check_that_nothing_leaked(
    folder: Path, run: Path, sent: Path, done: CompletedCommand, failed: int, url: str
) -> None:
    secrets = {secret for _, secret in FORMS} | set(VARIABLES.values())
    secrets |= {*WORDS, TAG, url, "word-of-a-diff", KEY["WANDB_API_KEY"]}
    secrets -= {"x1", "short", "escaped", "a b"}  # also words of our own text
    looked_at = {
        path: path.read_bytes()
        for path in [*run.rglob("*"), *sent.rglob("*"), folder / "told.json", folder / "posted.json"]
        if path.is_file()
    }
    looked_at[Path("console")] = (done.stdout + done.stderr).encode()
    for path, content in looked_at.items():
        for secret in secrets:
            assert secret.encode() not in content, (path, secret)
    names = {path.name for path in looked_at}
    assert {
        "metrics.jsonl",
        "recipe.yaml",
        "report.html",
        "own_sink.txt",
        "manifest.json",
        f"rank{failed:05d}.log",
    } <= names
    assert any("tfevents" in name for name in names)
    assert any(name.endswith(".wandb") for name in names)
    log = (run / "logs" / f"rank{failed:05d}.log").read_text()
    assert not [text for text in HARMLESS if text not in log]
    kept = yaml.safe_load((run / "recipe.yaml").read_text())
    assert kept["data"]["args"].items() >= TRUE_ARGUMENTS.items()
    assert kept["model"]["args"].items() >= TRUE_ARGUMENTS.items()
    assert kept["data"]["args"]["words"] == ["--api-key", REDACTED]


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch) -> Path:
    """A recipe with secrets, whose run needs none of them."""
    monkeypatch.setenv("FAILS", "none")
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "own_code.py").write_text(textwrap.dedent(OWN).replace('int(os.environ["FAILS"])', "None"))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(folder))
    return write_recipe(
        folder,
        max_steps=2,
        model={"kind": "own_code:model"},
        data={"kind": "own_code:data", "args": {"hub_token": "first-word-1", "eos_token": "</s>"}},
        objective={"kind": "classification"},
        eval={},
    )


@pytest.mark.slow
def test_a_run_goes_on_with_another_token_and_a_command_asks_for_it(own_code: Path):
    done = launch("--config", str(own_code))
    assert done.returncode == 0, done.stderr
    (run,) = run_directories(own_code.parent)
    assert "first-word-1" not in (run / "recipe.yaml").read_text()
    again = ["--config", str(own_code), f"run_dir={run}"]
    done = launch(*again, "data.args.hub_token=other-word-2", "max_steps=4")
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["global_step"] == 4
    done = launch(*again, "data.args.eos_token=<s>", "max_steps=6")
    assert done.returncode == 2
    assert "data.args.eos_token was </s>, is <s>" in done.stderr
    with pytest.raises(
        ConfigError, match=r"data.args.hub_token is \[redacted\], because a run stores no secrets"
    ):
        evaluate(run)
    row = evaluate(run, ["data.args.hub_token=third-word-3"])
    assert "eval/loss" in row


@pytest.mark.slow
def test_a_dry_run_shows_none(own_code: Path):
    done = launch("--config", str(own_code), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "hub_token: '[redacted]'" in done.stdout
    assert "first-word-1" not in done.stdout + done.stderr


@pytest.mark.slow
def test_an_exception_that_nothing_catches_is_printed_without(tmp_path: Path):
    program = """
        import sys, threading
        from pipeline.errors import report_errors

        def fail():
            raise ValueError("password=hunter2")

        def work():
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
            fail()

        report_errors(work)
    """
    words = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "hunter2" not in done.stderr
    assert done.stderr.count("ValueError: password=[redacted]") == 2


def test_the_report_of_an_earlier_version_s_run_has_none(tmp_path: Path):
    run = tmp_path / "run"
    secret = "gl" + "pat-" + "abc7" * 6
    (run / "logs").mkdir(parents=True)
    row = {"step": 1, "train/loss": 1.0}
    events = [{"step": 1, "event": name, "message": secret, "level": "error"} for name in ("x", "run_failed")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [row, *events]))
    arguments = {"password": secret, "words": ["--token", secret]}
    (run / "recipe.yaml").write_text(json.dumps({"model": {"kind": "x:y", "args": arguments}}))
    (run / "logs" / "rank00000.log").write_text(f"2026-11-27 10:00:00,000 ERROR pipeline.failure {secret}\n")
    shown = encode_runs([run])
    assert shown.count(REDACTED) >= 5
    assert secret not in shown
