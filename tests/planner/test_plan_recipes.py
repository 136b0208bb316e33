"""`plan --recipes`: each cell is what `plan` prints for that recipe on that machine."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from huggingface_hub import constants
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.config.shipped import RECIPES
from pipeline.planner import shapes

MACHINES = [("4090", "1"), ("h100", "1"), ("h100", "8")]
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def plan(capsys, *words):
    assert main(["plan", *words]) in (0, None)
    return capsys.readouterr().out


def read_table(printed):
    """Return recipe -> its cells, without the empty ones."""
    lines = printed.split("\n\n")[0].splitlines()
    return {name: cells for name, *cells in (re.split(r" {2,}", line) for line in lines)}


def seconds_of(text):
    """Return the seconds of `2d15h`, `1h24m` or `12s`."""
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)([dhms])", text))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["python_stdlib", "sft", "llama_8b"])
def test_a_cell_is_what_the_plan_prints(capsys, recipe):
    parameters, _, *cells = read_table(plan(capsys, "--recipes", "--config", recipe))[recipe]
    for (gpu, gpus), cell in zip(MACHINES, cells, strict=True):
        split, memory, time = re.fullmatch(r"(?:use (\w+): )?([\d.]+) GiB, (.*)", cell).groups()
        given = ["--config", recipe, "--gpu", gpu, "--gpus", gpus]
        printed = plan(capsys, *given)
        assert ("does not fit" in printed) is (split is not None)
        if split is not None:
            printed = plan(capsys, *given, "--suggest")
            assert f" --deepspeed {split} " in printed
        numel = re.search(r"([\d,]+) parameters", printed)[1].replace(",", "")
        assert parameters == f"{int(numel) / 1e6:,.1f} M"
        peak = re.search(r"  peak, in the \w+ +([\d.]+) GiB", printed)[1]
        assert float(memory) == pytest.approx(float(peak), abs=0.056)
        if (run := re.search(r" steps in (\w+) to (\w+)", printed)) is None:
            assert time == "time unknown"
        elif time == "under 1 min":
            assert seconds_of(run[1]) < 60
        else:
            middle = (seconds_of(run[1]) + seconds_of(run[2])) / 2
            assert float(time.removesuffix(" min")) == pytest.approx(middle / 60, abs=1)


@pytest.mark.slow
def test_each_shipped_recipe_has_a_row_without_torch_and_network(capsys, tmp_path):
    code = "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--recipes"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines()[-1] == "False"
    header, *rows = read_table(done.stdout).items()
    assert header[1][2:] == ["1 x RTX 4090 24GB", "1 x H100 SXM 80GB", "8 x H100 SXM 80GB"]
    assert [name for name, _ in rows] == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    missing = {name: cells[0] for name, cells in rows if len(cells) == 1}
    from_sft = dict.fromkeys(["dpo", "lora", "reward"], "needs runs/sft/model")
    assert missing == from_sft | {"digits_cnn": "needs torch to build its model"}


def test_a_model_that_is_not_here_is_named(capsys, monkeypatch):
    monkeypatch.setattr(shapes, "read_hub_models", dict)
    table = read_table(plan(capsys, "--recipes", "--gpu", "4090"))
    assert table["finetune_chat"] == ["needs Qwen/Qwen2.5-0.5B-Instruct"]
    assert main(["plan", "--recipes", "--config", "finetune_chat", "model.pretrained=some/model"]) == 2
    assert "model.pretrained: 'some/model': there is no such folder" in capsys.readouterr().err


def test_memory_that_is_not_known_whole_is_a_bound(capsys):
    given = ["--config", "python_stdlib", "model.architecture=gemma3_text", "--gpu", "4090"]
    cell = read_table(plan(capsys, "--recipes", *given))["python_stdlib"][2]
    assert re.fullmatch(r"more than [\d.]+ GiB, under 1 min", cell)
    assert "whether it fits is not known" in plan(capsys, *given)


def test_a_tokenizer_that_is_not_here_is_named_by_the_plan(capsys):
    remark = "runs/sft/model cannot be read: the model's default vocabulary is assumed"
    assert remark in plan(capsys, "--config", "lora", "--gpu", "4090")
    assert remark not in plan(capsys, "--config", "lora", "--gpu", "4090", "model.vocab_size=2048")


def test_a_run_of_epochs_has_a_speed_in_place_of_a_time(capsys):
    given = ["--config", "finetune_chat", "--deepspeed", "zero2", "--gpu", "4090"]
    *_, epochs, cell = read_table(plan(capsys, "--recipes", *given))["finetune_chat"]
    lowest, highest = re.search(r"positions per second +([\d,]+) to ([\d,]+)", plan(capsys, *given)).groups()
    speed = int(cell.removesuffix(" positions/s").rpartition(" ")[2].replace(",", ""))
    assert epochs == "3 epochs"
    assert speed == pytest.approx((int(lowest.replace(",", "")) + int(highest.replace(",", ""))) / 2, abs=1)


def test_the_readers_machine_is_the_only_column(capsys):
    table = read_table(plan(capsys, "--recipes", "--config", "llama_8b", "--gpu", "h200", "--gpus", "4"))
    assert table["recipe"][2:] == ["4 x H200 SXM 141GB"]
    assert table["llama_8b"][1] == "262.1 M"
    (cell,) = table["llama_8b"][2:]
    assert re.fullmatch(r"[\d.]+ GiB, \d+ min|use zero\d: [\d.]+ GiB, \d+ min", cell)


def test_options_and_overrides_are_those_of_the_plan(capsys):
    given = ["--config", "llama_8b", "--deepspeed", "zero3", "data.sequence_length=2048"]
    table = read_table(plan(capsys, "--recipes", *given, "--gpu", "h100", "--gpus", "8"))
    printed = plan(capsys, *given, "--gpu", "h100", "--gpus", "8")
    peak = re.search(r"  peak, in the \w+ +([\d.]+) GiB", printed)[1]
    assert float(table["llama_8b"][2].split()[0]) == pytest.approx(float(peak), abs=0.056)


def test_a_machine_that_a_recipe_cannot_run_on_is_explained_below_the_table(capsys):
    printed = plan(capsys, "--recipes", "--config", "sft", "--gpu", "4090", "--gpus", "3")
    assert read_table(printed)["sft"] == ["1.3 M", "cannot run, see below"]
    assert "sft on 3 x RTX 4090 24GB: batch: global_batch_size = 8 on 3" in printed.splitlines()[-1]


def test_a_model_that_no_split_fits_is_said_to_fit_nowhere(capsys):
    table = read_table(plan(capsys, "--recipes", "--config", "llama_8b", "--gpu", "t4", "--host-memory", "8"))
    assert table["llama_8b"][1:] == ["does not fit"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--json"], "--recipes prints a table only; for numbers as JSON: plan --config RECIPE.yaml --json"),
        (["data.sequence_length=64"], "unknown key; it goes with kind text or chat or preference; name a"),
        (["--config", "nowhere"], "no such file"),
        (["--gpu", "h1000"], "no such GPU"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, text):
    assert main(["plan", "--recipes", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
