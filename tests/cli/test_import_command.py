"""python -m pipeline import: from a YAML of LLaMA-Factory to a dry run, and to a run that trains."""

from __future__ import annotations

import json
import shlex

import pytest
import yaml
from support.base_model import conversations, write_base_model

from pipeline.__main__ import main
from pipeline.cli.train import main as train


@pytest.mark.slow
def test_from_llama_factory_to_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_base_model(tmp_path / "tiny")
    turns = [[turn["content"] for turn in each["messages"]] for each in conversations()]
    rows = [{"instruction": question, "output": answer} for question, answer in turns]
    (tmp_path / "colours.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text('{"colours": {"file_name": "colours.json"}}')
    theirs = {
        "model_name_or_path": "tiny",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 4,
        "dataset": "colours",
        "template": "chatml",
        "cutoff_len": 64,
        "output_dir": "saves/sft",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "plot_loss": True,
        "mask_history": True,
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(theirs))
    assert main(["import", "sft.yaml", "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "batch.global_batch_size: 8 = 2 (per GPU) x 2 (accumulated) x 2 (GPUs, --gpus)" in said
    words = ("fill in: ", "left open: ", "without effect: ")
    told = [line for line in said.splitlines() if line.startswith(words)]
    assert [line.partition(": ")[2].partition(": ")[0] for line in told] == [
        "data.chat_template",
        "mask_history",
        "plot_loss",
    ]
    recipe = (tmp_path / "sft" / "recipe.yaml").read_text()
    comments = [line for line in recipe.splitlines() if line.startswith(tuple(f"# {word}" for word in words))]
    assert [f"# {line}" for line in told] == comments
    words = shlex.split(said.splitlines()[-1].removeprefix("to train: "))
    launcher = words[:6]
    printed = words[6:]
    assert launcher == ["deepspeed", "--num_gpus", "2", "--module", "pipeline", "train"]

    assert main(["import", "sft.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: sft exists and is not empty; choose another folder (--output), or add --force to overwrite "
        "recipe.yaml and deepspeed.json in it\n"
    )
    assert main(["import", "sft.yaml", "--force"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    changes = ["max_steps=2", "log.every=1", f"data.cache_dir={tmp_path / 'cache'}"]
    assert train([*printed, *changes, "--dry-run", "--world-size", "2"]) == 2
    error = capsys.readouterr().err
    assert "data.chat_template: fill in the value" in error
    assert error.count("\n") == 1
    changes.append("data.chat_template=chatml")  # what was to fill in
    assert train([*printed, *changes, "--dry-run", "--world-size", "2"]) == 0
    capsys.readouterr()
    assert train([*printed[2:], *changes]) == 0  # without the JSON: plain PyTorch
    lines = (tmp_path / "elsewhere" / "saves" / "sft" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    monkeypatch.chdir(tmp_path)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    capsys.readouterr()
    assert main(["import", "stf.yaml"]) == 2
    assert capsys.readouterr().err == 'error: stf.yaml: no such file (did you mean "sft.yaml"?)\n'
