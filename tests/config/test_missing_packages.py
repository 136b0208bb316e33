"""A run needs the packages of its features alone, and says in one line how to install a missing one."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib

import pytest
from support.launch import DIGITS, ROOT, launch, run_directories, write_recipe
from support.metrics_rows import read_reproducible_rows

from pipeline.__main__ import main
from pipeline.cli.train import main as train
from pipeline.config import optional_packages
from pipeline.config.command_lines import format_pipeline_command
from pipeline.config.optional_packages import DISTRIBUTIONS, EXTRAS, is_installed
from pipeline.config.schema import RunConfig
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError
from pipeline.monitoring.report.page import write_final_report
from pipeline.monitoring.trackers import check_trackers

HIDING = ROOT / "tests" / "config" / "hidden_packages"
OPTIONAL = (
    "wandb plotly datasets pyarrow sklearn PIL peft accelerate jinja2 ninja "
    "tensorboard torchao bitsandbytes pynvml kubernetes_validate "
    "lm_eval evaluate starlette uvicorn openai"
)


def without(packages: str) -> dict[str, str]:
    """Return environment variables that hide packages from a launch."""
    path = os.pathsep.join(filter(None, [str(HIDING), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "PYTHON_HIDDEN_PACKAGES": packages}


@pytest.mark.daily("plain")
@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--deepspeed", "ds_configs/zero2.json"]], ids=["plain", "zero2"])
def test_a_run_needs_none_of_the_optional_packages(tmp_path, split):
    recipe = write_recipe(tmp_path, max_steps=3, wandb={"mode": "auto"})
    done = launch(*split, "--config", str(recipe), **without(OPTIONAL))
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = run_directories(tmp_path)
    assert [row["step"] for row in read_reproducible_rows(run) if "train/loss" in row] == [1, 2, 3]
    assert not (run / "report.html").exists()
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert (
        f"{run / 'report.html'} is not written: the report needs plotly, which is not installed: "
        f"pip install plotly; then run: {format_pipeline_command('report', run)}" in said
    )
    assert "wandb.mode: auto needs wandb, which is not installed: pip install wandb" in said
    packages = json.loads((run / "environment.json").read_text())["packages"]
    assert packages["wandb"] is None
    assert packages["torch"] is not None


@pytest.mark.nightly  # the same words, in one process: below
def test_a_run_that_needs_a_missing_package_ends_with_one_line(tmp_path):
    done = launch("--config", str(write_recipe(tmp_path, wandb={"mode": "offline"})), **without("wandb"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: wandb.mode: offline needs wandb, which is not installed: pip install wandb, "
        "or set wandb.mode=disabled"
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert not run_directories(tmp_path)


@pytest.fixture
def hide(monkeypatch):
    """Hides a package from this process."""

    def hide(module):
        for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)

    return hide


def text_data(tmp_path, **given):
    tokenizer = {"vocab_size": 300}
    return {"kind": "text", "sequence_length": 32, "tokenizer": tokenizer, "cache_dir": str(tmp_path)} | given


def chat(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    path.write_text(f"{json.dumps({'messages': turns})}\n" * 50)
    return text_data(tmp_path, paths=[str(path)]) | {"kind": "chat", "chat_template": "chatml"}


# (hidden module, data section, message)
DATA = {
    "chat": ("jinja2", chat, "the chat template needs jinja2, which is not installed: pip install jinja2"),
}


@pytest.mark.parametrize(("module", "data", "message"), DATA.values(), ids=DATA)
def test_data_that_needs_a_missing_package_is_refused_in_one_line(
    tmp_path, capsys, hide, module, data, message
):
    recipe = write_recipe(tmp_path, data=data(tmp_path))
    hide(module)
    assert main(["prepare", "--config", str(recipe)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message.format(path=tmp_path)}"


def clone(extra):
    """The argument of `pip install -e` that installs an extra of this clone."""
    return shlex.quote(f"{ROOT}[{extra}]")


IMAGES = {"model": {"kind": "cnn"}, "objective": {"kind": "classification"}}
INSPECTED = {
    "digits": (
        "sklearn",
        DIGITS,
        f"data.kind: digits needs scikit-learn, which is not installed: pip install -e {clone('images')}",
    ),
    "images": (
        "PIL",
        IMAGES | {"data": {"kind": "images", "path": ".", "image_size": 8}},
        f"data.kind: images needs pillow, which is not installed: pip install -e {clone('images')}",
    ),
}


@pytest.mark.parametrize(("module", "sections", "message"), INSPECTED.values(), ids=INSPECTED)
def test_images_that_need_a_missing_package_are_refused_in_one_line(
    tmp_path, capsys, hide, module, sections, message
):
    recipe = write_recipe(tmp_path, **sections)
    hide(module)
    assert main(["inspect", "--config", str(recipe)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


MODELS = {
    "nf4": (
        "bitsandbytes",
        ["adapter=lora", "adapter.quantize=nf4"],
        "adapter.quantize: nf4 needs bitsandbytes, which is not installed: "
        f"pip install -e {clone('qlora')}, or remove adapter.quantize",
    ),
    "fp8": (
        "torchao",
        ["model.fp8=rowwise"],
        "model.fp8: rowwise needs torchao, which is not installed: "
        f"pip install -e {clone('fp8')}, or set model.fp8=none",
    ),
}


@pytest.mark.parametrize(("module", "arguments", "message"), MODELS.values(), ids=MODELS)
def test_a_model_that_needs_a_missing_package_is_refused_before_torch_is_loaded(
    tmp_path, capsys, monkeypatch, hide, module, arguments, message
):
    monkeypatch.chdir(ROOT)
    recipe = write_recipe(tmp_path)
    hide(module)
    assert train(["--dry-run", "--config", str(recipe), *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (
            "tensorboard",
            {"log": {"tensorboard": True}},
            "log.tensorboard: true needs tensorboard, which is not installed: "
            f"pip install -e {clone('tensorboard')}, or set log.tensorboard=false",
        ),
        (
            "wandb",
            {"wandb": {"mode": "online"}},
            "wandb.mode: online needs wandb, which is not installed: pip install wandb, "
            "or set wandb.mode=disabled",
        ),
    ],
    ids=["tensorboard", "wandb"],
)
def test_a_sink_that_needs_a_missing_package_is_refused_before_the_data_is_prepared(
    hide, module, changes, message
):
    recipe = {"model": {"kind": "cnn"}, "data": {"kind": "digits"}, "objective": {"kind": "classification"}}
    config = RunConfig.model_validate(recipe | {"batch": {"micro_batch_size": 1}} | changes)
    hide(module)
    with pytest.raises(ConfigError) as raised:
        check_trackers(config)
    assert str(raised.value) == message


def test_the_report_of_a_run_is_left_out_without_plotly_and_an_error_on_request(
    tmp_path, capsys, caplog, hide
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    hide("plotly")
    said = "the report needs plotly, which is not installed: pip install plotly"
    assert write_final_report(tmp_path) is None
    report = tmp_path / "report.html"
    assert caplog.messages == [
        f"{report} is not written: {said}; then run: {format_pipeline_command('report', tmp_path)}"
    ]
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
    assert not report.exists()


def test_a_chat_template_of_a_checkpoint_needs_jinja2_too(hide):
    hide("jinja2")
    with pytest.raises(ConfigError, match="the chat template needs jinja2, which is not installed"):
        TemplateProcess("{{ messages }}", {}, [])


def test_an_installed_package_names_itself_and_not_a_clone(monkeypatch, hide, tmp_path):
    hide("bitsandbytes")
    monkeypatch.setattr(optional_packages, "__file__", str(tmp_path / "pipeline" / "config" / "x.py"))
    with pytest.raises(ConfigError, match=r"pip install 'deepspeed-pipeline\[qlora\]'$"):
        optional_packages.require_package("bitsandbytes", "it")


def test_a_plan_for_another_machine_needs_no_optional_package(capsys, hide):
    hide("bitsandbytes")
    given = ["plan", "--config", "llama_8b", "--gpu", "h100", "adapter.kind=lora", "adapter.quantize=nf4"]
    assert main(given) == 0
    told = capsys.readouterr().out
    assert "to train on this machine: adapter.quantize: nf4 needs bitsandbytes, which is not" in told
    assert main([*given, "--recipes"]) == 0
    assert "cannot run" not in capsys.readouterr().out


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb_of_a_run").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("wandb_of_a_run")
    assert is_installed("json")


def test_the_extras_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = re.compile(r"[\w-]+")
    extras = {
        extra: {name.match(each)[0] for each in packages}
        for extra, packages in project["optional-dependencies"].items()
    }
    for module, extra in EXTRAS.items():
        assert DISTRIBUTIONS.get(module, module) in extras[extra]
    required = {name.match(each)[0] for each in project["dependencies"]}
    assert not required & {DISTRIBUTIONS.get(module, module) for module in EXTRAS}
