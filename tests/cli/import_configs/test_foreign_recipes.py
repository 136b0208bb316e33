"""Configurations of LLaMA-Factory, Axolotl and TRL, and the recipes that are made of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import yaml

from pipeline.cli.import_configs import mapping
from pipeline.cli.import_configs.writing import draft_of, write
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError

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


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """`imported(tree, gpus=1, origin=None, **changes)`: the draft, and what ours comes to."""
    monkeypatch.chdir(tmp_path)

    def function(tree, gpus=1, origin=None, name="theirs", **changes):
        tree = {key: value for key, value in (tree | changes).items() if value is not None}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree))
        draft = draft_of(path, origin, gpus, tmp_path / "out")
        source, refused = write(draft)
        assert refused is None
        out = tmp_path / "out"
        settings = load_settings(out / "recipe.yaml", out / "deepspeed.json")
        text = (out / "recipe.yaml").read_text()
        return SimpleNamespace(
            draft=draft, config=settings.config, json=settings.deepspeed, source=source, text=text
        )

    return function


@pytest.fixture
def talk(tmp_path):
    """dataset_info.json with `talk`, 90 rows of columns of its own in a list, and `judged`."""
    rows = [{"ask": f"What is {n}?", "more": "Shortly.", "say": "A number."} for n in range(90)]
    judged = {"msgs": [{"who": "u", "text": "Hm?"}], "good": {"who": "a", "text": "Yes."}}
    judged["bad"] = {"who": "a", "text": "No."}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "talk.json").write_text(json.dumps(rows))
    (tmp_path / "data" / "judged.jsonl").write_text(json.dumps(judged) + "\n")
    tags = {"role_tag": "who", "content_tag": "text", "user_tag": "u", "assistant_tag": "a"}
    table = {
        "talk": {
            "file_name": "talk.json",
            "columns": {"prompt": "ask", "query": "more", "response": "say"},
        },
        "judged": {
            "file_name": "judged.jsonl",
            "formatting": "sharegpt",
            "ranking": True,
            "columns": {"messages": "msgs", "chosen": "good", "rejected": "bad"},
            "tags": tags,
        },
        "hub": {"hf_hub_url": "x/y", "split": "train_sft"},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(table))


def test_a_batch_is_theirs_times_the_gpus(imported):
    made = imported(LLAMA_FACTORY, gpus=4)
    assert made.config.batch.micro_batch_size == 2
    assert made.config.batch.global_batch_size == 2 * 8 * 4
    assert imported(AXOLOTL, gpus=3).config.batch.global_batch_size == 2 * 4 * 3
    assert imported(TRL, gpus=2).config.batch.global_batch_size == 8 * 1 * 2  # the Trainer's default
    found = imported(LLAMA_FACTORY, gpus=4, auto_find_batch_size=True).config.batch  # of the same step
    assert (found.micro_batch_size, found.global_batch_size) == ("auto", 64)


@pytest.mark.parametrize("tree", [LLAMA_FACTORY, AXOLOTL, TRL])
def test_what_changes_the_curve_and_was_not_said_is_theirs(imported, tree):
    config = imported(tree).config
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.optimizer.weight_decay == 0.0
    assert config.schedule.min_learning_rate_ratio == 0.0
    assert config.data.eval_fraction == tree.get("val_set_size", 0.0)
    assert config.seed == 42


def test_a_rate_that_was_not_said_is_theirs_and_not_the_adapters(imported):
    assert imported(LLAMA_FACTORY, learning_rate=None).config.optimizer.learning_rate == 5e-5
    assert imported(LLAMA_FACTORY, learning_rate=None, stage="dpo").config.optimizer.learning_rate == 5e-5
    for trainer, rate in {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "orpo": 1e-6}.items():
        assert imported(TRL, origin=f"trl-{trainer}").config.optimizer.learning_rate == rate


def test_an_adapter(imported):
    made = imported(LLAMA_FACTORY).config.adapter
    assert (made.kind, made.rank, made.alpha, made.targets) == ("lora", 8, 16.0, None)  # alpha: 2 x rank
    made = imported(LLAMA_FACTORY, use_rslora=True, lora_target="q_proj, v_proj", lora_alpha=5).config.adapter
    assert (made.kind, made.alpha, made.targets) == ("rslora", 5.0, ["q_proj", "v_proj"])
    made = imported(LLAMA_FACTORY, use_rslora=True, use_dora=True, lora_rank=16, lora_alpha=8).config.adapter
    assert (made.kind, made.alpha) == ("dora", 32.0)  # 8 / sqrt(16) is 32 / 16
    made = imported(LLAMA_FACTORY, adapter_name_or_path="saves/one").config.adapter
    assert (made.weights, made.rank, made.alpha) == ("saves/one", None, None)
    assert imported(LLAMA_FACTORY, finetuning_type="full").config.adapter is None
    made = imported(AXOLOTL)
    assert (made.config.adapter.rank, made.config.adapter.alpha) == (32, 16.0)
    assert made.config.adapter.quantize == "nf4"
    made = imported(TRL).config.adapter
    assert (made.rank, made.alpha, made.dropout, made.targets) == (16, 32.0, 0.05, ["q_proj", "v_proj"])
    assert imported(TRL, lora_target_modules="all-linear").config.adapter.targets is None


@pytest.mark.parametrize(
    ("loss", "kind", "more"),
    [
        ("sigmoid", "dpo", {"loss_type": "sigmoid", "beta": 0.2, "sft_weight": 0.5}),
        ("hinge", "dpo", {"loss_type": "hinge"}),
        ("ipo", "dpo", {"loss_type": "ipo"}),
        ("orpo", "orpo", {"beta": 0.2}),
        ("simpo", "simpo", {"beta": 0.2, "gamma": 0.5}),
        ("kto_pair", "kto", {"beta": 0.2}),
    ],
)
def test_losses_of_llama_factory(imported, loss, kind, more):
    changes = {"stage": "dpo", "pref_loss": loss, "pref_beta": 0.2, "pref_ftx": 0.5}
    made = imported(LLAMA_FACTORY, **changes)
    objective = made.config.objective
    assert objective.kind == kind
    assert {key: getattr(objective, key) for key in more} == more
    assert ("pref_ftx" in made.draft.not_taken) == (kind in ("orpo", "kto"))
    assert made.config.data.kind == "preference"
    assert made.config.data.sequence_length == 2 * 512  # both answers
    assert made.config.data.answer_length == 512  # which is what has to fit into the model's positions
    assert made.config.optimizer.learning_rate == 1e-4  # not by the width


def test_objectives_of_axolotl_and_trl(imported):
    made = imported(AXOLOTL, rl="ipo", dpo_label_smoothing=0.1)
    assert made.config.objective.loss_type == "ipo"
    assert "dpo_label_smoothing" in made.draft.not_taken
    for rl in ("orpo", "simpo"):  # whose text of rows is not in the tables
        with pytest.raises(ConfigError, match=r"datasets\.0\.type: chat_template: its text is not"):
            imported(AXOLOTL, rl=rl)
    made = imported(TRL, loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.4]).config
    assert (made.objective.kind, made.objective.sft_weight) == ("dpo", 0.5)
    assert made.optimizer.learning_rate == 1e-6
    assert imported(TRL, name="my-kto").config.objective.kind == "kto"
    assert imported(TRL, desirable_weight=1.5).config.objective.desirable_weight == 1.5
    assert imported(TRL, origin="trl-orpo").config.objective.kind == "orpo"


def test_reward_models(imported):
    centred = {"center_rewards_coefficient": 0.01}
    judged = [{"path": "x/y", "type": "bradley_terry.chat_template"}]
    theirs = (AXOLOTL | {"datasets": judged, "reward_model": True}, TRL)
    for made in (imported(tree, **centred) for tree in theirs):
        assert made.config.objective.margin_weight == 0.0  # of two scores nothing is made there
        assert (made.config.objective.kind, made.config.objective.center_weight) == ("reward", 0.01)
        assert made.config.data.kind == "preference"
    assert imported(LLAMA_FACTORY, stage="rm").config.objective.kind == "reward"


def test_a_data_set_of_llama_factory(imported, talk, tmp_path):
    made = imported(LLAMA_FACTORY, gpus=1, val_size=0.1)
    assert made.config.data.paths == [str(tmp_path / "data" / "talk.json")]
    assert (made.config.data.layout, made.config.data.append_eos) == ("row", False)
    template = (tmp_path / "out" / "template.jinja").read_text()
    assert all(f'row["{column}"]' in template for column in ("ask", "more", "say"))
    with pytest.raises(ConfigError, match="talk and hub differ in columns or tags"):
        imported(LLAMA_FACTORY, dataset="talk,hub")
    made = imported(LLAMA_FACTORY, dataset="hub", max_samples=40).config.data.sources
    assert (made[0].dataset, made[0].split, made[0].max_documents) == ("x/y", "train_sft", 40)


def test_what_depends_on_the_number_of_rows_is_a_share_or_left_open(imported, talk):
    """`max_samples` is a limit: nothing is counted by it."""
    made = imported(LLAMA_FACTORY, max_samples=40, val_size=100)
    assert made.config.schedule.warmup == 0.1
    assert made.config.data.eval_fraction == 0.0
    assert "number of rows" in made.draft.not_taken["val_size"]
    made = imported(LLAMA_FACTORY, val_size=0.1, eval_strategy="steps", eval_steps=0.1, save_strategy="epoch")
    assert (made.config.eval.every, made.config.checkpoint.every) == ("0.3 epochs", "1 epochs")
    made = imported(LLAMA_FACTORY, val_size=0.1, eval_strategy="steps", eval_steps=0.1, max_steps=55)
    assert made.config.eval.every == 6
    made = imported(AXOLOTL, evals_per_epoch=4, saves_per_epoch=1, num_epochs=3).config
    assert (made.eval.every, made.checkpoint.every) == ("0.25 epochs", "1 epochs")


def test_a_data_set_that_is_not_at_hand_has_no_template_yet(imported):
    made = imported(LLAMA_FACTORY)
    assert made.config.data.chat_template == "FILL-IN.jinja"
    assert "talk is not in data/dataset_info.json" in made.draft.fill_in[0]


def test_tool_calls_of_llama_factory_are_refused(imported, tmp_path):
    turns = [("human", "Where?"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "{}")]
    row = {"conversations": [{"from": role, "value": said} for role, said in [*turns, ("gpt", "There.")]]}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tool.json").write_text(json.dumps([row]))
    (tmp_path / "data" / "dataset_info.json").write_text(
        '{"talk": {"file_name": "tool.json", "formatting": "sharegpt"}}'
    )
    with pytest.raises(ConfigError, match=r":\d+: dataset: talk: tool calls: LLaMA-Factory writes"):
        imported(LLAMA_FACTORY)
    assert not (tmp_path / "out").exists()


def test_tags_without_the_role_are_refused_with_the_usual_ones(imported, tmp_path):
    """LLaMA-Factory itself ends in a KeyError there: given tags have no defaults beside them."""
    (tmp_path / "data").mkdir()
    entry = {"file_name": "tool.json", "formatting": "sharegpt", "tags": {"function_tag": "function_call"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"talk": entry}))
    with pytest.raises(
        ConfigError, match=r"tags without role_tag, .*; usual are role_tag: from, content_tag: value"
    ):
        imported(LLAMA_FACTORY)


def test_entries_of_axolotl_are_taken_or_named(imported, tmp_path):
    one = {"path": "x/y", "type": "chat_template", "shards": 8}
    made = imported(AXOLOTL, datasets=[one | {"roles": {"user": ["human"]}, "field_messages": "talk"}])
    assert made.draft.not_taken["datasets.0.shards"]
    assert "# not taken: datasets.0.shards: " in made.text
    assert made.config.data.sources[0].fields == {"conversations": "talk"}
    for changes, told in (
        ({"train_on_eos": "all"}, "datasets.0.train_on_eos: 'all': the run reads turn"),
        ({"roles": {"assistant": ["model"]}}, "datasets.0.roles: "),
        ({"type": "brand_new"}, "datasets.0.type: brand_new: its text is not in the import's tables"),
        ({"type": {"format": "{{x}}{instruction}"}}, "datasets.0.type: '{' in a format"),
    ):
        with pytest.raises(ConfigError, match=told):
            imported(AXOLOTL, datasets=[one | changes])
    with pytest.raises(ConfigError, match=r"types alpaca_chat\.load_qa, chat_template in one run"):
        imported(AXOLOTL, datasets=[one, {"path": "a/b", "type": "alpaca_chat.load_qa"}])


def test_label_smoothing_of_trl_is_ignored_as_there(imported):
    made = imported(TRL, label_smoothing=0.1, loss_type="sigmoid")
    assert made.config.objective.label_smoothing == 0.0
    assert "does not read it" in made.draft.not_taken["label_smoothing"]
    assert imported(TRL, label_smoothing=0.1, loss_type="robust").config.objective.label_smoothing == 0.1


@pytest.mark.parametrize(
    ("tree", "changes"),
    [
        (LLAMA_FACTORY, {"lr_scheduler_kwargs": {"num_cycles": 3}}),
        (AXOLOTL, {"lr_scheduler_kwargs": {"num_cycles": 3}}),
        (AXOLOTL, {"datasets": [{"path": "x/y", "type": {"format": "{instruction}", "fresh": 1}}]}),
        (
            TRL,
            {"datasets": [{"path": "x/y", "fraction": 0.5, "columns": ["messages"]}], "dataset_name": None},
        ),
    ],
)
def test_no_key_at_any_depth_vanishes(imported, tree, changes):
    def leaves(value, at=""):
        if isinstance(value, dict):
            for key, each in value.items():
                yield from leaves(each, f"{at}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, each in enumerate(value):
                yield from leaves(each, f"{at}{number}.")
        else:
            yield at[:-1]

    made = imported(tree, **changes)
    read = {f"{section.at}{key}" for section in _sections(made.draft.top) for key in section.read}
    for leaf in leaves(made.draft.file.tree):
        parts = leaf.split(".")
        assert any(".".join(parts[: n + 1]) in read for n in range(len(parts))), leaf
    named = {key.split(".")[-1] for key in made.draft.not_taken}
    unknown = {"num_cycles", "fresh", "fraction", "columns"} & named
    assert len(unknown) == (2 if tree is TRL else 1)


def _sections(section):
    yield section
    for each in section.below:
        yield from _sections(each)


def test_arguments_of_the_trainer(imported, tmp_path):
    theirs = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "warmup_ratio": 0.03, "bf16": True}
    theirs |= {"save_strategy": "epoch", "output_dir": "out", "torch_empty_cache_steps": 3}
    made = imported(theirs, gpus=2)
    assert (made.config.batch.global_batch_size, made.config.schedule.warmup) == (8, 0.03)
    assert made.config.checkpoint.every == "1 epochs"
    assert set(made.draft.not_taken) == {"torch_empty_cache_steps"}
    assert [each.partition(":")[0] for each in made.draft.fill_in] == ["data.paths", "model.pretrained"]


def test_accelerate_says_how_the_work_is_split(tmp_path):
    theirs = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 4}
    zero = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none", "new": 1}
    theirs |= {"mixed_precision": "bf16", "deepspeed_config": zero | {"gradient_clipping": 0.5}}
    made = accelerate(tmp_path, theirs)
    written = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert (written["bf16"], made.gpus) == ({"enabled": True}, 4)
    assert any(line.startswith("not taken: deepspeed_config.new") for line in written["_comment"])
    assert "optimizer.max_grad_norm" in made.not_taken["deepspeed_config.gradient_clipping"]
    assert not (tmp_path / "out" / "recipe.yaml").exists()
    cut = {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}
    accelerate(tmp_path, {"distributed_type": "FSDP", "fsdp_config": cut, "mixed_precision": "no"})
    written = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert written["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match="distributed_type: MEGATRON_LM is not built here"):
        accelerate(tmp_path, {"distributed_type": "MEGATRON_LM", "mixed_precision": "no"})


def accelerate(folder, tree):
    path = folder / "default_config.yaml"
    path.write_text(yaml.safe_dump(tree))
    draft = draft_of(path, "accelerate", 1, folder / "out")
    write(draft)
    return draft


def test_a_deepspeed_json_is_for_the_run_itself(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}')
    with pytest.raises(ConfigError, match=r"ds\.json: a DeepSpeed JSON; give it to --deepspeed as it is"):
        draft_of(path, None, 1, tmp_path / "out")


def test_kinds_of_data(imported):
    made = imported(LLAMA_FACTORY, stage="pt").config.data
    assert (made.kind, made.packing, made.separate_documents) == ("text", "concatenate", False)
    assert imported(LLAMA_FACTORY, packing=True).config.data.packing == "best_fit"
    assert imported(LLAMA_FACTORY, train_on_prompt=True).config.data.learn_from == "all"
    data = imported(AXOLOTL).config.data
    assert (data.layout, data.learn_from, data.packing, data.too_long) == (
        "sharegpt",
        "content",
        "best_fit",
        "drop",
    )
    made = imported(AXOLOTL, datasets=[{"path": "x/y", "type": "completion", "field": "body"}]).config.data
    assert (made.kind, made.sources[0].text_field) == ("text", "body")
    assert imported(TRL).config.data.learn_from == "all"
    assert imported(TRL, assistant_only_loss=True).config.data.learn_from == "assistant"
    made = imported(TRL, dataset_text_field="body").config.data
    assert (made.kind, made.layout, made.learn_from) == ("chat", "row", "all")


def test_a_warm_up_that_nobody_asked_for_is_axolotls(imported):
    assert imported(AXOLOTL, max_steps=1000).config.schedule.warmup == 30
    assert imported(AXOLOTL, max_steps=9000).config.schedule.warmup == 100
    assert imported(AXOLOTL, max_steps=1000, warmup_steps=0).config.schedule.warmup == 0


def test_layers_that_are_trained(imported, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_hidden_layers": 4}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    changes = {"model_name_or_path": "./model", "finetuning_type": "freeze", "freeze_trainable_layers": 3}
    frozen = imported(LLAMA_FACTORY, **changes).config.model.freeze
    assert [name for name in frozen if "layers" in name] == ["model.layers.0.*"]


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
    made = imported(LLAMA_FACTORY, deepspeed="ds.json")
    assert made.source == str(tmp_path / "ds.json")
    assert set(made.draft.not_taken) == {"cutoff_len of longer rows"}
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto"}
    assert made.json == {"zero_optimization": zero, "bf16": {"enabled": True}}
    assert imported(LLAMA_FACTORY, deepspeed="ds.json", bf16=None, fp16=True).json["fp16"]["enabled"] is True
    made = imported(LLAMA_FACTORY, deepspeed="examples/ds_z3_offload_config.json")
    assert made.source == "ds_configs/zero3_offload.json"
    assert "is not here" in made.draft.not_taken["deepspeed"]
    whole = {"adapter": "lora", "load_in_4bit": None}
    assert imported(AXOLOTL, fsdp=["full_shard"], **whole).source == "ds_configs/zero3.json"
    assert imported(AXOLOTL, fsdp=["full_shard"]).source == "ds_configs/zero2.json"  # of 4 bits
    assert imported(TRL).json["bf16"] == {"enabled": True}  # TRL's default
    assert imported(AXOLOTL).json["bf16"] == {"enabled": "auto"}  # Axolotl's


@pytest.mark.parametrize(
    ("tree", "changes"),
    [
        (LLAMA_FACTORY, {"plot_loss": True, "pissa_init": True, "pref_beta": 0.3, "brand_new": 1}),
        (AXOLOTL, {"load_in_8bit": True, "special_tokens": {"pad_token": "x"}, "kto_desirable_weight": 0.3}),
        (TRL, {"padding_free": True, "max_prompt_length": 7, "lora_r": 3, "use_peft": None}),
    ],
)
def test_what_is_not_taken_is_named(imported, tree, changes):
    made = imported(tree, **changes)
    for key in set(changes) - {"use_peft"}:
        assert made.draft.not_taken[key]
        assert f"\n# not taken: {key}: " in made.text


@pytest.mark.parametrize(
    ("tree", "changes", "message"),
    [
        (LLAMA_FACTORY, {"learning_rat": 1e-4}, '.yaml:\\d+: learning_rat: unknown .*"learning_rate"'),
        (LLAMA_FACTORY, {"learning_rate": "fast"}, "learning_rate: expected a number, given 'fast'"),
        (LLAMA_FACTORY, {"stage": "ppo"}, "stage: ppo: this version has no objective"),
        (LLAMA_FACTORY, {"cutoff_len": 0}, "makes no recipe: data.sequence_length: "),
        (AXOLOTL, {"lora_alpha": None}, "lora_alpha is missing"),
        (TRL, {"num_generations": 4}, "generates answers"),
        ({"model_name_or_pat": "a"}, {}, 'no configuration .* \\(did you mean "model_name_or_path"'),
        ({"x": 1}, {}, "no configuration of LLaMA-Factory, Axolotl, TRL, "),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(imported, tmp_path, tree, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        imported(tree, **changes)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_is_repeated_of_theirs_stays_a_comment(imported):
    made = imported(LLAMA_FACTORY, dataset="a\nname: evil", template="b\nname: evil", **{"c\nname: evil": 1})
    assert made.config.name == "run"
    assert "# not taken: c name: evil: not known" in made.text


def test_a_slip_is_not_what_another_key_is():
    tool = mapping.Tool("Other", {"lora_rank": mapping.Key("adapter.rank")}, {}, "", {}, lambda draft: None)
    assert mapping.meant("lora_rnk", tool) == "lora_rank"
    assert mapping.meant("lora_dropout", tool) is None
