"""Configurations of other trainers in, expected recipes out; a word on every key of theirs."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import yaml

from pipeline.cli.import_configs.writing import draft_recipe, write_files
from pipeline.config.loading import get_dotted
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError

pytestmark = pytest.mark.slow

LLAMA_FACTORY = {
    "model_name_or_path": "a/b",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "dataset": "talk",
    "template": "qwen3",
    "cutoff_len": 512,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
}
AXOLOTL = {
    "base_model": "a/b",
    "datasets": [{"path": "x/y", "type": "chat_template"}],
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "sequence_len": 2048,
    "sample_packing": True,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 1,
    "learning_rate": 2e-4,
    "val_set_size": 0.05,
}
TRL = {"model_name_or_path": "a/b", "dataset_name": "x/y", "use_peft": True, "max_length": 512}
TRAINER = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "warmup_ratio": 0.03, "output_dir": "out"}
TREES = {"llama-factory": LLAMA_FACTORY, "axolotl": AXOLOTL, "trainer": TRAINER}
FILL_IN = "FILL-IN.jinja"
PAIRS = {"stage": "dpo", "pref_beta": 0.2, "pref_ftx": 0.5}
JUDGED = [{"path": "x/y", "type": "bradley_terry.chat_template"}]
CASES = [
    # what changes the curve and was not said is theirs
    *(
        (tool, {}, {"optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0, "seed": 42})
        for tool in ("llama-factory", "axolotl", "trl-sft", "trainer")
    ),
    ("llama-factory", {}, {"schedule.min_learning_rate_ratio": 0.0, "data.eval_fraction": 0.0}),
    ("llama-factory", {"learning_rate": None}, {"optimizer.learning_rate": 5e-5}),
    *(
        (f"trl-{trainer}", {}, {"optimizer.learning_rate": rate})
        for trainer, rate in {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "orpo": 1e-6}.items()
    ),
    # batch and length
    ("llama-factory", {}, {"batch.micro_batch_size": 2, "batch.global_batch_size": 2 * 8 * 4}),
    ("axolotl", {}, {"batch.global_batch_size": 2 * 4 * 4, "max_epochs": 1}),
    ("trl-sft", {}, {"batch.global_batch_size": 8 * 1 * 4, "max_epochs": 3.0}),  # the Trainer's defaults
    ("llama-factory", {"max_steps": 55}, {"max_steps": 55, "max_epochs": None}),
    # schedule and cadence
    ("llama-factory", {}, {"schedule.kind": "cosine", "schedule.warmup": 0.1}),
    ("llama-factory", {"warmup_steps": 20}, {"schedule.warmup": 20}),
    ("llama-factory", {"lr_scheduler_type": "constant"}, {"schedule.kind": "constant", "schedule.warmup": 0}),
    ("axolotl", {}, {"schedule.warmup": 0.03}),
    ("axolotl", {"warmup_steps": 0}, {"schedule.warmup": 0}),
    ("axolotl", {"cosine_min_lr_ratio": 0.2}, {"schedule.min_learning_rate_ratio": 0.2}),
    (
        "trainer",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.3}},
        {"schedule.kind": "cosine", "schedule.min_learning_rate_ratio": 0.3},
    ),
    (
        "trainer",
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
        {"schedule.min_learning_rate_ratio": 0.2},  # of the default 5e-5
    ),
    # a kind without a counterpart is asked for, and no other kind is trained
    *(
        (tool, {"lr_scheduler_type": kind}, {"schedule.kind": "FILL-IN"})
        for tool in ("llama-factory", "trainer", "trl-sft")
        for kind in ("cosine_with_restarts", "polynomial")
    ),
    (
        "trainer",
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"schedule.kind": "FILL-IN", "schedule.min_learning_rate_ratio": 0.0},
    ),
    *(("trainer", {"optim": kind}, {"optimizer.kind": "FILL-IN"}) for kind in ("adamw_8bit", "adamw_8bti")),
    ("llama-factory", {"use_galore": True}, {"optimizer.kind": "FILL-IN"}),
    ("axolotl", {"optimizer": "lion_8bit"}, {"optimizer.kind": "FILL-IN"}),
    ("trainer", {"optim": "sgd"}, {"optimizer.kind": "sgd", "optimizer.momentum": 0.0}),
    ("trainer", {"optim": "adafactor"}, {"optimizer.kind": "adafactor", "optimizer.betas": None}),
    ("trainer", {}, {"checkpoint.every": 500}),
    ("trainer", {"save_strategy": "epoch"}, {"checkpoint.every": "1 epochs"}),
    ("axolotl", {"evals_per_epoch": 4}, {"eval.every": "0.25 epochs", "checkpoint.every": "1 epochs"}),
    ("llama-factory", {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 20}, {"eval.every": 20}),
    # an adapter
    ("llama-factory", {}, {"adapter.kind": "lora", "adapter.rank": 8, "adapter.alpha": 16}),  # 2 x rank
    (
        "llama-factory",
        {"use_rslora": True, "lora_target": "q_proj, v_proj", "lora_alpha": 5},
        {"adapter.kind": "rslora", "adapter.alpha": 5, "adapter.targets": ["q_proj", "v_proj"]},
    ),
    (
        "llama-factory",
        {"adapter_name_or_path": "saves/one", "lora_target": "all"},
        {"adapter.weights": "saves/one", "adapter.rank": None, "adapter.alpha": None},
    ),
    ("llama-factory", {"finetuning_type": "full"}, {"adapter": None}),
    ("llama-factory", {"finetuning_type": "freeze"}, {"adapter": None, "model.freeze": ["FILL-IN"]}),
    ("axolotl", {}, {"adapter.rank": 32, "adapter.alpha": 16, "adapter.quantize": "nf4"}),
    ("axolotl", {"lora_target_linear": None}, {"adapter.targets": ["FILL-IN"]}),  # peft's by the model
    ("trl-sft", {}, {"adapter.rank": 16, "adapter.dropout": 0.05, "adapter.targets": ["FILL-IN"]}),
    ("trl-sft", {"lora_target_modules": "all-linear"}, {"adapter.targets": None}),
    ("trl-sft", {"use_peft": None, "loraplus_lr_ratio": 16}, {"adapter": None}),
    # objectives
    *(
        (
            "llama-factory",
            PAIRS | {"pref_loss": loss},
            {f"objective.{key}": each for key, each in ours.items()},
        )
        for loss, ours in {
            "sigmoid": {"kind": "dpo", "loss_type": "sigmoid", "beta": 0.2, "sft_weight": 0.5},
            "ipo": {"kind": "dpo", "loss_type": "ipo"},
            "orpo": {"kind": "orpo", "beta": 0.2, "sft_weight": None},
            "simpo": {"kind": "simpo", "beta": 0.2, "gamma": 0.5},
            "kto_pair": {"kind": "kto", "beta": 0.2},
        }.items()
    ),
    (
        "llama-factory",
        PAIRS,
        {"data.kind": "preference", "data.sequence_length": 1024, "data.answer_length": 512},
    ),
    ("llama-factory", {"stage": "rm"}, {"objective.kind": "reward", "objective.margin_weight": 0.0}),
    ("axolotl", {"rl": "ipo"}, {"objective.loss_type": "ipo"}),
    ("axolotl", {"rl": "simpo"}, {"objective.gamma": 0.5, "objective.sft_weight": 1.0}),
    (
        "axolotl",
        {"reward_model": True, "datasets": JUDGED},
        {"objective.kind": "reward", "data.layout": "icr"},
    ),
    ("trl-kto", {"desirable_weight": 1.5}, {"objective.kind": "kto", "objective.desirable_weight": 1.5}),
    ("trl-cpo", {}, {"objective.kind": "cpo", "objective.gamma": None, "objective.sft_weight": 1.0}),
    ("trl-cpo", {"loss_type": "simpo"}, {"objective.kind": "simpo", "objective.gamma": 0.5}),
    ("trl-reward", {"center_rewards_coefficient": 0.01}, {"objective.center_weight": 0.01}),
    # data: what is not the same to the token is left to the user
    (
        "llama-factory",
        {},
        {"data.kind": "chat", "data.paths": ["FILL-IN.jsonl"], "data.chat_template": FILL_IN},
    ),
    ("llama-factory", {"stage": "pt"}, {"data.kind": "text", "data.separate_documents": False}),
    ("llama-factory", {"packing": True}, {"data.packing": "best_fit"}),
    ("llama-factory", {"train_on_prompt": True}, {"data.learn_from": "all"}),
    ("axolotl", {}, {"data.layout": "sharegpt", "data.learn_from": "content", "data.chat_template": None}),
    ("axolotl", {"chat_template": "chatml"}, {"data.chat_template": "chatml"}),
    ("axolotl", {"chat_template": "gemma"}, {"data.chat_template": FILL_IN}),
    ("axolotl", {"chat_template_jinja": "{{ messages }}"}, {"data.chat_template": FILL_IN}),
    (
        "axolotl",
        {"datasets": [{"path": "x/y", "type": "alpaca"}]},
        {"data.layout": "row", "data.chat_template": FILL_IN, "data.learn_from": "assistant"},
    ),
    (
        "axolotl",
        {"datasets": [{"path": "x/y", "type": "sharegpt", "conversation": "chatml"}]},
        {"data.layout": "sharegpt", "data.chat_template": FILL_IN, "data.sources": [{"dataset": "x/y"}]},
    ),
    (
        "axolotl",
        {"datasets": [{"path": "x/y", "type": {"format": "{instruction}"}}]},
        {"data.layout": "row", "data.chat_template": FILL_IN},
    ),
    (
        "axolotl",
        {"datasets": [{"path": "x/y", "type": "chat_template", "field_messages": "talk"}]},
        {"data.sources": [{"dataset": "x/y", "fields": {"conversations": "talk"}}]},
    ),
    (
        "axolotl",
        {"datasets": [{"path": "x/y", "split": "val", "type": "completion", "field": "body"}]},
        {"data.kind": "text", "data.sources": [{"dataset": "x/y", "split": "val", "text_field": "body"}]},
    ),
    ("axolotl", {"datasets": None, "pretraining_dataset": "x/y"}, {"data.packing": "concatenate"}),
    ("trl-sft", {}, {"data.layout": "messages", "data.learn_from": "all"}),
    ("trl-sft", {"assistant_only_loss": True}, {"data.learn_from": "assistant"}),
    (
        "trl-sft",
        {"completion_only_loss": True},
        {"data.layout": "prompt_completion", "data.chat_template": FILL_IN},
    ),
    ("trl-sft", {"dataset_text_field": "body"}, {"data.kind": "text"}),
    ("trl-dpo", {}, {"data.layout": "trl", "data.append_eos": False}),
    (
        "trainer",
        {},
        {"model.pretrained": "FILL-IN", "data.paths": ["FILL-IN.jsonl"], "data.sequence_length": "FILL-IN"},
    ),
    (
        "trainer",
        {"eval_strategy": "steps", "eval_steps": 20},
        {"data.packing": "none", "data.eval_fraction": 0.0, "eval.every": 20},
    ),
    # where numbers go
    ("trainer", {"report_to": ["wandb", "tensorboard"]}, {"wandb.mode": "auto", "log.tensorboard": True}),
    ("trainer", {}, {"wandb.mode": "disabled"}),
]


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """`imported(tool, changes, gpus=4)`: the draft of a tool's configuration, written and read back."""
    monkeypatch.chdir(tmp_path)

    def function(tool, changes, gpus=4):
        tree = TREES.get(tool, TRL) | changes
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
        draft = draft_recipe(path, tool, gpus)
        write_files(draft, tmp_path / "out")
        is_complete = "FILL-IN" not in (tmp_path / "out" / "recipe.yaml").read_text()
        with nullcontext() if is_complete else pytest.raises(ConfigError, match="FILL-IN"):
            load_settings(tmp_path / "out" / "recipe.yaml", tmp_path / "out" / "deepspeed.json")
        return draft

    return function


@pytest.mark.parametrize(("tool", "changes", "ours"), CASES)
def test_what_theirs_says_is_in_the_recipe(imported, tmp_path, tool, changes, ours):
    draft = imported(tool, changes)
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert {key: get_dotted(recipe, key) for key in ours} == ours
    asked = {line.partition(":")[0] for line in draft.fill_in}
    assert asked >= {key for key, value in ours.items() if "FILL-IN" in str(value)}


@pytest.mark.parametrize(
    ("tool", "changes", "left_open", "no_effect"),
    [
        ("llama-factory", {"pissa_init": True, "brand_new": 1}, ["pissa_init", "brand_new"], []),
        ("llama-factory", {"plot_loss": True, "pref_beta": 0.3}, [], ["plot_loss", "pref_beta"]),
        ("llama-factory", {"use_galore": False}, [], ["use_galore"]),
        (
            "llama-factory",
            {"adapter_name_or_path": "saves/one", "max_steps": 5},
            [],
            ["lora_rank", "num_train_epochs"],
        ),
        ("axolotl", {"lora_target_modules": ["q_proj"]}, [], ["lora_target_modules"]),
        ("axolotl", {"lr_scheduler": "constant", "cosine_min_lr_ratio": 0.1}, [], ["cosine_min_lr_ratio"]),
        ("llama-factory", {"val_size": 100, "eval_steps": 5}, ["val_size"], ["eval_steps"]),
        ("llama-factory", PAIRS | {"pref_loss": "orpo"}, ["pref_ftx"], []),
        ("llama-factory", {"packing": True, "quantization_bit": 8}, ["packing", "quantization_bit"], []),
        ("llama-factory", {"use_rslora": True, "use_dora": True}, ["use_rslora"], []),
        ("axolotl", {"special_tokens": {"pad_token": "x"}}, ["special_tokens"], []),
        ("axolotl", {"kto_desirable_weight": 0.3}, [], ["kto_desirable_weight"]),
        ("axolotl", {"lr_scheduler_kwargs": {"num_cycles": 3}}, ["lr_scheduler_kwargs.num_cycles"], []),
        (
            "axolotl",
            {"datasets": [{"path": "x/y", "type": "chat_template", "shards": 8, "roles_to_train": ["user"]}]},
            ["datasets.0.shards", "datasets.0.roles_to_train"],
            [],
        ),
        (
            "trl-sft",
            {"packing_strategy": "wrapped", "padding_free": True},
            ["packing_strategy"],
            ["padding_free"],
        ),
        (
            "trl-sft",
            {"datasets": [{"path": "x", "fraction": 0.5, "columns": []}]},
            ["datasets.0.fraction"],
            [],
        ),
        ("trl-dpo", {"label_smoothing": 0.1}, ["label_smoothing"], []),
        ("trl-sft", {"lora_r": 3, "use_peft": None}, [], ["lora_r"]),
        ("trainer", {"report_to": "mlflow", "fsdp": "full_shard"}, ["report_to", "fsdp"], []),
        ("trainer", {"save_steps": 0.1, "bf16": "full"}, ["save_steps", "bf16"], []),
        ("trainer", {"trust_remote_code": True}, ["data.kind", "trust_remote_code"], []),
    ],
)
def test_what_is_not_taken_is_named(imported, tmp_path, tool, changes, left_open, no_effect):
    draft = imported(tool, changes)
    assert set(left_open) <= draft.left_open.keys()
    assert set(no_effect) <= draft.no_effect.keys()
    text = (tmp_path / "out" / "recipe.yaml").read_text()
    assert all(f"\n# left open: {key}: {why}" in text for key, why in draft.left_open.items())


@pytest.mark.parametrize(
    ("tool", "changes", "message"),
    [
        ("llama-factory", {"learning_rat": 1e-4}, r'\.yaml:\d+: learning_rat: unknown .*"learning_rate"'),
        ("llama-factory", {"learning_rate": "fast"}, "learning_rate: expected a number, given 'fast'"),
        ("llama-factory", {"stage": "ppo"}, "stage: ppo is not supported"),
        ("llama-factory", {"finetuning_type": "oft"}, "finetuning_type: oft is not supported"),
        (
            "llama-factory",
            {"cutoff_len": 0},
            "cutoff_len: its value makes an invalid recipe: data.sequence_length: ",
        ),
        ("axolotl", {"lora_alpha": None}, "lora_alpha is missing"),
        ("axolotl", {"datasets": [3]}, "datasets: expected keys and values, given 3"),
        ("axolotl", {"rl": "grpo"}, "rl: grpo is not supported"),
        (
            "trl-dpo",
            {"loss_type": "apo_zero"},
            "loss_type: its value makes an invalid recipe: objective.loss_type",
        ),
        (None, {}, "TRL's files do not name their trainer; add --from with one of trl-sft, trl-dpo"),
        (
            None,
            {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
            "no configuration of transformers' Trainer, LLaMA-Factory",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(imported, tmp_path, tool, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        imported(tool, changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", TREES)
def test_a_tool_is_known_by_its_keys(imported, tool):
    path = imported(tool, {}).file.path
    assert draft_recipe(path, None, 1).tool.title == draft_recipe(path, tool, 1).tool.title


def test_data_sets_are_found_by_dataset_info(imported, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "talk.json").write_text("[]")
    table = {
        "talk": {"file_name": "talk.json", "columns": {"prompt": "ask"}},
        "hub": {"hf_hub_url": "x/y", "split": "train_sft"},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))
    draft = imported("llama-factory", {})
    assert draft.recipe["data.paths"] == [str(tmp_path / "data" / "talk.json")]
    assert "a row's fields tell its layout" in draft.left_open["talk: columns"]
    draft = imported("llama-factory", {"dataset": "hub", "max_samples": 40})
    assert draft.recipe["data.sources"] == [{"dataset": "x/y", "split": "train_sft", "max_documents": 40}]


def test_their_json_without_what_the_recipe_says(imported, tmp_path):
    given = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
    }
    (tmp_path / "ds.json").write_text(json.dumps(given))

    def json_of(tool, **changes):
        draft = imported(tool, changes)
        return json.loads((tmp_path / "out" / "deepspeed.json").read_text()), draft

    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto"}
    made, draft = json_of("llama-factory", deepspeed="ds.json")
    assert made == {"zero_optimization": zero, "bf16": {"enabled": True}}
    assert draft.recipe["schedule.kind"] == "constant"  # their JSON's, as in transformers
    assert (draft.recipe["schedule.warmup"], draft.recipe["optimizer.learning_rate"]) == (0.1, 1e-4)
    assert draft.no_effect.keys() == {"lr_scheduler_type"}
    assert draft.left_open.keys() == {"deepspeed: optimizer", "deepspeed: scheduler"}
    made, _ = json_of("llama-factory", deepspeed="ds.json", bf16=None, fp16=True)
    assert made["fp16"]["enabled"] is True
    made, draft = json_of("llama-factory", deepspeed="examples/ds_z3_config.json")
    assert (made["zero_optimization"]["stage"], list(draft.left_open)) == ("FILL-IN", [])
    assert draft.fill_in[0].startswith("zero_optimization.stage in deepspeed.json: examples/ds_z3_config")
    whole = {"adapter": "lora", "load_in_4bit": None}
    assert json_of("axolotl", fsdp=["full_shard"], **whole)[0]["zero_optimization"]["stage"] == 3
    assert json_of("axolotl", fsdp=["full_shard"])[0]["zero_optimization"]["stage"] == 2  # of 4 bits
    assert json_of("trl-sft")[0]["bf16"] == {"enabled": True}  # TRL's default
    assert json_of("axolotl")[0]["bf16"] == {"enabled": "auto"}  # Axolotl's


def test_their_json_decides_schedule_and_optimizer(imported, tmp_path):
    """transformers trains with the sections of the JSON, whatever the arguments say."""
    params = {"warmup_num_steps": 20, "total_num_steps": 200, "warmup_min_lr": 0, "warmup_max_lr": "auto"}
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.05, "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}},
    }
    arguments = {"optim": "adamw_8bit", "lr_scheduler_type": "cosine_with_restarts"}
    draft = imported("trainer", {**arguments, "deepspeed": sections})
    ours = {
        "optimizer.kind": "adamw",
        "optimizer.learning_rate": 5e-5,
        "optimizer.weight_decay": 0.05,
        "optimizer.betas": [0.8, 0.9],
        "schedule.kind": "linear",
        "schedule.min_learning_rate_ratio": 0.0,
        "schedule.warmup": 20,
        "max_steps": 200,
        "max_epochs": None,
    }
    assert {key: draft.recipe.get(key) for key in ours} == ours
    assert draft.no_effect.keys() == arguments.keys()
    assert not {"optimizer.kind", "schedule.kind"} & {line.partition(":")[0] for line in draft.fill_in}
    sections = {"optimizer": {"type": "Lion"}, "scheduler": {"type": "OneCycle"}}
    draft = imported("trainer", {"deepspeed": sections})
    assert (draft.recipe["optimizer.kind"], draft.recipe["schedule.kind"]) == ("FILL-IN", "FILL-IN")
    assert {"optimizer.kind", "schedule.kind"} <= {line.partition(":")[0] for line in draft.fill_in}


@pytest.mark.parametrize(
    ("changes", "zero", "left_open"),
    [
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "new": 1}},
            {"stage": 3},
            ["deepspeed_config.new"],
        ),
        (
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"offload_optimizer_device": "cpu", "offload_param_device": "none"},
            },
            {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            [],
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}},
            {"stage": 3},
            ["fsdp_config.fsdp_sharding_strategy"],
        ),
        ({"distributed_type": "MULTI_GPU"}, {"stage": 0}, []),
    ],
)
def test_accelerate_says_how_the_work_is_split(tmp_path, changes, zero, left_open):
    path = tmp_path / "default_config.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_processes": 4} | changes))
    draft = draft_recipe(path, None, 1)
    write_files(draft, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert (written["zero_optimization"], draft.gpus) == (zero, 4)
    assert [*draft.left_open] == left_open
    assert all(any(line.startswith(f"left open: {key}") for line in written["_comment"]) for key in left_open)
    assert not (tmp_path / "out" / "recipe.yaml").exists()


def test_a_deepspeed_json_is_for_the_run_itself(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(
        ConfigError, match=r"ds\.json: a DeepSpeed JSON needs no import; give it to --deepspeed"
    ):
        draft_recipe(path, None, 1)


def test_what_is_repeated_of_theirs_stays_a_comment(imported, tmp_path):
    imported("llama-factory", {"dataset": "a\nname: evil", "template": "b\nname: evil", "c\nname: evil": 1})
    recipe = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "name" not in yaml.safe_load(recipe)
    assert "# left open: c name: evil: not in the import's table" in recipe
