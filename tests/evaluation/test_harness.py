"""Tasks of lm-evaluation-harness: every answer is the one that its own model of transformers gives."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support.base_model import write_base_model
from support.launch import ROOT, launch, write_recipe
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from pipeline.distributed.process_group import start_job
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.evaluation.harness import SHIPPED_TASKS, HarnessModel, list_shipped_tasks, load_tasks, run_tasks
from pipeline.evaluation.sources import open_source
from pipeline.evaluation.task_results import read_task_results
from pipeline.training.api import export

pytestmark = pytest.mark.slow

SHIPPED = ["stdlib_perplexity", "stdlib_cloze", "stdlib_choice", "addition_choice", "addition"]
LIMIT = 6

QUIZ = """
task: quiz
dataset_path: json
dataset_kwargs: {data_files: {test: DATA, train: DATA}}
output_type: multiple_choice
training_split: train
test_split: test
fewshot_split: train
num_fewshot: 2
description: "Answer. "
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: answer
doc_to_choice: "{{[first, second]}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: f1, aggregation: f1, higher_is_better: true}
"""
WRITER = """
task: writer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA, train: DATA}}
output_type: generate_until
training_split: train
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{first}}"
gen_prefix: "It is"
repeats: 2
generation_kwargs: {until: ["e", ". "], max_gen_toks: 30, do_sample: false}
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - name: word
    filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("harness")


@pytest.fixture(scope="module")
def custom(folder) -> Path:
    """Two tasks of a user in YAML. One question is longer than the models' positions."""
    rows = [
        {
            "question": f"What is {n}? " * (40 if n == 3 else 1),
            "first": f"blue {n}",
            "second": "red",
            "answer": n % 2,
        }
        for n in range(LIMIT)
    ]
    tasks = folder / "tasks"
    tasks.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("quiz", QUIZ), ("writer", WRITER)):
        (tasks / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "rows.jsonl")))
    return tasks


@pytest.fixture(scope="module")
def sharded_run(folder) -> Path:
    """A run of which each rank has held a part of each weight, in fp32."""
    data = {
        "kind": "text",
        "paths": [str(folder / "texts")],
        "sequence_length": 128,
        "tokenizer": {"vocab_size": 500},
        "cache_dir": str(folder / "cache"),
    }
    recipe = write_recipe(folder, max_steps=4, data=data, eval={"every": 100})
    split = ["--deepspeed", str(ROOT / "ds_configs" / "zero3.json"), "ds.bf16.enabled=false"]
    run = folder / "run"
    assert launch("--config", str(recipe), f"run_dir={run}", *split, ranks=2).returncode == 0
    return run


@pytest.fixture(scope="module")
def begun(folder) -> Path:
    """A model whose tokenizer begins each text with a BOS token, and has another end token."""
    model = write_base_model(folder / "begun")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|im_start|>"
    pair = [("<|im_start|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=pair
    )
    tokenizer.save_pretrained(model)
    assert AutoTokenizer.from_pretrained(model)("a")["input_ids"][0] == tokenizer.bos_token_id
    return model


@pytest.fixture(scope="module")
def chatting(folder) -> Path:
    return write_base_model(folder / "chatting")


def make_model(source: Path, **options: Any) -> HarnessModel:
    job = start_job(Ranks(0, 0, 1, 1), distributed=False)
    opened = open_source(source).load(job)
    return HarnessModel(opened.engine, opened.call, job, opened.tokenizer, **options)


def list_answers(instances) -> list[Any]:
    return [response for instance in instances for response in instance.resps]


def assert_answers_are_lm_evals(
    source: Path, exported: Path, names: list[str], num_fewshot: int | None = None, **prompts: Any
):
    """Compare requests, answers and metrics with those of lm-eval's own model of transformers."""
    loaded = load_tasks(names, LIMIT, num_fewshot)
    found = run_tasks(loaded, make_model(source, tokens_per_batch=700, rows_per_batch=5), **prompts)
    folders = [str(SHIPPED_TASKS), *(name for name in names if "/" in name)]
    expected = lm_eval.simple_evaluate(
        HFLM(pretrained=str(exported), device="cpu", dtype="float32"),
        tasks=list(loaded.tasks),
        task_manager=TaskManager(include_path=folders, include_defaults=False),
        limit=LIMIT,
        num_fewshot=num_fewshot,
        bootstrap_iters=0,
        fewshot_as_multiturn=True,
        **prompts,
    )
    for name, task in loaded.tasks.items():
        rows = expected["samples"][name]
        rows = [row for row in rows if row["filter"] == rows[0]["filter"]]
        assert [i.args for i in task.instances] == [tuple(args) for row in rows for args in row["arguments"]]
        for own, other in zip(task.instances, [r for row in rows for r in row["resps"]], strict=True):
            for one, another in zip(own.resps, other, strict=True):
                if isinstance(one, str):
                    assert one == another
                    continue
                # lm-eval adds up a text's log-probabilities in fp32.
                assert np.ravel(one)[0] == pytest.approx(np.ravel(another)[0], rel=1e-6, abs=1e-5)
                assert isinstance(one, float) or one[1] == another[1]
        values = expected["results"][name]
        metrics = found.tasks[name].metrics
        assert len(metrics) == sum(isinstance(v, float) and "_stderr" not in k for k, v in values.items())
        for key, metric in metrics.items():
            value = values.get(key, values.get(f"{key},none"))
            assert metric.value == pytest.approx(value, rel=1e-5)
    return found


def test_a_sharded_run_answers_as_its_exported_folder(sharded_run, custom, folder):
    export(sharded_run, folder / "exported")
    found = assert_answers_are_lm_evals(sharded_run, folder / "exported", [*SHIPPED, str(custom)])
    assert set(found.tasks) == {*SHIPPED, "quiz", "writer"}
    assert set(found.tasks["writer"].metrics) == {"exact_match,whole", "exact_match,word"}
    assert found.tasks["quiz"].num_fewshot == 2
    assert found.as_row()["eval/tasks/quiz/acc"] == found.tasks["quiz"].metrics["acc"].value
    # A metric that is no mean over documents has no scores of documents.
    assert set(next(iter(found.tasks["quiz"].documents.values()))) == {"acc", "acc_norm"}
    sample = found.tasks["addition"].samples[0]
    assert sample.prompt.endswith("84 + 75 =")
    assert sample.target == "159"


@pytest.mark.parametrize(
    ("num_fewshot", "prompts"),
    [(0, {}), (3, {}), (2, {"apply_chat_template": True})],  # a prompt of the template begins with BOS
    ids=["0", "3", "template"],
)
@pytest.mark.daily("template")
def test_a_tokenizer_with_a_bos_token(begun, custom, num_fewshot, prompts):
    assert_answers_are_lm_evals(begun, begun, [*SHIPPED, str(custom)], num_fewshot, **prompts)


@pytest.mark.parametrize("prompts", [{}, {"apply_chat_template": True}], ids=["none", "template"])
@pytest.mark.daily("template")
def test_a_chat_template(chatting, custom, prompts):
    assert_answers_are_lm_evals(chatting, chatting, ["stdlib_choice", "addition", str(custom)], 2, **prompts)


def test_a_second_run_is_equal_and_random_numbers_stay_as_they_were(chatting, custom, tmp_path):
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), np.random.random(), torch.rand(1)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    model = make_model(chatting)
    loaded = load_tasks(["addition", str(custom / "quiz.yaml")], LIMIT)
    first = run_tasks(loaded, model, settings={"model": "chatting"})
    assert run_tasks(loaded, model, settings={"model": "chatting"}) == first
    assert (random.random(), np.random.random(), torch.rand(1)) == expected
    first.write(tmp_path / "results.json")
    assert read_task_results(tmp_path / "results.json") == first


@pytest.mark.nightly  # a group may name tasks of lm-eval, whose index takes ten seconds
def test_a_group_has_the_mean_over_its_tasks(chatting, tmp_path):
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [addition_choice, stdlib_choice]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    found = run_tasks(load_tasks([str(tmp_path / "both.yaml")], LIMIT), make_model(chatting)).tasks
    values = [found[name].metrics["acc"].value for name in ("addition_choice", "stdlib_choice")]
    assert found["both"].metrics["acc"].value == pytest.approx(sum(values) / 2)
    assert found["both"].num_documents == 2 * LIMIT


def test_drawn_answers_differ_among_repeats_and_not_among_runs(chatting, custom, tmp_path):
    text = (custom / "writer.yaml").read_text()
    drawn = text.replace("do_sample: false", "do_sample: true, temperature: 2.0").replace('["e", ". "]', "[]")
    (tmp_path / "drawn.yaml").write_text(drawn)
    model = make_model(chatting)
    answers = []
    for _ in range(2):
        loaded = load_tasks([str(tmp_path / "drawn.yaml")], 3)
        run_tasks(loaded, model)
        answers.append([instance.resps for instance in loaded.tasks["writer"].instances])
    assert answers[0] == answers[1]
    assert all(first != second for first, second in answers[0])


def test_shipped_tasks_have_the_documents_of_every_python():
    """Other documents make earlier results incomparable: raise the version in the task's YAML then."""
    loaded = load_tasks(SHIPPED)
    assert {name: len(task.eval_docs) for name, task in loaded.tasks.items()} == {
        "stdlib_perplexity": 168,
        "stdlib_cloze": 185,
        "stdlib_choice": 266,
        "addition_choice": 200,
        "addition": 200,
    }
    choices = [doc["choices"][doc["answer"]] for doc in loaded.tasks["stdlib_choice"].eval_docs]
    assert choices[0] == "Open a bzip2-compressed file in binary or text mode."
    assert all(int(d["choices"][d["answer"]]) == int(d["sum"]) for d in loaded.tasks["addition"].eval_docs)
    assert [name for name, _ in list_shipped_tasks()] == sorted(SHIPPED)


def edited(custom: Path, tmp_path: Path, old: str, new: str, name: str = "quiz") -> str:
    text = (custom / f"{name}.yaml").read_text()
    assert old in text
    (tmp_path / "edited.yaml").write_text(text.replace(old, new))
    return str(tmp_path / "edited.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric: acc,", "metric: acg,", "metric_list has 'acg', expected a metric such as acc"),
        ("dataset_path: json", "dataset_path: 3", "task quiz: loading it or its data raised"),
        ("rows.jsonl", "none.jsonl", "task quiz: loading it or its data raised FileNotFoundError"),
        ("test_split: test", "test_split: tast", "raised KeyError: 'tast'"),
        ("doc_to_target: answer", "doc_to_target: '{{anser}}'", "UndefinedError: 'anser' is undefined"),
        ("{{question}}", "{{question.__class__.__mro__}}", "access to attribute '__class__'.* is unsafe"),
        ("task: quiz", "task: [", "edited.yaml: while parsing .*expected a YAML file of a task"),
        ("task: quiz", "tusk: quiz", "task"),
        ("output_type: multiple_choice", "output_type: choice", "invalid output_type 'choice'"),
        ("doc_to_choice", "unsafe_code: true\ndoc_to_choice", "runs code that the model has written"),
        ("doc_to_choice", "doc_to_image: first\ndoc_to_choice", "it has images or sound"),
    ],
)
def test_a_wrong_task_is_told_in_one_line(custom, tmp_path, old, new, message):
    with pytest.raises(PipelineError, match=message) as raised:
        load_tasks([edited(custom, tmp_path, old, new)])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adition", "there is no task 'adition'; did you mean addition or "),
        ("./adition.yaml", "adition.yaml: No such file or directory"),
        ("/dev/zero.yaml", "No such file"),
        ("stdlib/", "stdlib: No such file or directory"),
        (
            "arc_easy",
            "task arc_easy: loading it or its data raised ConnectionError: Couldn't reach 'allenai/ai2_arc'",
        ),
        ("humaneval", "task humaneval: it has images or sound, or runs code that the model has written"),
    ],
    ids=["adition", "adition.yaml", "zero", "stdlib", "arc_easy", "humaneval"],
)
@pytest.mark.daily("adition.yaml", "zero", "stdlib")  # the others read an index of ten seconds
def test_an_unknown_name_and_data_without_a_network_are_told_in_one_line(name, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(PipelineError, match=message) as raised:
        load_tasks([name])
    assert "\n" not in str(raised.value)


def test_two_tasks_of_one_name_are_refused_and_one_named_twice_is_one(custom, tmp_path):
    other = edited(custom, tmp_path, "Q: ", "Question: ")
    with pytest.raises(ConfigError, match=r"two tasks have the name quiz; rename that of .*edited"):
        load_tasks([f"{custom}/", other])
    assert list(load_tasks([f"{custom}/quiz.yaml", f"{custom}/"]).tasks) == ["quiz", "writer"]


def test_code_of_a_task_runs_only_where_it_may(custom, tmp_path):
    (tmp_path / "own.py").write_text(
        "import pathlib\n"
        "(pathlib.Path(__file__).parent / 'ran').touch()\n"
        "def ask(doc):\n    return doc['question']\n"
    )
    base = edited(custom, tmp_path, '"Q: {{question}}\\nA:"', "!function own.ask")
    (tmp_path / "includes.yaml").write_text(f"include: {base}\ntask: included\n")
    for file in (base, str(tmp_path / "includes.yaml"), f"{tmp_path}/"):
        with pytest.raises(ConfigError, match=r"!function own.ask\), refused: --no-import-paths"):
            load_tasks([file], import_paths=False)
    assert not (tmp_path / "ran").exists()
    downloaded = edited(custom, tmp_path, "metric: acc,", "metric: acc, hf_evaluate: true,")
    with pytest.raises(ConfigError, match=r"hf_evaluate\), refused: --no-import-paths"):
        load_tasks([downloaded], import_paths=False)
    assert set(load_tasks([str(custom)], import_paths=False).tasks) == {"quiz", "writer"}
    edited(custom, tmp_path, '"Q: {{question}}\\nA:"', "!function own.ask")
    assert set(load_tasks([f"{tmp_path}/"]).tasks) == {"quiz", "included"}
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            "writer",
            "max_gen_toks: 30",
            "max_gen_toks: 128",
            "a task among writer raised .* requested max tokens to generate \\(128\\) must be less than",
        ),
        (
            "writer",
            "do_sample: false",
            "num_beams: 4",
            "generation_kwargs has num_beams=4, expected only until",
        ),
        ("writer", "do_sample: false", "do_sample: true", "do_sample without a temperature above 0"),
        (
            "quiz",
            "[first, second]}}",
            "[first, '' if answer else second]}}\"\ntarget_delimiter: \"",
            "answer has 0 tokens, and the model reads 1 to 128",
        ),
        (
            "quiz",
            "[first, second]",
            "[first * 50, second]",
            "answer has .* tokens, and the model reads 1 to 128",
        ),
        ("quiz", "Q: {{question}}", "Q: {{question + (1 / (answer - 1)) | string}}", "ZeroDivisionError"),
    ],
)
def test_a_wrong_document_is_told_in_one_line(chatting, custom, tmp_path, name, old, new, message):
    loaded = load_tasks([edited(custom, tmp_path, old, new, name)])
    with pytest.raises(DataError, match=message) as raised:
        run_tasks(loaded, make_model(chatting))
    assert "\n" not in str(raised.value)


def test_a_perplexity_that_is_too_large_is_infinite():
    """math.exp would raise an OverflowError, which would end a training."""
    assert lm_eval.api.metrics.perplexity([-1e6]) == math.inf
    assert lm_eval.api.metrics.weighted_perplexity([(-1e6, 1)]) == math.inf
    assert lm_eval.api.metrics.perplexity([-1.0]) == math.exp(1)


def test_a_mistake_of_the_engine_keeps_its_traceback(chatting, monkeypatch):
    loaded = load_tasks(["addition_choice"], 2)
    model = make_model(chatting)
    monkeypatch.setattr(model._engine.module, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_tasks(loaded, model)


def test_a_model_without_a_template_or_an_end_token(folder, custom):
    plain = write_base_model(folder / "plain", chat_template=None)
    with pytest.raises(
        DataError, match="the tokenizer has no chat template; leave out --apply-chat-template"
    ):
        run_tasks(load_tasks(["addition"], 1), make_model(plain), apply_chat_template=True)
    model = make_model(plain)
    model.tokenizer.eos_token = None
    with pytest.raises(PipelineError, match="the tokenizer has no end token"):
        HarnessModel(model._engine, model._call, model.job, model.tokenizer)
