"""`python -m pipeline plan`, as it is typed: what it says, what it refuses, what it does not import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.config.model_schema import AdapterConfig
from pipeline.config.schema import cache_folder
from pipeline.config.settings import load_settings
from pipeline.config.split import Device
from pipeline.models.sizes import count
from pipeline.planner.place import History, Kind, Measured, place_of
from pipeline.planner.proposals import proposals
from pipeline.planner.shapes import model_of

LLAMA_8B = ["--config", str(ROOT / "launch" / "recipes" / "llama_8b.yaml")]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]
CNN = str(ROOT / "launch" / "recipes" / "digits_cnn.yaml")
ON_8 = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "8"]


def plan(capsys, *words):
    assert main(["plan", *words, "--no-history"]) in (0, None)
    return capsys.readouterr().out


def plan_json(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def test_it_answers_without_torch_and_what_stands_on_it():
    code = (
        "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); "
        "print([n for n in ('torch', 'transformers', 'deepspeed', 'numpy') if n in sys.modules])"
    )
    words = [sys.executable, "-c", code, "plan", *ON_8, "--no-history"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for text in (
        "8,030,261,248 parameters",
        "optimizer states",
        "activations kept",
        "MFU",
    ):
        assert text in done.stdout
    assert re.search(r"there is .* \d+%: fits$", done.stdout, re.M)
    assert re.search(r"^[\d,]+ tokens/s, [\d,]+ of one GPU", done.stdout, re.M)


def test_an_own_optimizer_is_not_imported_and_counts_as_adamw(capsys):
    own, adamw = (plan_json(capsys, *ON_8, f"optimizer.kind={kind}")["memory"] for kind in ("a:b", "adamw"))
    assert own["parts_bytes"]["optimizer"] == adamw["parts_bytes"]["optimizer"]
    assert "a:b is taken to keep as much as AdamW: two numbers a parameter" in own["remarks"]


def test_json_has_parts_that_make_the_peak_and_the_step(capsys):
    told = plan_json(capsys, *ON_8)
    memory, time = told["memory"], told["time"]
    assert memory["peak_bytes"] == pytest.approx(max(memory["phases_bytes"].values()), rel=1e-6)
    assert memory["peak_bytes"] <= sum(memory["parts_bytes"].values()) * 1.001
    assert memory["fits"] is True
    assert time["tokens_per_second"] == pytest.approx(8 * time["tokens_per_second_per_gpu"])
    tokens = told["batch"]["global_batch_size"] * 4096
    assert time["tokens_per_second"] * time["seconds"] == pytest.approx(tokens)
    assert told["run"]["hours"] == pytest.approx(1000 * time["seconds"] / 3600)
    assert [each["gpus"] for each in told["scaling"]] == [1, 2, 4, 8, 16]
    assert told["checkpoint_bytes"] == 12 * 8_030_261_248
    dear = plan_json(capsys, *ON_8, "log.price_per_device_hour=2.5")
    assert dear["run"]["cost"] == pytest.approx(2.5 * 8 * told["run"]["hours"])


def test_what_does_not_fit_is_told_what_to_change_and_each_change_helps(capsys):
    tight = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "2", "data.sequence_length=32768"]
    tight += ["model.activation_checkpointing=none", "model.activation_budget_gib=null"]
    now = plan_json(capsys, *tight)
    assert now["memory"]["fits"] is False
    assert now["changes"]
    for change in now["changes"][:3]:
        after = plan_json(capsys, *tight, *change["overrides"])
        gain = now["memory"]["peak_bytes"] - after["memory"]["peak_bytes"]
        assert gain == pytest.approx(change["gain"], rel=1e-6)
        assert after["time"]["seconds"] / now["time"]["seconds"] == pytest.approx(change["slower"])
    assert plan_json(capsys, *tight, *now["changes"][0]["overrides"])["memory"]["fits"] is True


def limits(capsys, *words):
    return json.loads(plan(capsys, *words, "--json"))


def with_number(words, more):
    """The words with so much more in the first of them."""
    key, _, number = words[0].partition("=")
    return [f"{key}={int(number) + more}", *words[1:]]


@pytest.mark.parametrize(
    ("option", "name", "step"),
    [("--longest", "longest sequence", 128), ("--largest", "largest micro-batch", 1)],
)
def test_as_much_as_is_told_fits_by_its_words_and_more_does_not(capsys, option, name, step):
    """Whatever the recipe, the command and the JSON said of the batch."""
    given = [*ON_8, "batch.global_batch_size=128", "ds.train_batch_size=128"]
    told = limits(capsys, *given, option)[name]
    found = plan_json(capsys, *given, *told["overrides"])
    assert found["memory"]["peak_bytes"] == told["peak_bytes"]
    assert found["memory"]["fits"] is True
    assert found["batch"]["gradient_accumulation_steps"] == 1
    assert told["stops"] == "memory"
    more = plan_json(capsys, *given, *with_number(told["overrides"], step))
    assert more["memory"]["fits"] is False


@pytest.mark.parametrize("split", ["zero3", "tensor2", "sequence2"])
def test_the_largest_model_fits_by_its_words_and_a_larger_one_does_not(capsys, split):
    """Also where ranks divide the heads, of which not every number can be divided."""
    given = [
        *LLAMA_8B,
        "--deepspeed",
        str(ROOT / "ds_configs" / f"{split}.json"),
        "--gpu",
        "h100",
        "--gpus",
        "8",
    ]
    told = limits(capsys, *given, "--largest")["largest model"]
    found = plan_json(capsys, *given, *told["overrides"])
    assert found["memory"]["fits"] is True
    assert found["memory"]["peak_bytes"] == told["peak_bytes"]
    assert found["model"]["parameters"] == told["parameters"]
    sizes = dict(word.split("=") for word in told["overrides"])
    heads, step = int(sizes["model.num_key_value_heads"]), 1 if split == "zero3" else 2
    by = {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_layers": 4,
        "num_heads": 4,
        "num_key_value_heads": 1,
    }
    larger = [f"model.{key}={each * (heads + step)}" for key, each in by.items()]
    assert plan_json(capsys, *given, *told["overrides"], *larger)["memory"]["fits"] is False


def test_what_ends_a_search_in_place_of_memory_is_told(capsys):
    tiny = [*LLAMA_8B, "--gpu", "b200", "--gpus", "8", "--nodes", "1000", *ZERO3, "model.hidden_size=64"]
    tiny += [
        "model.intermediate_size=128",
        "model.num_heads=2",
        "model.num_key_value_heads=2",
        "data.sequence_length=2",
    ]
    told = limits(capsys, *tiny, "--largest")
    assert {each["stops"] for each in told.values()} == {"more is not tried"}
    assert "more is not tried" in plan(capsys, *tiny, "--largest").splitlines()[0]
    cnn = ["--config", CNN, "--gpu", "a100"]
    assert plan(capsys, *cnn, "--largest").splitlines()[1].endswith("none: how cnn would grow is not known")


def test_in_place_of_pretrained_weights_the_largest_model_is_a_new_one(capsys, tmp_path):
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    shapes = {
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "attention_bias": True,
    }
    config = {"model_type": "llama", "max_position_embeddings": 2048, **sizes, **shapes}
    given = ["--config", str(pretrained(tmp_path, config)), "--gpu", "h100", "engine.precision=bf16"]
    told = limits(capsys, *given, "--largest")["largest model"]
    found = plan_json(capsys, *given, *told["overrides"])
    assert found["model"]["parameters"] == told["parameters"] > 10**9
    assert found["memory"]["peak_bytes"] == told["peak_bytes"]
    settings = load_settings(given[1], None, told["overrides"])
    assert settings.config.model.extra == {"attention_bias": True, "tie_word_embeddings": True}
    assert settings.config.data.tokenizer.pretrained == str(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_words_for_the_largest_model_are_those_of_its_family(capsys, tmp_path, family):
    """Not every one has a word for key-value heads; a model can be built by them, of that many parameters."""
    recipe = tmp_path / "recipe.yaml"
    sizes = "hidden_size: 64, num_layers: 2, num_heads: 2"
    model = f"{{kind: causal_lm, architecture: {family}, {sizes}}}"
    data = "{kind: text, paths: [python_stdlib], sequence_length: 64}"
    recipe.write_text(f"max_steps: 1\nmodel: {model}\ndata: {data}\n")
    given = ["--config", str(recipe), "--gpu", "h100", "--gpu-memory", "3", "engine.precision=fp32"]
    told = limits(capsys, *given, "--largest")["largest model"]
    changed = load_settings(recipe, None, ["engine.precision=fp32", *told["overrides"]])
    assert count(changed.config).numel == told["parameters"] > 10**7


def pretrained(folder, config):
    """A recipe that starts from this folder's weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    recipe = folder / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib]}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {folder}}}\ndata: {data}\n")
    return recipe


def test_an_adapter_is_proposed_in_words_that_further_ones_can_follow(tmp_path):
    config = {"model_type": "llama", "hidden_size": 512}
    settings = load_settings(pretrained(tmp_path, config), None, ["engine.precision=bf16"])
    found = proposals(settings, settings.resolve(1, Device("cuda", bf16=True, fp16=True)))
    (change,) = [each for each in found if each.name == "train an adapter"]
    assert change.other_curve
    adapted = settings.followed_by([*change.overrides, "adapter.rank=8"])
    assert adapted.config.adapter == AdapterConfig(kind="lora", rank=8)


@pytest.mark.parametrize("option", ["--longest", "--largest"])
def test_what_runs_here_took_corrects_how_far_one_can_go(capsys, tmp_path, option):
    given = [*ON_8, f"data.cache_dir={tmp_path}"]
    settings = load_settings(given[1], given[3], given[-1:])
    place = place_of("h100", None, 8, 1, None, None)
    plain = limits(capsys, *given, option)
    for each in plain.values():
        config = settings.followed_by(each["overrides"]).config
        resolved = settings.followed_by(each["overrides"]).resolve(8, place.device)
        kind = Kind.of(place.gpu.name, model_of(config), config, resolved)
        History(cache_folder(settings.config)).add(Measured(kind, memory=1.2, speed=None, flops=None))
    assert main(["plan", *given, option, "--json"]) in (0, None)
    corrected = json.loads(capsys.readouterr().out)
    for name, told in corrected.items():
        assert told["overrides"] != plain[name]["overrides"]
        found = plan_json(capsys, *given, *told["overrides"])
        assert told["peak_bytes"] == pytest.approx(1.2 * found["memory"]["peak_bytes"], rel=1e-6)


def test_gpus_that_would_not_fill_machines_evenly_are_left_out(capsys):
    given = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "3", "--nodes", "2"]
    told = plan_json(capsys, *given)["scaling"]
    assert [each["gpus"] for each in told] == [1, 2, 6]


def test_what_is_not_known_is_not_said_to_fit(capsys):
    """Without activations the peak is far below what there is."""
    told = plan_json(capsys, *ON_8, "model.architecture=gemma2", "data.sequence_length=8192")
    assert told["memory"]["peak_bytes"] < told["memory"]["there_bytes"] / 2
    assert told["memory"]["fits"] is None
    assert told["changes"] == []
    assert {each["fits"] for each in told["scaling"]} <= {None, False}
    auto = ["batch={micro_batch_size: auto, global_batch_size: 512}"]
    assert plan_json(capsys, *ON_8, *auto, "model.architecture=gemma2")["batch"]["micro_batch_size"] == 1
    assert main(["plan", *ON_8, "model.architecture=gemma2"]) in (0, None)
    assert "whether it fits is not known" in capsys.readouterr().out


def test_more_and_fewer_gpus_are_planned_as_they_would_be_alone(capsys):
    auto = ["batch={micro_batch_size: auto, global_batch_size: 128}", "model.activation_budget_gib=null"]
    told = plan_json(capsys, *LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "4", *auto)["scaling"]
    (on_2,) = [each for each in told if each["gpus"] == 2]
    alone = plan_json(capsys, *LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "2", *auto)
    assert on_2["peak_bytes"] == alone["memory"]["peak_bytes"]


@pytest.mark.parametrize("option", ["--longest", "--largest"])
def test_the_recipes_own_batch_is_no_matter_where_another_is_looked_for(capsys, option):
    given = ["--config", str(ROOT / "launch" / "recipes" / "dpo.yaml"), "--gpu", "h100"]
    assert limits(capsys, *given, "--gpus", "8", "--nodes", "2", option)


def test_a_cpu_is_its_own_host_and_has_no_data_sheet(capsys, tmp_path):
    history = History(tmp_path)
    name = place_of(None, None, 1, 1, None, None).gpu.name
    history.add(Measured(Kind(name, "", "", False), memory=None, speed=None, flops=1e11))
    stdlib = str(ROOT / "launch" / "recipes" / "python_stdlib.yaml")
    given = ["--config", stdlib, "--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    assert main(["plan", *given, f"data.cache_dir={tmp_path}", "--json"]) in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert told["time"]["mfu"] is None
    assert not [each for each in told["changes"] if any("offload" in word for word in each["overrides"])]


def test_a_model_of_ones_own_is_counted(capsys):
    recipe = ["--config", CNN]
    told = plan_json(capsys, *recipe, "--gpu", "a100")
    assert told["model"]["parameters"] == 21_386
    assert told["memory"]["parts_bytes"]["activations"] > 0
    assert told["time"] is None


def test_auto_is_planned_with_the_largest_micro_batch_that_fits(capsys):
    auto = [*ON_8, "batch={micro_batch_size: auto, global_batch_size: 512}", "data.sequence_length=16384"]
    auto += ["model.activation_budget_gib=null"]
    found = plan_json(capsys, *auto)["batch"]["micro_batch_size"]
    assert 1 < found < 64
    for rows, fits in ((found, True), (2 * found, False)):
        given = [*auto[:-2], f"batch={{micro_batch_size: {rows}, global_batch_size: 512}}", *auto[-2:]]
        assert plan_json(capsys, *given)["memory"]["fits"] is fits


def test_words_for_the_longest_rows_are_accepted_by_a_run(capsys, tmp_path):
    """Where the recipe or pretrained weights say how many positions there are."""
    stated = [*ON_8, "model.max_sequence_length=4096"]
    words = limits(capsys, *stated, "--longest")["longest sequence"]["overrides"]
    length, positions = (int(word.rpartition("=")[2]) for word in words[:2])
    assert length == positions > 4096
    config = {"model_type": "llama", "max_position_embeddings": 2000, "hidden_size": 512}
    given = ["--config", str(pretrained(tmp_path, config)), "--gpu", "h100", "engine.precision=bf16"]
    told = limits(capsys, *given, "--longest")["longest sequence"]
    assert told["overrides"][0] == "data.sequence_length=2000"
    assert told["stops"] == f"{tmp_path} has no more positions"
    assert plan_json(capsys, *given, *told["overrides"])["memory"]["peak_bytes"] == told["peak_bytes"]


def test_a_file_that_is_there_is_not_written_over_unasked(capsys, tmp_path):
    path = tmp_path / "split.json"
    path.write_text("mine")
    words = ["plan", *LLAMA_8B, "--gpu", "h100", "--gpus", "8", "--suggest", str(path)]
    assert main(words) == 2
    assert "is there already; name another file, or add --force" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert main([*words, "--force"]) in (0, None)
    assert json.loads(path.read_text())["zero_optimization"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", -4096),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("head_dim", "a"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
    ],
)
def test_a_config_from_elsewhere_with_a_number_that_can_be_none_is_one_line(capsys, tmp_path, name, value):
    config = {"model_type": "llama", "max_position_embeddings": 2048, name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib], sequence_length: 64}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {tmp_path}}}\ndata: {data}\n")
    assert main(["plan", "--config", str(recipe), "--gpu", "h100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"config.json: {name} is {value!r}" in line or f"config.json: the config has no {name}" in line


def test_what_there_is_too_little_of_is_named(capsys):
    offloaded = [*LLAMA_8B, "--deepspeed", str(ROOT / "ds_configs" / "zero3_offload.json"), "--gpu", "h100"]
    told = plan(capsys, *offloaded, "--gpus", "2", "--host-memory", "100")
    assert re.search(r"^host .* of 100\.0.*: does not fit$", told, re.M)
    assert re.search(r"there is .*: does not fit: host memory$", told, re.M)
    told = plan(capsys, "--host-memory", "0.5")
    assert re.search(r"there is +0\.50 GiB  \d+%: does not fit$", told, re.M)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h1000"], "no such GPU"),
        (["--gpu-memory", "-3"], "--gpu-memory -3"),
        (["--network", "fast"], "--network fast"),
        (["--gpus", "0"], "no positive number"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["model.pretrained=./nowhere", "model.architecture=null"], "there is no such folder"),
        (["model.num_layer=3"], "num_layers"),
        (["model.architecture=gemma2", "--longest"], "what activations take is not known of gemma2"),
        (["model.architecture=gemma2", "--suggest", "a.json"], "what gemma2 takes on 8 x H100"),
        (["data.sequence_length=4194304", "--suggest", "a.json"], "no split of llama"),
        (["--suggest", "a.txt"], "--suggest a.txt: the split is a JSON"),
        (["--longest", "--config", CNN], "--longest: what a row of cnn takes is known"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, text):
    with pytest.raises(SystemExit) if text == "no positive number" else nullcontext() as ended:
        code = main(["plan", *ON_8, *words])
    assert (code if ended is None else ended.value.code) == 2
    told = capsys.readouterr().err
    assert text in told.splitlines()[-1]
    assert "Traceback" not in told
