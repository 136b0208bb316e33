"""The Python API: the script of docs/reference/api.md, and a run in somebody else's process."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from support.launch import (
    ROOT,
    TORCHRUN,
    CompletedCommand,
    launch,
    make_environment,
    read_reproducible_rows,
    run_directories,
    run_python,
    write_recipe,
)
from support.rank_pool import free_port

import pipeline
import pipeline.errors
from pipeline.cli.train import main

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
SCRIPT, NOTEBOOK = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def run_script(folder: Path, text: str, ranks: int = 0) -> CompletedCommand:
    """Run it as `python my_script.py`, or through torchrun on `ranks`."""
    (folder / "my_script.py").write_text(text)
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return run_python(*(launcher if ranks else []), "my_script.py", cwd=folder, PYTHONPATH=str(ROOT))


@pytest.mark.daily("0")
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_documented_script_is_the_command(tmp_path, ranks):
    recipe = write_recipe(tmp_path)
    split = tmp_path / "ds_config.json"
    split.write_text((ROOT / "ds_configs" / "zero2.json").read_text())
    commanded = tmp_path / "commanded"
    arguments = ["--config", str(recipe), "--deepspeed", str(split), "max_steps=6", f"run_dir={commanded}"]
    done = launch(*arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    done = run_script(tmp_path, SCRIPT, ranks)
    assert done.returncode == 0, done.stderr
    (run,) = run_directories(tmp_path)
    assert read_reproducible_rows(run) == read_reproducible_rows(commanded)
    assert json.loads((run / "summary.json").read_text())["global_step"] == 6
    assert (tmp_path / "exported" / "config.json").exists()
    told = re.findall(r"{'eval/loss': ([^,]*), ", done.stdout)  # two ranks may share a line
    assert told == [str(read_reproducible_rows(run)[-1]["eval/loss"])] * max(1, ranks)
    assert done.stdout.count("def ") == max(1, ranks)


def test_an_exception_on_one_rank_ends_the_launch(tmp_path):
    write_recipe(tmp_path)
    text = SCRIPT.replace("print(step.global_step,", "raise RuntimeError('mine',").replace(
        '"ds_config.json"', "None"
    )
    done = run_script(tmp_path, text, 2)
    assert done.returncode != 0
    assert "RuntimeError: ('mine', " in done.stderr


AFTER_ANOTHER = """
import pipeline

def main():
    for name in ("one", "other"):
        settings = pipeline.load_settings("recipe.yaml", "ds_config.json", [f"run_dir={name}"])
        with pipeline.Run(settings) as run:
            run.train()

if __name__ == "__main__":
    main()
"""


def test_one_deepspeed_run_after_the_other_in_a_process(tmp_path):
    write_recipe(tmp_path, max_steps=4)
    (tmp_path / "ds_config.json").write_text((ROOT / "ds_configs" / "zero2.json").read_text())
    done = run_script(tmp_path, AFTER_ANOTHER)
    assert done.returncode == 0, done.stderr
    assert read_reproducible_rows(tmp_path / "one") == read_reproducible_rows(tmp_path / "other")


def test_importing_it_loads_nothing(tmp_path):
    recipe = write_recipe(tmp_path)
    code = (
        "import sys, pipeline; dir(pipeline); pipeline.PipelineError\n"
        f"print(pipeline.load_settings({str(recipe)!r}, overrides=['max_steps=3']).config.max_steps)\n"
        "print([name for name in ('torch', 'deepspeed', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=make_environment(),
        check=False,
    )
    assert done.stdout.splitlines() == ["3", "[]"], done.stderr


def test_an_installation_has_all_files_and_the_types():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["pipeline"]
    found = {path for pattern in patterns for path in (ROOT / "pipeline").glob(pattern)}
    taken = {path for path in found if "shipped" not in path.parts}  # links: the wheel's own test has them
    others = {path for path in (ROOT / "pipeline").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert taken == others
    assert ROOT / "pipeline" / "py.typed" in taken


@pytest.mark.parametrize("name", pipeline.__all__)
def test_what_is_offered_is_there_and_documented(name):
    assert getattr(pipeline, name).__doc__
    assert name in dir(pipeline)
    with pytest.raises(AttributeError, match="no attribute 'Runs'"):
        _ = pipeline.Runs


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """(recipe, the rows of the command with it)."""
    folder = tmp_path_factory.mktemp("commanded")
    recipe = write_recipe(folder, max_steps=6)
    assert main(["--config", str(recipe), f"run_dir={folder / 'run'}"]) == 0
    return recipe, read_reproducible_rows(folder / "run")


def settings_of(commanded, folder: Path, *overrides: str):
    return pipeline.load_settings(commanded[0], None, [f"run_dir={folder / 'run'}", *overrides])


@pytest.mark.parametrize("name", re.findall(r"^::: ([\w.]+)$", PAGE, re.M))
def test_a_directive_of_the_page_names_something_documented(name):
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def test_the_page_has_every_name_and_every_error():
    named = set(re.findall(r"^::: ([\w.]+)$", PAGE, re.M))
    kinds = vars(pipeline.errors).values()
    errors = {
        kind.__name__ for kind in kinds if inspect.isclass(kind) and issubclass(kind, pipeline.PipelineError)
    }
    assert named == {
        *(f"pipeline.{name}" for name in pipeline.__all__ if name != "PipelineError"),
        *(f"pipeline.errors.{name}" for name in errors),
    }


def test_a_run_stepped_by_hand_goes_on_by_the_command(tmp_path, commanded, capsys):
    recipe, rows = commanded
    with pipeline.Run(settings_of(commanded, tmp_path)) as run:
        assert (run.global_step, run.max_steps, run.is_main_process) == (0, 6, True)
        with pytest.raises(pipeline.PipelineError, match="nothing to save before its first step"):
            run.save()
        first = run.evaluate()
        assert first == run.evaluate()  # nothing new to know
        steps = [run.step()]
        run.generate("class ", max_new_tokens=2)  # training goes on as if it had not been
        steps += [run.step() for _ in range(2)]
        assert [step.global_step for step in steps] == [1, 2, 3]
        assert steps[0].row["train/loss"] == rows[1]["train/loss"]
        between = run.evaluate()
        assert between["eval/loss"] < first["eval/loss"]
        assert run.save() == run.directory / "checkpoints" / "step-00000003"
        written = run.generate("def ", max_new_tokens=9)
    assert not (run.directory / "summary.json").exists()
    assert pipeline.evaluate(run.directory)["eval/loss"] == pytest.approx(between["eval/loss"], rel=1e-6)
    assert pipeline.generate(run.directory, "def ", max_new_tokens=9) == written != "def "
    assert pipeline.export(run.directory, tmp_path / "out", step=3).auto_class
    capsys.readouterr()
    assert main(["--config", str(recipe), f"run_dir={run.directory}"]) == 0
    assert "resuming" in capsys.readouterr().err
    own = {"step": 3} | between
    assert [row for row in read_reproducible_rows(run.directory) if row != own] == rows


def test_what_the_command_began_goes_on_by_hand(tmp_path, commanded):
    _, rows = commanded
    with pipeline.Run(settings_of(commanded, tmp_path)) as run:
        run.step()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert run.step().global_step == 2
        assert run.step() is None
        assert run.stopped_by == signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert run.evaluate() is None
    assert not (run.directory / "summary.json").exists()
    with pipeline.Run(settings_of(commanded, tmp_path)) as run:
        assert run.global_step == 2
        run.train()
        assert (run.global_step, run.stopped_by) == (6, None)
        assert run.evaluate() == {key: value for key, value in rows[-1].items() if key != "step"}
    assert read_reproducible_rows(run.directory) == rows
    assert json.loads((run.directory / "summary.json").read_text())["global_step"] == 6
    run.close()  # once more does nothing


def test_mistakes_are_exceptions_that_say_the_command_s_line(tmp_path, commanded, capsys):
    recipe, _ = commanded
    assert main(["--config", str(recipe), "model.num_layer=1"]) == 2
    said = capsys.readouterr().err.strip()
    with pytest.raises(pipeline.PipelineError) as error:
        pipeline.load_settings(recipe, overrides=["model.num_layer=1"])
    assert said == f"error: {error.value}"
    settings = settings_of(commanded, tmp_path, "data.eval_fraction=0")
    with pipeline.Run(settings) as run:
        with pytest.raises(pipeline.PipelineError, match="nothing is held out"):
            run.evaluate()
        with pytest.raises(pipeline.PipelineError, match="in use by another process"):
            pipeline.Run(settings)
        run.step()
    with suppress(ZeroDivisionError), pipeline.Run(settings) as run:
        run.train()
        _ = 1 / 0
    assert not (run.directory / "summary.json").exists(), "it did not end as it should"
    with pipeline.Run(settings) as run:  # unlocked
        assert run.step() is None


def test_the_lines_for_a_notebook(commanded, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(commanded[0].read_text())
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"pipeline": pipeline}
    exec(compile(NOTEBOOK, "api.md", "exec"), names)
    assert names["run"].global_step == 1
