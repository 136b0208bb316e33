"""Runs with evaluation tasks: what they record, when, and that nothing else of the run changes."""

from __future__ import annotations

import json
import signal
import sys

import pytest
from support.launch import ROOT, launch, write_recipe
from support.metrics_rows import read_reproducible_rows

from pipeline.checkpoint.catalog import list_published_folders
from pipeline.checkpoint.manifest import read_manifest
from pipeline.cli.train import main as train
from pipeline.evaluation.task_results import read_task_results

pytestmark = pytest.mark.slow

TASKS = ["addition_choice", "stdlib_cloze"]
SMALL = {"max_steps": 4, "checkpoint": {"every": 2, "keep_last": 9}, "log": {"every": 1}}


def write(folder, **section):
    """Write a recipe with tasks; `section` has further keys of `eval`."""
    return write_recipe(folder, **SMALL, eval={"every": 2, "tasks": TASKS, "tasks_limit": 3} | section)


def run_tasks(folder, *overrides, code=0, **section):
    """Train, and return the run's directory."""
    run = folder / "run"
    assert train(["--config", str(write(folder, **section)), f"run_dir={run}", *overrides]) == code
    return run


def read_rows(run):
    """Step -> the metrics of tasks in its rows."""
    rows = {}
    for row in read_reproducible_rows(run):
        scores = {key: value for key, value in row.items() if key.startswith("eval/tasks/")}
        if scores:
            assert row["step"] not in rows, "a row is written twice"
            rows[row["step"]] = scores
    return rows


def without_tasks(run):
    """The rows without the metrics of tasks."""
    return [
        {key: value for key, value in row.items() if not key.startswith("eval/tasks/")}
        for row in read_reproducible_rows(run)
    ]


def weights_of(run):
    """Checksums of the tensors in the last checkpoint."""
    folder = next(iter(list_published_folders(run / "checkpoints").values()))
    return [record.xxh3_128 for record in read_manifest(folder).files]


def test_a_run_records_its_tasks_and_trains_as_without_them(tmp_path, capsys):
    (tmp_path / "silent").mkdir()
    run = run_tasks(tmp_path)
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tasks")]
    rows = read_rows(run)
    names = ["addition_choice/acc", "stdlib_cloze/acc", "stdlib_cloze/perplexity"]
    assert [sorted(row) for row in rows.values()] == [[f"eval/tasks/{name}" for name in names]] * 3
    assert list(rows) == [0, 2, 4]
    assert [line.split("  ")[0] for line in shown] == ["tasks 0/4", "tasks 2/4", "tasks 4/4"]
    for step, row in rows.items():
        results = read_task_results(run / "tasks" / f"step-{step:08d}.json")
        assert results.as_row() == row
        assert results.tasks["addition_choice"].num_documents == 3
        assert results.settings | {"model": "run", "step": step, "precision": "fp32"} == results.settings
    silent = run_tasks(tmp_path / "silent", "eval.tasks=[]", "eval.tasks_limit=null")
    assert without_tasks(run) == read_reproducible_rows(silent)
    assert weights_of(run) == weights_of(silent)


@pytest.mark.nightly
def test_two_launched_ranks_record_the_same(tmp_path):
    recipe = write(tmp_path, tasks=[*TASKS, "addition"])
    options = ["--config", str(recipe), "--deepspeed", "ds_configs/zero3.json"]
    precision = "ds.bf16.enabled=false"
    for ranks in (0, 2):
        done = launch(*options, precision, f"run_dir={tmp_path / f'run{ranks}'}", ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
    alone, shared = (read_rows(tmp_path / f"run{ranks}") for ranks in (0, 2))
    assert list(alone) == list(shared) == [0, 2, 4]
    for step in alone:
        assert shared[step] == pytest.approx(alone[step], rel=1e-3)


@pytest.mark.nightly
def test_tasks_may_be_evaluated_less_often(tmp_path):
    run = run_tasks(tmp_path, "max_steps=5", every=1, tasks_every=2, tasks=TASKS[:1])
    assert list(read_rows(run)) == [0, 2, 4, 5]
    evaluated = [row["step"] for row in read_reproducible_rows(run) if "eval/loss" in row]
    assert evaluated == [0, 1, 2, 3, 4, 5]


def test_tasks_alone_are_an_evaluation_and_choose_the_best_checkpoint(tmp_path):
    """Nothing is held out. A resumed run does not evaluate its checkpoint again."""
    best = {"best_metric": "tasks/addition_choice/acc", "best_mode": "max", "tasks": TASKS[:1]}
    data = ["data.eval_fraction=0", "checkpoint.keep_best=true", "early_stopping={patience: 5}"]
    run = run_tasks(tmp_path, *data, "max_steps=2", "schedule.kind=constant", **best)
    file = run / "tasks" / "step-00000002.json"
    written = file.stat().st_mtime_ns
    run_tasks(tmp_path, *data, "schedule.kind=constant", **best)
    assert file.stat().st_mtime_ns == written
    rows = read_rows(run)
    assert list(rows) == [0, 2, 4]
    assert not [row for row in read_reproducible_rows(run) if "eval/loss" in row]
    for step, folder in list_published_folders(run / "checkpoints").items():
        best_by = read_manifest(folder).best_by
        assert (best_by.metric, best_by.value) == (
            best["best_metric"],
            rows[step]["eval/tasks/addition_choice/acc"],
        )


TASK = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/documents.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: !function own_task.text
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
FUNCTION = """
import os, signal
from pathlib import Path

def text(document):
    flag = Path(__file__).with_name("stop")
    record = Path(__file__).with_name("run") / "metrics.jsonl"
    if flag.exists() and record.exists() and '"step": 4' in record.read_text():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGTERM)
    return document["question"]
"""


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """A YAML file of a task whose function sends a signal once after step 4, if there is a file `stop`."""
    documents = [{"question": f"{number} is", "answer": f" {number}"} for number in range(3)]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    (tmp_path / "own_task.py").write_text(FUNCTION)
    (tmp_path / "own.yaml").write_text(TASK.format(folder=tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    yield "own.yaml"
    sys.modules.pop("own_task", None)


def test_a_signal_ends_tasks_early_and_the_resumed_run_makes_up_for_it(tmp_path, monkeypatch, own_task):
    """A relative path is one from the working directory; a resumed run may have other tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stop").touch()
    run = run_tasks(tmp_path, tasks=[own_task], code=128 + signal.SIGTERM)
    assert list(read_rows(run)) == [0, 2]
    assert next(iter(list_published_folders(run / "checkpoints"))) == 4
    run_tasks(tmp_path, tasks=[own_task, "stdlib_cloze"])
    rows = read_rows(run)
    assert {step: len(row) for step, row in rows.items()} == {0: 1, 2: 1, 4: 3}


def refused(tmp_path, capsys, *overrides, **section):
    """The message of a run that ends before anything is prepared."""
    capsys.readouterr()
    run_tasks(tmp_path, *overrides, code=2, **section)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert not (tmp_path / "run").exists()
    return line


@pytest.mark.nightly  # lm-eval's index takes ten seconds
def test_a_typo_ends_a_run_before_its_data_is_prepared(tmp_path, capsys):
    message = refused(tmp_path, capsys, tasks=["stdlib_cloz"])
    assert message.startswith("error: eval.tasks: ")
    assert "stdlib_cloze" in message
    assert not (tmp_path / "cache").exists()


CONTRADICTIONS = {
    "nothing": (["eval.tasks=[]"], "eval.tasks_limit is read only with eval.tasks, which is empty"),
    "best of nothing": (
        ["eval.tasks=[]", "eval.tasks_limit=null", "eval.best_metric=tasks/x/acc", "eval.best_mode=max"],
        "eval.best_metric: tasks/x/acc is a metric of a task, and eval.tasks is empty; name the task there",
    ),
    "best of few": (
        ["eval.tasks_every=2", "eval.best_metric=tasks/x/acc", "eval.best_mode=max"],
        "is missing in most evaluations, since eval.tasks_every is 2; set it to 1",
    ),
    "best of another": (
        ["eval.best_metric=tasks/addition_choice/f1", "eval.best_mode=max"],
        "eval.best_metric: 'tasks/addition_choice/f1' is no metric of this run's evaluation; it has loss, ",
    ),
    "no template": (
        ["eval.tasks_chat_template=true"],
        "eval.tasks_chat_template: the tokenizer has no chat template; remove the key",
    ),
    "no file": (["eval.tasks=[nowhere.yaml]"], "eval.tasks: "),
    "early stopping by nothing": (
        ["data.eval_fraction=0", "early_stopping={patience: 2}"],
        "early_stopping: nothing is held out to evaluate on",
    ),
    "code": (
        ["--no-import-paths", "eval.tasks=[own.yaml]"],
        "names code to run (!function own_task.text), refused: --no-import-paths",
    ),
}


@pytest.mark.daily("nothing", "best of nothing", "best of few", "no file", "code")
@pytest.mark.parametrize(("overrides", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_cannot_be_evaluated_is_one_line(tmp_path, capsys, monkeypatch, own_task, overrides, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(tmp_path, capsys, *overrides)


def test_a_model_without_text_has_no_tasks(tmp_path, capsys):
    overrides = ["model={kind: cnn}", "data={kind: digits}", "objective={kind: classification}"]
    message = refused(tmp_path, capsys, *overrides)
    assert "eval.tasks: model.kind: cnn gives no probabilities of text, which tasks need" in message


def test_the_missing_package_is_named_before_data_is_prepared(tmp_path, capsys, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("lm_eval.", "pipeline.evaluation.harness"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = refused(tmp_path, capsys)
    assert message == (
        f"error: eval.tasks needs lm-eval, which is not installed: pip install -e '{ROOT}[tasks]', "
        "or remove eval.tasks"
    )
    assert not (tmp_path / "cache").exists()
