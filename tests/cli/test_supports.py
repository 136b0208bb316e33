"""`supports` answers as --dry-run does, for every feature, and for a sample of pairs and triples."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
import subprocess
import sys

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.config.features import FEATURES, WORDS, combine_features, format_features_table
from pipeline.config.split import Device
from pipeline.errors import ConfigError

# Features that need another one.
PARTNERS = {
    "offload_optimizer": "zero2",
    "offload_param": "zero3",
    "nvme": "zero3",
    "hpz": "zero3",
    "zeropp": "zero3",
    "bf16_states": "zero2",
}
NOT_BUILT_IN = {"lion", "adam8bit"}
"""Optimizers of other trainers, which are refused with advice."""
LOCATION = r"^(error: )?(command line: |\S+/(recipe.yaml|split.json)(:\d+)?: )?(ds\.)?"
"""Pattern of the place of the keys, which `train` prints before a refusal."""
SAMPLE = [
    *(list(pair) for pair in itertools.combinations(WORDS, 2) if random.Random(str(pair)).random() < 0.04),
    *(random.Random(seed).sample(sorted(WORDS), 3) for seed in range(40)),
]


@pytest.fixture(autouse=True)
def on_a_gpu_with_every_package(monkeypatch):
    gpu = Device("cuda", bf16=True, fp16=True, fp8=True)
    monkeypatch.setattr(Device, "probe", lambda: gpu)
    monkeypatch.setattr("pipeline.config.optional_packages.is_installed", lambda module: True)


def ask(capsys, *names: str) -> tuple[int, str]:
    code = main(["supports", *names])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("name", sorted(WORDS.keys() - NOT_BUILT_IN))
def test_every_feature_is_accepted_with_a_fitting_partner(capsys, name):
    code, line = ask(capsys, name, *PARTNERS.get(name, "").split())
    assert code == 0, line
    assert line.count("\n") == 1


@pytest.mark.parametrize("name", sorted(PARTNERS))
def test_a_feature_without_its_partner_is_told_what_to_use(capsys, name):
    code, line = ask(capsys, name)
    assert code == 1
    assert line.startswith("no: ")
    assert "; use " in line


@pytest.mark.parametrize("names", SAMPLE, ids=" ".join)
def test_the_answer_is_that_of_a_dry_run_with_the_printed_keys(capsys, tmp_path, names):
    try:
        combined = combine_features(names)
    except ConfigError:
        assert "both choose" in ask(capsys, *names)[1]
        return
    code, line = ask(capsys, *names)
    words = shlex.split(str(combined))
    kinds = {key: value for key, value in combined.keys.items() if key in ("model.kind", "data.kind")}
    recipe, _ = type(combined)(kinds).build()
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "split.json").write_text("{}")
    split = ["--deepspeed", str(tmp_path / "split.json")] if any(w.startswith("ds.") for w in words) else []
    ranks = combined.count_ranks(combined.build()[1])
    command = ["train", "--dry-run", "--config", str(tmp_path / "recipe.yaml"), *split]
    dry = main([*command, "--world-size", str(ranks), *words])
    printed = capsys.readouterr()
    if code == 0:
        assert dry == 0, printed.err
        keys = shlex.split(line.partition(": ")[2])
        assert keys == words
    else:
        assert dry == 2, line
        refusals = [re.sub(LOCATION, "", each) for each in printed.err.splitlines()]
        assert line == f"no: {'; '.join(refusals)}\n"


def test_two_features_that_set_a_key_differently_are_a_mistake(capsys):
    code, line = ask(capsys, "zero2", "lora", "zero3")
    assert code == 2
    assert line == "error: zero2 and zero3: both choose zero_optimization.stage; name one of them\n"
    assert ask(capsys, "lora", "dora")[0] == 2
    assert ask(capsys, "dora", "qlora")[0] == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [("lorra", "did you mean lora"), ("offload", "did you mean offload_"), ("xyz", "lists all")],
)
def test_an_unknown_name_is_a_mistake_that_names_near_ones(capsys, name, advice):
    code, line = ask(capsys, name)
    assert code == 2
    assert advice in line


def test_without_names_it_lists_all_by_group(capsys):
    code, text = ask(capsys)
    assert code == 0
    assert [line.split("  ")[0] for line in text.splitlines()] == list(FEATURES)
    assert set(text.split()) > set(WORDS)


def test_it_does_not_import_torch():
    code = (
        "import sys; from pipeline.__main__ import main; code = main(['supports', 'lora', 'zero3']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_document_has_the_same_table():
    assert format_features_table() in (ROOT / "docs" / "reference" / "splits.md").read_text()
