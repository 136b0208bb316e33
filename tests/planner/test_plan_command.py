"""`python -m pipeline plan`, as it is typed: what it says, what it refuses, what it does not import."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.launch import ROOT

from pipeline.__main__ import main
from pipeline.cli import plan as command
from pipeline.config.settings import load_settings
from pipeline.errors import ConfigError
from pipeline.models.sizes import measure_recipe

LLAMA_8B = ["--config", str(ROOT / "launch" / "recipes" / "llama_8b.yaml")]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json")]
CNN = str(ROOT / "launch" / "recipes" / "digits_cnn.yaml")
ON_8 = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "8"]
GEMMA = ["model.architecture=gemma2"]


def plan(capsys, *words):
    assert main(["plan", *words]) in (0, None)
    return capsys.readouterr().out


def parsed(words):
    """The arguments of the command, and what they ask to plan: settings, model, place."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(words)
    settings, place = command.read_inputs(arguments)
    return arguments, (settings, command._read_model(settings), place)


def planned(*words):
    """The forecast, and what to change."""
    return command.plan_run(*parsed(words)[1])


def limits(*words):
    arguments, asked = parsed(words)
    return command.find_limits(*asked, arguments.longest)


@pytest.mark.slow
def test_it_answers_without_torch_and_what_stands_on_it():
    code = (
        "import sys; from pipeline.__main__ import main; main(sys.argv[1:]); "
        "print([n for n in ('torch', 'transformers', 'deepspeed', 'numpy') if n in sys.modules])"
    )
    words = [sys.executable, "-c", code, "plan", *ON_8]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for text in (
        "8,030,261,248 parameters",
        "optimizer states",
        "activations kept",
        "MFU",
        "of 2048.0 GiB of a machine's memory (assumed)",
        "attention is timed for documents of 2,048 tokens",
    ):
        assert text in done.stdout
    assert re.search(r"memory of the device .* \d+%: fits$", done.stdout, re.M)
    assert re.search(r"^  a step +[\d.]+ to [\d.]+ s$", done.stdout, re.M)
    assert re.search(r"^  positions per second +[\d,]+ to [\d,]+$", done.stdout, re.M)


def test_an_own_optimizer_is_not_imported_and_counts_as_adamw():
    (own, _), (adamw, _) = (planned(*ON_8, f"optimizer.kind={kind}") for kind in ("a:b", "adamw"))
    assert own.memory.parts == adamw.memory.parts
    assert "a:b is assumed to keep as much as AdamW: two numbers per parameter" in own.remarks()


def test_parts_make_the_peak_and_the_step():
    found, changes = planned(*ON_8)
    assert found.peak <= sum(found.memory.parts.values()) * 1.001
    assert (found.fits, changes) == (True, [])
    assert found.time.seconds == pytest.approx(sum(found.time.parts.values()))
    tokens = found.resolved.batch_plan.global_batch_size * 4096
    assert found.time.tokens_per_second * found.time.seconds == pytest.approx(tokens)
    assert found.hours == pytest.approx(1000 * found.time.seconds / 3600)
    assert found.checkpoint_bytes == 12 * 8_030_261_248
    dear, _ = planned(*ON_8, "log.price_per_device_hour=2.5", "--document-tokens", "4096")
    assert dear.cost == pytest.approx(2.5 * 8 * dear.hours)
    assert found.cost is None
    assert dear.time.parts["attention"] > found.time.parts["attention"]
    assert not any("documents" in line for line in dear.remarks())


def test_a_program_reads_what_is_printed(capsys):
    priced = [*ON_8, "log.price_per_device_hour=2.5"]
    told, (found, _) = json.loads(plan(capsys, *priced, "--json")), planned(*priced)
    assert told["memory"]["peak_bytes"] == found.peak
    assert (told["fits"], told["time"]["seconds"]) == (True, found.time.seconds)
    assert told["remarks"] == list(found.remarks())
    assert (told["time"]["tokens_per_second"], told["time"]["mfu"]) == (
        found.time.tokens_per_second,
        found.mfu,
    )
    assert (told["lacking"], told["disk_bytes"]) == ("", found.disk_bytes)
    cost = told["run"]["cost"]
    assert f", costs {0.8 * cost:,.2f} to {1.2 * cost:,.2f}\n" in plan(capsys, *priced)
    without_steps = plan(capsys, *priced, "max_epochs=3")
    assert "run     3 epochs; the plan does not read the data: for time and cost, add max_steps=N" in (
        without_steps
    )
    without_time = plan(capsys, *priced, "model.fp8=rowwise")
    assert "run     the time of a step is not known, so neither is the cost" in without_time
    small = [*ON_8, "--gpu-memory", "16"]
    told, (_, changes) = json.loads(plan(capsys, *small, "--json")), planned(*small)
    assert [tuple(each["overrides"]) for each in told["changes"]] == [each.overrides for each in changes]
    assert [each["slower"] for each in told["changes"]] == [each.time_ratio for each in changes]
    assert told["lacking"] == "memory"
    told = json.loads(plan(capsys, *ON_8, "--suggest", "--json"))
    assert told["command"] in plan(capsys, *ON_8, "--suggest")
    assert told["fits"] is True
    (told,) = json.loads(plan(capsys, *ON_8, "--longest", "--json")).values()
    assert " ".join(told["overrides"]) in plan(capsys, *ON_8, "--longest")
    assert told["stops"] == "memory"


def test_the_keys_of_the_printed_json_stay_what_programs_read(capsys):
    told = json.loads(plan(capsys, *ON_8, "--gpu-memory", "16", "--json"))
    sizes = ["micro_batch_size", "gradient_accumulation_steps", "dp_world_size"]
    assert [*told["batch"]] == [*sizes, "is_auto", "global_batch_size"]
    assert [*told["changes"][0]] == ["name", "kind", "overrides", "gain", "slower", "fits"]


def test_the_share_of_the_peak_is_of_what_is_computed():
    """Attention of rows that hold many documents, too: in operations as in seconds."""
    long, _ = planned(*ON_8, "data.sequence_length=131072", "--document-tokens", "2048")
    short, _ = planned(*ON_8, "data.sequence_length=2048", "batch.micro_batch_size=64")
    assert long.mfu == pytest.approx(short.mfu, rel=0.05)
    assert long.mfu < 0.6


def test_what_does_not_fit_is_told_what_to_change_and_each_change_helps(capsys):
    tight = [*LLAMA_8B, *ZERO3, "--gpu", "h100", "--gpus", "2", "data.sequence_length=32768"]
    tight += ["model.activation_checkpointing=none"]
    now, changes = planned(*tight)
    assert now.fits is False
    assert changes
    for change in changes[:3]:
        after, _ = planned(*tight, *change.overrides)
        assert now.peak - after.peak == change.gain
        is_known = after.time is not None
        assert change.time_ratio == (
            pytest.approx(after.time.seconds / now.time.seconds) if is_known else None
        )
        assert after.fits is change.fits
    assert changes[0].fits is True
    told = plan(capsys, *tight)
    assert "Changes that help" in told
    for change in changes:
        assert f" {' '.join(change.overrides)} (" in told, "no word is broken"


def test_changes_that_are_not_enough_alone_are_told_apart(capsys):
    """No change that is listed ends a run for lack of host memory."""
    on_4090 = [*LLAMA_8B, "--gpu", "4090", "--host-memory", "64"]
    zero2 = [*on_4090, "--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    assert planned(*zero2)[1] == []
    assert "No change alone is enough; --suggest finds a combination" in plan(capsys, *zero2)
    assert "This is the simplest split that fits" in plan(capsys, *zero2, "--suggest")
    assert [change.fits for change in planned(*on_4090)[1]] == [False]
    told = plan(capsys, *on_4090)
    assert "Changes that help, but none alone is enough; --suggest finds a combination\n  model.act" in told
    told = plan(capsys, *zero2, "--gpu-memory", "0.5")
    assert told.splitlines()[-1].startswith("No change is enough: no split of llama (8,030,261,248 param")
    told = plan(capsys, *zero2, "--gpu-memory", "0.5", *GEMMA)
    assert told.splitlines()[-1] == "No change alone is enough"


def with_number(words, key, more):
    """The words with so much more in one of them."""
    return [f"{key}={int(w.partition('=')[2]) + more}" if w.startswith(f"{key}=") else w for w in words]


@pytest.mark.daily(
    "zero3---longest-longest sequence-data.sequence_length-128",
    "zero3---largest-largest micro-batch-batch.micro_batch_size-1",
    "tensor2---largest-largest model-model.num_layers-1",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "name", "key", "step"),
    [
        ("--longest", "longest sequence", "data.sequence_length", 128),
        ("--largest", "largest micro-batch", "batch.micro_batch_size", 1),
        ("--largest", "largest model", "model.num_layers", 1),
    ],
)
@pytest.mark.parametrize("split", ["zero3", "tensor2"])
def test_as_much_as_is_told_fits_by_its_words_and_more_does_not(capsys, option, name, key, step, split):
    """The batch sizes of recipe, command and JSON do not matter."""
    given = [*LLAMA_8B, "--deepspeed", str(ROOT / "ds_configs" / f"{split}.json"), "--gpu", "h100"]
    given += ["--gpus", "8", "batch.global_batch_size=128", "ds.train_batch_size=128"]
    limit = limits(*given, option)[name]
    found, _ = planned(*given, *limit.words)
    assert found.peak == limit.forecast.peak
    assert found.fits is True
    assert found.resolved.batch_plan.gradient_accumulation_steps == 1
    assert limit.stop_reason == "memory"
    assert planned(*given, *with_number(limit.words, key, step))[0].fits is False
    if split == "zero3":
        (line,) = (line for line in plan(capsys, *given, option).splitlines() if line.startswith(name))
        assert f"{' '.join(limit.words)}   ({found.model.numel:,} parameters, " in line


@pytest.mark.slow
def test_what_ends_a_search_in_place_of_memory_is_told(capsys, tmp_path):
    tiny = [*LLAMA_8B, "--gpu", "b200", "--gpus", "8", "--nodes", "1000", *ZERO3, "model.hidden_size=64"]
    tiny += ["model.intermediate_size=128", "model.num_heads=2", "model.num_key_value_heads=2"]
    found = limits(*tiny, "data.sequence_length=2", "--largest")
    assert found["largest micro-batch"].stop_reason == "more is not tried"
    cnn = ["--config", CNN, "--gpu", "a100"]
    with pytest.raises(ConfigError, match="the memory of activations is not known for cnn"):
        limits(*cnn, "--largest")
    config = {"model_type": "llama", "max_position_embeddings": 2000, "hidden_size": 512}
    given = ["--config", str(pretrained(tmp_path, config)), "--gpu", "h100", "engine.precision=bf16"]
    limit = limits(*given, "--longest")["longest sequence"]
    assert limit.words[0] == "data.sequence_length=2000"
    assert limit.stop_reason == f"{tmp_path} has no more positions"
    assert planned(*given, *limit.words)[0].peak == limit.forecast.peak
    assert "none: pretrained weights have one size" in plan(capsys, *given, "--largest")


@pytest.mark.daily("llama")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_words_for_the_largest_model_make_it(tmp_path, family):
    recipe = tmp_path / "recipe.yaml"
    sizes = "hidden_size: 64, num_layers: 2, num_heads: 2"
    model = f"{{kind: causal_lm, architecture: {family}, {sizes}}}"
    data = "{kind: text, paths: [python_stdlib], sequence_length: 64}"
    recipe.write_text(f"max_steps: 1\nmodel: {model}\ndata: {data}\n")
    given = ["--config", str(recipe), "--gpu", "h100", "--gpu-memory", "2", "engine.precision=fp32"]
    limit = limits(*given, "--largest")["largest model"]
    changed = load_settings(recipe, None, ["engine.precision=fp32", *limit.words])
    assert measure_recipe(changed.config).numel == limit.forecast.model.numel > 10**7


def pretrained(folder, config):
    """A recipe that starts from this folder's weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    recipe = folder / "recipe.yaml"
    data = "{kind: text, paths: [python_stdlib]}"
    recipe.write_text(f"max_steps: 1\nmodel: {{kind: causal_lm, pretrained: {folder}}}\ndata: {data}\n")
    return recipe


def test_what_is_not_known_is_not_said_to_fit(capsys):
    """The peak without activations is far below the memory there is."""
    found, changes = planned(*ON_8, *GEMMA, "data.sequence_length=8192")
    assert found.peak < found.hardware.memory / 2
    assert (found.fits, changes) == (None, [])
    assert "whether it fits is not known" in plan(capsys, *ON_8, *GEMMA)


def test_a_cpu_has_no_times_and_is_its_own_host(capsys):
    stdlib = str(ROOT / "launch" / "recipes" / "python_stdlib.yaml")
    given = ["--config", stdlib, "--deepspeed", str(ROOT / "ds_configs" / "zero2.json")]
    found, _ = planned(*given)
    assert (found.time, found.hardware.host_memory) == (None, None)
    _, changes = planned(*given, "--host-memory", "0.5")
    assert changes
    assert not [each for each in changes if any("offload" in word for word in each.overrides)]
    told = plan(capsys, "--host-memory", "0.5")
    assert re.search(r"memory of the device +0\.50 GiB  \d+%: does not fit$", told, re.M)


def test_a_model_of_ones_own_is_counted(capsys):
    told = plan(capsys, "--config", CNN, "--gpu", "a100")
    assert "21,386 parameters" in told
    assert "the peak does not include it" in told
    assert "a step" not in told


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["model.fp8=rowwise"], "fp8"),
        (["ds.zero_optimization.offload_optimizer.device=cpu"], "offloading"),
    ],
)
def test_a_time_that_was_never_compared_is_not_told(words, what):
    found, _ = planned(*ON_8, *words)
    assert found.time is None
    assert f"the time of {what} is not known: no published run was compared" in found.remarks()


def test_a_card_that_is_not_in_the_list_has_memory_alone(capsys):
    told = plan(capsys, *LLAMA_8B, *ZERO3, "--gpu-memory", "80", "--gpus", "8")
    assert re.search(r"memory of the device +80\.00 GiB  \d+%: fits$", told, re.M)
    assert "of 1024.0 GiB of a machine's memory (assumed)" in told
    assert "a step" not in told
    assert planned(*LLAMA_8B, *ZERO3, "--gpu-memory", "80", "--gpus", "8", "model.fp8=rowwise")[0].fits


def test_what_frees_a_gpu_is_no_help_where_the_host_lacks_memory():
    found, changes = planned(*ON_8, "--host-memory", "10")
    assert (found.lacking[:11], changes) == ("host memory", [])
    offloaded = ["ds.zero_optimization.offload_optimizer.device=cpu", "--host-memory", "64"]
    (change,) = planned(*ON_8, *offloaded)[1]
    assert (change.fits, change.overrides[0].rpartition("=")[2]) == (True, "none")


def test_auto_is_planned_with_the_largest_micro_batch_that_fits():
    auto = [*ON_8, "batch={micro_batch_size: auto, global_batch_size: 512}", "data.sequence_length=16384"]
    found = planned(*auto)[0].resolved.batch_plan.micro_batch_size
    assert 1 < found < 64
    for rows, fits in ((found, True), (2 * found, False)):
        given = f"batch={{micro_batch_size: {rows}, global_batch_size: 512}}"
        assert planned(*ON_8, given, "data.sequence_length=16384")[0].fits is fits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "big"),
        ("hidden_size", -4096),
        ("num_attention_heads", 0),
        ("vocab_size", None),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
    ],
)
def test_a_config_from_elsewhere_with_a_number_that_can_be_none_is_one_line(capsys, tmp_path, name, value):
    recipe = pretrained(tmp_path, {"model_type": "llama", "max_position_embeddings": 2048, name: value})
    assert main(["plan", "--config", str(recipe), "--gpu", "h100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"config.json: {name} is {value!r}" in line or f"config.json: the config has no {name}" in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--gpu", "h1000"], "no such GPU"),
        (["--gpu-memory", "-3"], "--gpu-memory -3"),
        (["--network", "-1"], "--network -1"),
        (["--network", "fast"], "invalid float value"),
        (["--gpus", "0"], "expected a number from 1 to"),
        (["--document-tokens", "0"], "expected a number from 1 to"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["model.pretrained=./nowhere", "model.architecture=null"], "there is no such folder"),
        (["model.num_layer=3"], "num_layers"),
        ([*GEMMA, "--longest"], "the memory of activations is not known for gemma2"),
        ([*GEMMA, "--suggest"], "the memory of gemma2 on 8 x H100"),
        (["data.sequence_length=4194304", "--suggest"], "no split of llama"),
        (["--longest", "--config", CNN], "--longest: the memory of a row of cnn is known"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(capsys, words, text):
    by_argparse = text in ("expected a number from 1 to", "invalid float value")
    with pytest.raises(SystemExit) if by_argparse else nullcontext() as ended:
        code = main(["plan", *ON_8, *words])
    assert (code if ended is None else ended.value.code) == 2
    told = capsys.readouterr().err
    assert text in told.splitlines()[-1]
    assert "Traceback" not in told


def test_the_recipe_says_as_much_host_memory_as_the_plan():
    offload = ["--deepspeed", str(ROOT / "ds_configs" / "zero3_offload.json"), "--gpu", "h100"]
    found, _ = planned(*LLAMA_8B, *offload)
    stated = re.search(r"with (\d+) GiB of host memory", Path(LLAMA_8B[1]).read_text())
    assert int(stated[1]) == round(found.host_bytes / 2**30)
