"""A recipe with a mistake in it: one line that names file, line, key and what would be right."""

from __future__ import annotations

import re

import pytest
import yaml
from support.launch import ROOT

from pipeline.config.loading import parse_override, read_yaml
from pipeline.config.model_schema import AdapterConfig
from pipeline.config.recipe import ALIASES
from pipeline.config.settings import format_recipe_yaml, load_settings
from pipeline.errors import ConfigError

PAGE = ROOT / "docs" / "reference" / "configuration.md"
RECIPE = """\
name: small
max_steps: 10

model:
  kind: causal_lm
  architecture: llama
  num_layers: 2

data:
  kind: text
  paths: [notes.txt]
  tokenizer:
    vocab_size: 300

optimizer:
  learning_rate: 1e-3
"""


@pytest.fixture
def load(tmp_path):
    """`load("old", "new", "key=value", ...)`: the recipe with one text replaced, and the overrides."""

    def function(old="", new="", *overrides, text=RECIPE):
        assert old in text
        path = tmp_path / "recipe.yaml"
        path.write_text(text.replace(old, new, 1) if old else text)
        return load_settings(path, None, list(overrides)).config

    return function


def fails_with(load, tmp_path, *arguments, **keywords):
    """The error's text without the folder, so that it can be compared."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **keywords)
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 10", "max_step: 10", 'recipe.yaml:2: max_step: unknown key (did you mean "max_steps"?)'),
        ("optimizer:", "optimiser:", 'recipe.yaml:15: optimiser: unknown key (did you mean "optimizer"?)'),
        (
            "learning_rate:",
            "learning_rte:",
            'recipe.yaml:16: optimizer.learning_rte: unknown key (did you mean "learning_rate"?)',
        ),
        (
            "num_layers: 2",
            "n_layers: 2",
            'recipe.yaml:7: model.n_layers: unknown key (did you mean "num_layers"?)',
        ),
        ("paths:", "path:", 'recipe.yaml:11: data.path: unknown key (did you mean "paths"?)'),
        (
            "    vocab_size:",
            "    vocabsize:",
            'recipe.yaml:13: data.tokenizer.vocabsize: unknown key (did you mean "vocab_size"?)',
        ),
    ],
)
def test_an_unknown_key_is_told_with_its_line_and_the_nearest_valid_one(load, tmp_path, old, new, message):
    lines = fails_with(load, tmp_path, old, new).splitlines()
    assert message in lines
    missing = [line for line in lines if line.endswith((": missing", "of max_steps and max_epochs"))]
    assert len(lines) == 1 + len(missing)  # a misspelt `paths` is missing as well


@pytest.mark.parametrize("section", ["optimizer", "data", "model"])
def test_an_unknown_key_may_have_the_name_of_its_section(load, tmp_path, section):
    message = fails_with(load, tmp_path, f"{section}:\n", f"{section}:\n  {section}: 3\n")
    assert f"{section}.{section}: unknown key" in message
    assert "max_epochs" not in message, "the valid keys are those of the section, not of the recipe"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lerning_rate=1", 'optimizer.lerning_rate: unknown key (did you mean "learning_rate"?)'),
        ("model.num_layer=4", 'model.num_layer: unknown key (did you mean "num_layers"?)'),
        ("data.tokenizer.vocab=4", 'data.tokenizer.vocab: unknown key (did you mean "vocab_size"?)'),
        ("sed=4", 'sed: unknown key (did you mean "seed"?)'),
        (
            "batch.batch_size=32",
            "batch.batch_size: unknown key; use batch.global_batch_size (all ranks)",
        ),
        ("model.name=x", "model.name: unknown key; use model.pretrained or model.architecture"),
        (
            "optimizer=adam",
            "optimizer: expected a section of keys and values, given 'adam'; did you mean optimizer.kind?",
        ),
        ("sample_packing=true", "sample_packing: unknown key; use data.packing"),
        ("torch_compile=true", "torch_compile: unknown key; use engine.compile"),
        (
            "data={kind: images, path: a, dataset: b}",
            "data.dataset: unknown key; images are read from one folder",
        ),
        ("optimizer.kind=adamw_torch", "optimizer.kind: 'adamw_torch' is no known kind; write adamw"),
        ("optimizer.kind=muon", "optimizer.kind: 'muon' is no known kind; write adamw, and for the matrices"),
        (
            "schedule.kind=warmup-stable-decay",
            "schedule.kind: 'warmup-stable-decay' is no known kind; write wsd, and",
        ),
        ("betas=[0.9, 0.99]", "betas: unknown key; use optimizer.betas"),
        ("every=3", "every: unknown key; use log.every or eval.every or checkpoint.every"),
        ("optimizer.warmup=3", "optimizer.warmup: unknown key; use schedule.warmup"),
        ("model.channels=3", "model.channels: unknown key; it goes with kind cnn"),
        ("optimizer={lr: 4}", "optimizer.lr: unknown key; use optimizer.learning_rate"),
        ("model.kind=cmn", "model.kind: 'cmn' is no known kind (did you mean \"cnn\"?)"),
        ("seed=-1", "seed: input should be greater than or equal to 0, given -1"),
        ("seed.a=1", "seed.a: seed is a value, not a section"),
        ("data.paths.0=a", "data.paths.0: data.paths is a value, not a section"),
    ],
)
def test_a_mistake_on_the_command_line_says_command_line(load, tmp_path, override, message):
    text = RECIPE + "seed: 3\n"
    assert fails_with(load, tmp_path, "", "", override, text=text).startswith(f"command line: {message}")


def test_a_deepspeed_json_in_the_place_of_a_recipe_is_told(tmp_path):
    path = tmp_path / "zero 2.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    option = f"--deepspeed '{path}'"
    assert str(caught.value) == (
        f"{path}: --config takes a recipe, and this is a DeepSpeed JSON; give it as {option}"
    )


def test_a_folder_in_the_place_of_a_recipe_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r": Is a directory; name a file in it$"):
        load_settings(tmp_path)


@pytest.mark.parametrize("argument", ["seed", "=4", "model.=4", ".seed=4", "model..x=4", ""])
def test_what_is_no_override_is_refused(argument):
    with pytest.raises(ConfigError, match=r"is not an override; write section\.key=value"):
        parse_override(argument)


@pytest.mark.parametrize("value", ["[1, 2", "{a", "2024-45-45", "'"])
def test_an_override_with_malformed_yaml_is_refused(value):
    with pytest.raises(ConfigError, match=r"command line: the value of data\.paths is not valid YAML"):
        parse_override(f"data.paths={value}")


def test_an_override_may_hold_an_equals_sign_a_list_a_mapping_or_nothing():
    assert parse_override("sample.prompt=a=b") == (["sample", "prompt"], "a=b")
    assert parse_override("data.paths=[a, b]") == (["data", "paths"], ["a", "b"])
    assert parse_override("model.extra={rope_theta: 5e5}") == (["model", "extra"], {"rope_theta": 5e5})
    assert parse_override("eval.max_samples=null") == (["eval", "max_samples"], None)
    assert parse_override("eval.max_samples=~") == (["eval", "max_samples"], None)
    assert parse_override("name=''") == (["name"], "")


@pytest.mark.parametrize("value", ["", " ", "#4", "# none"])
def test_an_override_without_a_value_is_refused(value):
    with pytest.raises(ConfigError, match=r"has no value; write eval\.max_samples=null to unset it$"):
        parse_override(f"eval.max_samples={value}")


@pytest.mark.parametrize("written", ["1e3", "1000.0", "1_000", "+1000", "1E+3"])
def test_a_whole_number_may_be_written_as_a_float(load, written):
    for config in (load("max_steps: 10", f"max_steps: {written}"), load("", "", f"max_steps={written}")):
        assert (config.max_steps, type(config.max_steps)) == (1000, int)


@pytest.mark.parametrize("written", ["010", "-010", "1:30", "1:30.5", "08"])
def test_what_yaml_counts_by_eight_or_sixty_is_told_as_it_was_written(load, tmp_path, written):
    message = fails_with(load, tmp_path, "max_steps: 10", f"max_steps: {written}")
    assert message.endswith(f"given {written!r}")


@pytest.mark.parametrize("name", ["1e3", "010", "3e-4", "12"])
def test_a_text_that_looks_like_a_number_is_written_out_in_quotes(load, name):
    text = format_recipe_yaml(load("name: small", f"name: '{name}'"))
    assert load(text=text).name == name


def test_what_others_call_a_key_is_told_by_ours_and_ours_is_there(load, tmp_path):
    page = PAGE.read_text()
    for word, key in ALIASES.items():
        where = f"wandb.{word}" if "." not in word else word
        message = fails_with(load, tmp_path, "", "", f"{where}=3")
        assert f"{where}: unknown key; use {key}" in message
        assert all(f"| `{each}" in page for each in re.findall(r"[a-z_]+\.[a-z_.]+|^[a-z_]+$", key)), key


@pytest.mark.parametrize(
    "words", [["adapter=lora"], ["adapter.kind=lora"], ["adapter=dora", "adapter.kind=lora"]]
)
def test_a_section_that_is_written_as_its_kind_takes_further_keys(load, words):
    assert load("", "", *words, "adapter.rank=8").adapter == AdapterConfig(kind="lora", rank=8)
    assert load("name: small", "adapter: lora", "adapter.rank=8").adapter == AdapterConfig(rank=8)


def test_an_override_fills_a_section_that_holds_nothing(load):
    assert load("  learning_rate: 1e-3", "", "optimizer.eps=1e-6").optimizer.eps == 1e-6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_steps: 10", "max_steps: ten", "2: max_steps: input should be a valid integer, given 'ten'"),
        ("max_steps: 10", "max_steps: 1.5", "2: max_steps: input should be a valid integer, given 1.5"),
        ("max_steps: 10", "max_steps: true", "2: max_steps: input should be a valid integer, given True"),
        ("1e-3", "'1e-3'", "16: optimizer.learning_rate: input should be a valid number, given '1e-3'"),
        ("name: small", "name: 2024-01-01", "1: name: input should be a valid string, given "),
        ("[notes.txt]", "notes.txt", "11: data.paths: input should be a valid list, given 'notes.txt'"),
        ("[notes.txt]", "[3]", "11: data.paths.0: input should be a valid string, given 3"),
        ("  learning_rate: 1e-3", "  betas: 0.9", "16: optimizer.betas: input should be a valid tuple"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_told_with_what_was_given(load, tmp_path, old, new, message):
    assert fails_with(load, tmp_path, old, new).startswith(f"recipe.yaml:{message}")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("learning_rate: 0", "optimizer.learning_rate: input should be greater than 0, given 0"),
        ("learning_rate: .inf", "optimizer.learning_rate: input should be a finite number, given inf"),
        ("learning_rate: .nan", "optimizer.learning_rate: input should be a finite number, given nan"),
        ("betas: [0.9, 1.0]", "optimizer.betas.1: input should be less than 1, given 1.0"),
        ("weight_decay: -0.1", "optimizer.weight_decay: input should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_a_number_out_of_its_range_is_told_with_the_limit(load, tmp_path, new, message):
    assert fails_with(load, tmp_path, "learning_rate: 1e-3", new).startswith(f"recipe.yaml:16: {message}")


@pytest.mark.parametrize("written", ["3e-4", "3E-4", "+3e-4", "3.e-4", "3.0e-4", "0.0003", "30e-5", "3_0e-5"])
def test_numbers_are_read_as_people_write_them(load, written):
    assert load("1e-3", written).optimizer.learning_rate == pytest.approx(3e-4, rel=1e-12)


def test_every_problem_has_one_line(load, tmp_path):
    text = RECIPE.replace("num_layers: 2", "num_layers: 0").replace("learning_rate", "lerning_rate")
    lines = fails_with(load, tmp_path, text=text).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["recipe.yaml:7", "recipe.yaml:16"]


@pytest.mark.parametrize("name", ["model", "data"])
def test_a_missing_section_is_told(load, tmp_path, name):
    tree = yaml.safe_load(RECIPE)
    del tree[name]
    assert fails_with(load, tmp_path, text=yaml.safe_dump(tree)) == f"recipe.yaml: {name}: missing"


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("", "model: expected a section of keys and values, given None"),
        (" 3", "model: expected a section of keys and values, given 3; did you mean model.pretrained?"),
        (" [a]", "model: expected a section of keys and values, given ['a']; did you mean model.pretrained?"),
        (" {}", "model.kind: missing (valid: causal_lm, cnn); your own: package.module:function"),
        (" {kind: }", "model.kind: missing"),
        (" {kind: 3}", "model.kind: '3' is no known kind"),
        (" {kind: [cnn]}", "model.kind: \"['cnn']\" is no known kind"),
        (" {kind: my.model}", "model.kind: 'my.model' is no known kind (valid: causal_lm, cnn); your own: "),
        (" {kind: 'my model:f'}", "model.kind: string should match pattern"),
    ],
)
def test_a_section_that_is_none(load, tmp_path, new, message):
    old = RECIPE[RECIPE.index("model:") : RECIPE.index("data:")]
    assert fails_with(load, tmp_path, old, f"model:{new}\n").startswith(f"recipe.yaml:4: {message}")


def test_an_objective_whose_kind_is_null_lists_the_kinds(load, tmp_path):
    message = fails_with(load, tmp_path, "name: small", "objective: {kind: }")
    assert message.startswith("recipe.yaml:1: objective.kind: missing (valid: causal_lm, classification, ")


@pytest.mark.parametrize("key", ["zero_optimization", "fp16", "bf16", "precision", "offload_optimizer"])
def test_what_the_deepspeed_json_decides_is_sent_there(load, tmp_path, key):
    message = fails_with(load, tmp_path, "name: small", f"{key}: 1")
    assert (
        message
        == f"recipe.yaml:1: {key}: the DeepSpeed JSON decides this (--deepspeed FILE, or ds.KEY=VALUE)"
    )


def test_a_key_given_twice_is_refused_with_its_place(load, tmp_path):
    message = fails_with(load, tmp_path, "  num_layers: 2", "  num_layers: 2\n  num_layers: 3")
    assert message == "recipe.yaml:8:3: not valid YAML: the key 'num_layers' is given twice"


# Twelve lines that stand for nine to the power of twelve values.
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("model:\n  kind: [a\ndata: 1\n", "recipe.yaml:3:5: not valid YAML: "),
        ("a: 1\n\tb: 2\n", "recipe.yaml:2:1: not valid YAML: "),
        ("a: b: c\n", "recipe.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        ("model: {{model}}\n", "recipe.yaml:1:9: not valid YAML: a key must be a plain name"),
        ("? [a, b]\n: c\n", "recipe.yaml:1:3: not valid YAML: a key must be a plain name"),
        ("name: *anchor\n", "recipe.yaml:1:7: not valid YAML: found undefined alias 'anchor'"),
        ("name: !!python/object:os.system {}\n", "recipe.yaml:1:7: not valid YAML: "),
        ("name: a\n---\nname: b\n", "recipe.yaml:2:1: not valid YAML: "),
        ("name: 2024-02-45\n", "recipe.yaml: not valid YAML: day is out of range for month"),
        ("name: \x07\n", "recipe.yaml: not valid YAML: "),
        ("a: " + "[" * 5000, "recipe.yaml:1:67: not valid YAML: nested too deeply"),
        ("a: &a {b: *a}\n", "recipe.yaml:1:11: not valid YAML: the value contains itself"),
        ("a: " + "[" * 70 + "]" * 70, "recipe.yaml:1:"),
        pytest.param("a: [" + "1," * 100_001 + "1]", "recipe.yaml:1:", marks=pytest.mark.slow),
        (BOMB, "recipe.yaml:6:40: not valid YAML: stands for more than 100,000 values"),
        ("a: " + "9" * 5000, "recipe.yaml:1:4: not valid YAML: a number of 5,000 digits"),
        ("a: 0x" + "f" * 5000, "recipe.yaml:1:4: not valid YAML: a number of 5,002 digits"),
    ],
)
def test_malformed_yaml_is_told_with_line_and_column(load, tmp_path, text, place):
    message = fails_with(load, tmp_path, text=text)
    assert message.startswith(place)
    assert "\n" not in message


def test_a_section_may_be_written_once_and_used_twice(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("one: &it {a: 1, b: 2}\ntwo: {<<: *it, b: 3}\nthree: {deeper: {<<: *it}}\n")
    file = read_yaml(path)
    tree = file.tree
    places = file.locations
    assert tree["two"] == {"a": 1, "b": 3}
    assert tree["three"]["deeper"] == {"a": 1, "b": 2}
    assert places["two.b"] == f"{path}:2"


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not UTF-8 \(byte 6\)"):
        read_yaml(path)


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read_yaml(path).tree == {"name": "x"}


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "---\n", "null\n"])
def test_an_empty_file_is_told_what_it_lacks(load, tmp_path, text):
    message = fails_with(load, tmp_path, text=text)
    assert message.splitlines() == ["recipe.yaml: model: missing", "recipe.yaml: data: missing"]


def test_a_path_that_leads_nowhere_names_what_is_near(tmp_path):
    (tmp_path / "digits_cnn.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r'digit_cnn\.yaml: no such file \(did you mean "digits_cnn.yaml"\?\)'
    ):
        read_yaml(tmp_path / "digit_cnn.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml: no such file$"):
        read_yaml(tmp_path / "nowhere" / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


def test_a_resolved_recipe_is_a_recipe(load, tmp_path):
    config = load()
    path = tmp_path / "resolved.yaml"
    path.write_text(format_recipe_yaml(config))
    assert load_settings(path, None, []).config.model_dump() == config.model_dump()
    split = tmp_path / "zero1.json"
    split.write_text('{"zero_optimization": {"stage": 1}}')
    assert load_settings(path, split, []).config.model_dump() == config.model_dump()


def test_the_engine_section_is_plain_pytorchs(load, tmp_path):
    split = tmp_path / "zero1.json"
    split.write_text('{"zero_optimization": {"stage": 1}}')
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + "engine:\n  precision: bf16\n")
    assert load_settings(path, None, []).config.engine.precision == "bf16"
    with pytest.raises(ConfigError, match=r"recipe\.yaml:18: engine: with --deepspeed the JSON decides"):
        load_settings(path, split, [])
    path.write_text(RECIPE)
    with pytest.raises(ConfigError, match=r"^command line: engine: with --deepspeed the JSON decides"):
        load_settings(path, split, ["engine.precision=bf16"])


def test_nothing_changes_a_config_after_it_was_validated(load):
    config = load()
    with pytest.raises(ValueError, match="frozen"):
        config.optimizer.eps = 1.0


def test_every_field_has_a_meaning_in_the_documentation():
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") and ".kind" not in line:
            assert line.replace("\\|", "").rstrip("| ").count("|") in (2, 5), f"{line} has no docstring"


SOURCES = """\
max_steps: 10
model: {kind: causal_lm, architecture: llama}
data:
  kind: text
  sources:
    - name: one
      paths: [a.txt]
      weight: 0
    - name: two
      paths: [b.txt]
      weight: 0.0
  eval_sets:
    three:
      paths: [c.txt]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "      weight: 0.0",
            "      wieght: 1",
            'recipe.yaml:11: data.sources.1.wieght: unknown key (did you mean "weight"?)',
        ),
        (
            "      paths: [c.txt]",
            "      path: [c.txt]",
            'recipe.yaml:14: data.eval_sets.three.path: unknown key (did you mean "paths"?)',
        ),
        ("", "", "recipe.yaml:3: data: the weights of sources sum to 0; give at least one a weight above 0"),
        (
            "weight: 0.0",
            "weight: -1",
            "recipe.yaml:11: data.sources.1.weight: expected a number of 0 or more",
        ),
        (
            "weight: 0\n    - name: two",
            "weight: 1\n    - name: one",
            "recipe.yaml:3: data: two sources are called 'one'; give each its own name",
        ),
    ],
)
def test_mistakes_inside_lists_and_between_sources(load, tmp_path, old, new, message):
    assert message in fails_with(load, tmp_path, old, new, text=SOURCES)


@pytest.mark.parametrize(
    ("override", "given", "set_aside"),
    [
        ("max_epochs=2", "max_epochs", "max_steps"),
        ("data.sources=[{paths: [a]}]", "data.sources", "data.paths"),
    ],
)
def test_one_of_two_ways_on_the_command_line_takes_the_place_of_the_other_in_the_recipe(
    load, override, given, set_aside
):
    tree = load("", "", override).model_dump()
    for part in given.split(".")[:-1]:
        tree = tree[part]
    assert tree[given.split(".")[-1]] is not None
    assert tree[set_aside.split(".")[-1]] is None


def test_both_ways_on_the_command_line_are_an_error(load, tmp_path):
    message = fails_with(load, tmp_path, "", "", "max_epochs=2", "max_steps=3")
    assert "exactly one of max_steps and max_epochs" in message


PRETRAINED = ("architecture: llama\n  num_layers: 2", "pretrained: {folder}")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_pretrained_model_brings_its_tokenizer(load, folder):
    (folder / "tokenizer.json").write_text("{}")
    old, new = PRETRAINED
    assert load(old, new.format(folder=folder)).data.tokenizer.pretrained == str(folder)
    assert load(old, "pretrained: owner/name").data.tokenizer.pretrained == "owner/name"


def test_a_pretrained_folder_without_a_tokenizer_trains_no_new_one(load, folder):
    """A plan needs none; a run says that it is missing (tests/config/test_hub.py)."""
    old, new = PRETRAINED
    assert load(old, new.format(folder=folder)).data.tokenizer.pretrained == str(folder)
