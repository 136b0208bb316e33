"""Two keys that exclude each other, and numbers of absurd size: told by --dry-run, before data is read."""

from __future__ import annotations

import pytest

from pipeline.cli.train import main
from pipeline.config.contradictions import ROTARY_HEADS
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError

LLAMA = """\
max_steps: 10
model:
  kind: causal_lm
  architecture: llama
  hidden_size: 64
  num_heads: 4
data: {kind: text, paths: [nothing-is-read.txt]}
"""
CNN = "max_steps: 10\nmodel: {kind: cnn}\ndata: {kind: digits}\n"


@pytest.fixture
def refused(tmp_path, capsys):
    """The one error that both --dry-run and a start give, before anything is loaded or prepared."""

    def function(text, *arguments):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text)
        told = []
        for more in (["--dry-run"], [f"runs_dir={tmp_path}/runs"]):
            assert main(["--config", str(recipe), *more, *arguments]) == 2
            told.append(capsys.readouterr().err.replace(f"{tmp_path}/", ""))
        assert told[0] == told[1]
        assert not (tmp_path / "runs").exists()
        assert told[0].count("\n") <= 3
        assert len(told[0]) < 1500
        return told[0].removeprefix("error: ").strip()

    return function


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (LLAMA, ["model.num_heads=3"], "command line: model.hidden_size 64 is not a multiple of num_heads 3"),
        (LLAMA.replace("num_heads: 4", "num_heads: 5"), [], "recipe.yaml:5: model.hidden_size 64 is not"),
        (LLAMA, ["model.num_key_value_heads=3"], "command line: model.num_heads 4 is not a multiple"),
        (LLAMA, ["model.pretrained=./there"], "command line: model: give exactly one of architecture"),
        (LLAMA, ["model={kind: causal_lm, pretrained: x, weights: y}"], "command line: model: give pretr"),
        (LLAMA.replace("  architecture: llama\n", ""), [], "recipe.yaml:2: model: give exactly one of arch"),
        (LLAMA, ["model.activation_offload=true"], "command line: model.activation_offload moves the"),
        (LLAMA, ["objective.class_weights=[1, 2]"], "command line: objective.class_weights: only"),
        (LLAMA + "objective: {label_smoothing: 0.1}\n", [], "recipe.yaml:8: objective.label_smoothing: only"),
        (CNN, ["objective={kind: model_loss, class_weights: [1]}"], "command line: objective.class_we"),
        (CNN, ["objective.kind=clasification"], "command line: objective.kind: 'clasification' is no kn"),
        (LLAMA, ["model.channels=3"], "command line: model.channels: unknown key; it goes with kind cnn"),
        (
            LLAMA,
            ["data.bad_records=skip"],
            "command line: data.bad_records: unknown key; use data.sources.0.bad_records",
        ),
        (CNN, ["schedule.decay_steps=3"], "command line: schedule.decay_steps: a cosine schedule does"),
        (CNN + "schedule: {kind: constant, min_learning_rate_ratio: 0}\n", [], "recipe.yaml:4: schedule.min"),
        (CNN, ["data={kind: text, paths: [a]}"], "command line: data.kind text: a cnn model cannot"),
        (CNN, ["data={kind: preference, paths: [a]}"], "command line: objective.kind: auto would learn"),
        (LLAMA, ["data.kind=preference", "objective.kind=causal_lm"], "command line: objective.kind: causal"),
        (LLAMA, ["data={kind: preference, paths: [a], separate_documents: false}"], "command line: data"),
        (LLAMA, ["data={kind: digits}"], "command line: data.kind digits: a causal_lm model cannot"),
        (CNN, ["max_epochs=2", "max_steps=3"], "command line: give exactly one of max_steps and max_epochs"),
        (CNN, ["log.every=10", "wandb.histograms_every=15"], "command line: histograms are written with"),
        (CNN, ["checkpoint={keep_best: true, every: 3}"], "command line: checkpoint.keep_best needs an"),
        (CNN, ["batch.gradient_accumulation_steps=2"], "batch: give micro_batch_size or global_batch_size"),
        (LLAMA, ["model.architecture=null"], "command line: model: give exactly one of architecture"),
        (CNN, ["batch={micro_batch_size: 3, global_batch_size: 4}"], "batch: micro_batch_size = 3, global"),
        (CNN, ["optimizer.kind=adamv"], "command line: optimizer.kind: 'adamv' is no known kind (did"),
        (CNN, ["schedule.kind=x.y"], "command line: schedule.kind: 'x.y' is no known kind (valid: constant,"),
        (CNN, ["optimizer.args={a: 1}"], "command line: optimizer.args: adamw is built in and takes none"),
        (CNN, ["optimizer.kind=a:b", "optimizer.eps=1e-6"], "command line: optimizer.eps: a:b does not read"),
        (CNN, ["schedule.kind=a:b", "schedule.warmup=3"], "command line: schedule.warmup: a:b decides the"),
        (LLAMA, ["data={kind: a:b}", "eval.tasks=[c]"], "command line: eval.tasks: data of your own has no"),
        (
            LLAMA,
            ["data.eval_fraction=0", "early_stopping.patience=3", "eval.every=5"],
            "command line: early_stopping: nothing is held out",
        ),
        (CNN, ["model={kind: a:b}"], "command line: objective.kind is auto, but a model of your own"),
        (CNN, ["model.neftune_alpha=5"], "command line: model.neftune_alpha: a cnn model has no token"),
        (CNN, ["wandb.x_axis=tokens_seen"], "command line: wandb.x_axis: tokens_seen: only a run with"),
        (
            LLAMA,
            ["model.extra={output_router_logits: true}", "objective.kind=dpo", "data.kind=preference"],
            "command line: model.extra.output_router_logits: the routers' loss is not part of objective dpo",
        ),
        (CNN, ["engine.parallel=fsdp"], "command line: engine.parallel: input should be 'auto', 'single'"),
    ],
)  # fmt: skip
def test_what_cannot_stand_together_is_told_first(refused, text, arguments, message):
    assert refused(text, *arguments).startswith(message)


@pytest.mark.parametrize(
    ("text", "override"),
    [
        (LLAMA, "model.hidden_size=1000000000000"),
        (LLAMA, f"model.hidden_size={'9' * 5000}"),
        (LLAMA, f"model.hidden_size=0x{'f' * 5000}"),
        (LLAMA, "model.num_layers=1000000000000"),
        (LLAMA, "data.sequence_length=1000000000000"),
        (LLAMA, "data.prepare_workers=1000000"),
        (CNN, "batch.micro_batch_size=1000000000000"),
        (CNN, "loader.num_workers=1000000"),
        (CNN, "optimizer.learning_rate=1e999"),
        (CNN, "optimizer.learning_rate=.nan"),
        (CNN, "distributed.timeout_seconds=1e300"),
        (CNN, "distributed.hang_seconds=1e300"),
        (CNN, "max_steps=1e999"),
        (CNN, f"max_steps={'9' * 4000}"),
        (CNN, f"seed={'9' * 30}"),
        (CNN, "eval.every=true"),
        (CNN, "log.every=auto"),
        (CNN, "batch={micro_batch_size: many}"),
        (CNN, "checkpoint.every={a: 1}"),
    ],
)
def test_a_number_that_cannot_be_is_one_line_of_bounded_length(refused, text, override):
    message = refused(text, override)
    assert message.startswith(("command line: " + override.partition("=")[0], "command line: "))
    assert override.partition("=")[0].partition(".")[0] in message


def test_an_absurd_number_in_the_file_has_its_line(refused):
    assert refused(LLAMA.replace("64", "9" * 5000)).startswith(
        "recipe.yaml:5:16: not valid YAML: a number of"
    )
    assert refused(LLAMA.replace("64", "10000000000000")).startswith(
        "recipe.yaml:5: model.hidden_size: input"
    )


def test_a_world_of_absurd_size_is_told(capsys):
    for number in ("9" * 5000, "10000000000", "-1", "1e3"):
        with pytest.raises(SystemExit) as ended:
            main(["--dry-run", "--world-size", number])
        assert ended.value.code == 2
        assert len(capsys.readouterr().err) < 600


@pytest.mark.parametrize(
    ("text", "override"),
    [
        (CNN + "engine: {precision: fp32}\n", "engine.tf32=true"),
        (CNN, "engine.tf32=true"),
        (CNN, "engine={compile: true}"),
    ],
)
def test_an_engine_from_the_command_line_is_blamed_there(tmp_path, text, override):
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "split.json").write_text('{"zero_optimization": {"stage": 1}}')
    with pytest.raises(ConfigError, match=r"^command line: engine: with --deepspeed the JSON decides"):
        load_settings(tmp_path / "recipe.yaml", tmp_path / "split.json", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data={kind: images}", "command line: data.path: missing"),
        ("data.weight=3", "command line: data.weight: unknown key"),
        ("model={kind: causal_lm, hiden_size: 3}", "command line: model.hiden_size: unknown key"),
        ("optimizer={betas: [0.9]}", "command line: optimizer.betas"),
    ],
)
def test_every_error_about_an_override_says_command_line(refused, override, message):
    text = LLAMA + "optimizer:\n  betas: [0.9, 0.95]\n"
    told = refused(text, override)
    assert told.startswith("command line: ")
    assert message.split(": ")[-1].split(" ")[0] in told


def test_a_warm_up_longer_than_the_run_is_told_by_the_dry_run(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(CNN + "schedule: {warmup: 30}\n")
    assert main(["--dry-run", "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert "schedule.warmup 30 is longer than the run of 10 steps" in capsys.readouterr().out


def test_notes_of_a_file_from_elsewhere_go_to_standard_error(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(CNN)
    split = tmp_path / "split.json"
    split.write_text('{"_comment": "mine",\n"zero_optimization": {"stage": 1}}')
    assert main(["--dry-run", "--config", str(tmp_path / "recipe.yaml"), "--deepspeed", str(split)]) == 0
    assert capsys.readouterr().err == f"note: {split}:1: _comment: ignored; it is a comment\n"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted(ROTARY_HEADS))
def test_rotary_heads_of_an_odd_width_cannot_be_computed_and_are_refused(refused, architecture):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 64}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)

    def forward(width):
        config = AutoConfig.for_model(architecture, hidden_size=width, num_attention_heads=2, **sizes, **ends)
        AutoModelForCausalLM.from_config(config)(input_ids=torch.tensor([[1, 2, 3]]))

    forward(8)
    with pytest.raises(RuntimeError, match="The size of tensor a"):
        forward(6)
    text = LLAMA.replace("llama", architecture).replace("64", "6")
    assert "model.num_heads 2 with hidden_size 6 gives a head width of 3" in refused(
        text, "model.num_heads=2"
    )


@pytest.mark.parametrize(
    "override",
    [
        "model.architecture=qwen3",
        "model.architecture=gemma",
        "model.extra={head_dim: 8}",
        "model.num_heads=2",
    ],
)
def test_heads_of_a_width_of_their_own_or_of_an_even_one_are_taken(tmp_path, override):
    (tmp_path / "recipe.yaml").write_text(LLAMA.replace("64", "12"))
    assert load_settings(tmp_path / "recipe.yaml", None, [override]).config.model.hidden_size == 12


@pytest.mark.parametrize(
    "data",
    [
        "{kind: text, paths: [a], text_field: body}",
        "{kind: text, text_field: text, sources: [{paths: [a], split: train, streaming: false, args: {}}]}",
        "{kind: text, sources: [{dataset: a, subset: b, split: test, revision: c, streaming: true}]}",
        "{kind: text, sources: [{iterable: 'a:b', args: {c: 1}}]}",
    ],
)
def test_keys_of_a_source_that_its_origin_reads_are_taken_and_so_are_defaults(tmp_path, data):
    (tmp_path / "recipe.yaml").write_text(LLAMA[: LLAMA.index("data:")] + f"data: {data}\n")
    assert load_settings(tmp_path / "recipe.yaml", None, []).config.data.kind == "text"
