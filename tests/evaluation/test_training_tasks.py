"""Tasks while training: under every split what lm-eval's own HFLM gives on the exported model."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from engine.test_generate import state_of, whole_model
from evaluation.test_bits_per_byte import TEXTS
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from parity.measure import has_async_io
from parity.splits import BUFFERED, CPU, GPT2, LLAMA, NVME, SEQUENCE_2, TENSOR_2, TWO_STAGES, WIDE, zero
from support.resume_across_splits import Run, copy_shards, make_recipe
from support.tiny import VOCABULARY

from pipeline.data.tokenizer import train_tokenizer
from pipeline.distributed.process_group import Job
from pipeline.distributed.stopping import StopOnSignal
from pipeline.errors import DataError
from pipeline.evaluation.harness import SHIPPED_TASKS, load_tasks
from pipeline.evaluation.task_results import read_task_results
from pipeline.evaluation.training_tasks import TrainingTasks

pytestmark = pytest.mark.slow

LONG = {"max_sequence_length": 200}
LONG_LLAMA = LLAMA | LONG | {"extra": {"attention_dropout": 0.2}}
LONG_GPT2 = {key: value for key, value in GPT2.items() if key != "extra"} | LONG
LONG_WIDE = WIDE | LONG
SHARDED = zero(
    3, stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0
)
SPLITS: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "single": ({"torch": {"parallel": "single"}}, 1, LONG_LLAMA),
    "ddp": ({"torch": {"parallel": "ddp"}}, 2, LONG_LLAMA),
    "ddp-4": ({"torch": {"parallel": "ddp"}}, 4, LONG_GPT2),
    "zero0": (zero(0), 2, LONG_GPT2),
    "zero1": (zero(1), 2, LONG_LLAMA),
    "zero2-cpu": (zero(2, offload_optimizer=CPU), 2, LONG_LLAMA),
    "zero3": (SHARDED, 2, LONG_LLAMA),
    "zero3-4": (SHARDED, 4, LONG_LLAMA),
    "zero3-persistent": (zero(3), 2, LONG_GPT2),
    "zero3-cpu": (zero(3, offload_optimizer=CPU, offload_param=CPU), 2, LONG_LLAMA),
    "zero3-nvme": (zero(3, offload_optimizer=NVME, offload_param=BUFFERED), 2, LONG_WIDE),
    "zero3-hpz": (zero(3, zero_hpz_partition_size=2), 4, LONG_LLAMA),
    "tensor": (zero(1) | TENSOR_2, 2, LONG_LLAMA),
    "tensor-zero3": (zero(3) | TENSOR_2, 4, LONG_LLAMA),
    "sequence": (zero(2) | SEQUENCE_2, 2, LLAMA | LONG),
    "sequence-zero3": (zero(3) | SEQUENCE_2, 4, LLAMA | LONG),
    "stages": (zero(1) | TWO_STAGES, 2, LONG_LLAMA),
    "stages-data": (zero(0) | TWO_STAGES, 4, LONG_LLAMA),
    "stages-tied": (zero(1) | TWO_STAGES, 2, LONG_GPT2),
}
# One of each kind of request; of three documents, so that ranks have unequal numbers of them.
TASKS = ["addition", "addition_choice", "stdlib_cloze", "stdlib_perplexity"]
LIMIT = 3
STEPS = 3


def make_tokenizer():
    """A tokenizer of bytes, with the vocabulary of the tiny models."""
    return train_tokenizer(TEXTS, VOCABULARY)


def read_responses(requests) -> list[list[Any]]:
    """Return the responses to each request, in the order of documents."""
    return [response for responses in requests for response in responses]


def make_tasks(loaded, run: Run, folder: Path) -> TrainingTasks:
    return TrainingTasks(
        loaded,
        run.config,
        run.resolved.batch_plan,
        job=run.job,
        engine=run.engine,
        tokenizer=make_tokenizer(),
        directory=folder,
        show=lambda table: None,
    )


def evaluating(job: Job, tree: dict[str, Any], split: dict[str, Any], folder: Path):
    """Train without tasks and with them.

    Returns:
        The curve without tasks, the curve with them, whether the tasks left the state unchanged, the shards
        at the evaluation, the responses and the row.
    """
    silent = Run(job, tree, split).train(0, STEPS)
    run = Run(job, tree, split)
    loaded = load_tasks(TASKS, LIMIT)
    tasks = make_tasks(loaded, run, folder)
    curve = run.train(0, 1)
    tasks.evaluate(1, StopOnSignal())  # the second one must not depend on the first
    run.engine.module.train()
    before = state_of(run.engine)
    row = tasks.evaluate(1, StopOnSignal())
    tasks.report(1)
    run.engine.module.train()
    unchanged = all(
        bool((one == other).all()) if hasattr(one, "shape") else one == other
        for one, other in zip(before, state_of(run.engine), strict=True)
    )
    shards = copy_shards(run.engine)
    curve += run.train(1, STEPS)
    responses = {
        name: read_responses(request.resps for request in task.instances)
        for name, task in loaded.tasks.items()
    }
    return silent, curve, unchanged, shards, responses, row


def evaluate_by_lm_eval(model, folder: Path):
    """Responses and metrics of lm-eval's HFLM on the exported model."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    harness = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)
    manager = TaskManager(include_path=str(SHIPPED_TASKS), include_defaults=False)
    results = lm_eval.simple_evaluate(
        harness, tasks=TASKS, limit=LIMIT, task_manager=manager, bootstrap_iters=0, verbosity="ERROR"
    )
    responses = {
        name: read_responses(request for row in rows for request in row["resps"])
        for name, rows in results["samples"].items()
    }
    return responses, results["results"]


def divide(responses):
    """Log-likelihoods, and everything else, in order."""
    numbers: list[float] = []
    others: list[Any] = []
    for response in responses:
        if isinstance(response, tuple):
            numbers.append(response[0])
            others.append(response[1])
        else:
            (numbers if isinstance(response, float) else others).append(response)
    return numbers, others


@pytest.mark.daily("ddp", "zero3", "tensor", "sequence", "stages")
@pytest.mark.parametrize("name", SPLITS)
def test_every_split_answers_as_lm_eval_on_the_exported_model_and_trains_on(ranks, tmp_path, name):
    if "nvme" in name and not has_async_io():
        pytest.skip("no libaio to link with (apt-get install libaio-dev)")
    split, world_size, model = SPLITS[name]
    results = ranks(world_size).run(evaluating, make_recipe(model), split, tmp_path, timeout=900)
    exported = whole_model(model, [(shards, None) for *_, shards, _, _ in results])
    expected, metrics = evaluate_by_lm_eval(exported, tmp_path / "exported")
    for silent, curve, unchanged, _, responses, row in results:
        assert curve == silent
        assert unchanged, "training's random numbers, gradients or mode are others"
        assert list(responses) == list(expected) == TASKS
        for task in TASKS:
            numbers, others = divide(responses[task])
            expected_numbers, expected_others = divide(expected[task])
            # HFLM adds up in fp32, so a sum of -1000 has an error of 1e-4.
            assert numbers == pytest.approx(expected_numbers, abs=1e-5, rel=2e-7)
            assert others == expected_others
        assert row == results[0][-1]
        found = {tuple(key.split("/")[2:]): value for key, value in row.items()}
        for (task, metric), value in found.items():
            # A perplexity multiplies the absolute error of its log-likelihood.
            tolerance = 2e-5 if "perplexity" in metric else 1e-6
            assert value == pytest.approx(metrics[task][f"{metric},none"], rel=tolerance)
        assert len(found) == 7
    written = read_task_results(tmp_path / "tasks" / "step-00000001.json")
    assert written.as_row() == results[0][-1]
    assert written.settings["step"] == 1


def stopping(job: Job, folder: Path):
    """Evaluate on each kind of request, after a signal to the last rank only, and on one document."""
    run = Run(job, make_recipe(LLAMA | LONG), {"torch": {"parallel": "ddp"}})
    stop = StopOnSignal()
    stop.signal_number = signal.SIGTERM if job.ranks.rank == job.ranks.world_size - 1 else None
    rows = []
    for name in TASKS:
        tasks = make_tasks(load_tasks([name], LIMIT), run, folder)
        rows.append(tasks.evaluate(1, stop))
        tasks.report(1)
    few = make_tasks(load_tasks(TASKS, 1), run, folder)
    return rows, few.evaluate(1, StopOnSignal())


def differing(job: Job, folder: Path):
    """Evaluate on one document more on the second rank, as with a task that is not deterministic."""
    run = Run(job, make_recipe(LLAMA | LONG), {"torch": {"parallel": "ddp"}})
    messages = []
    for name in TASKS:
        tasks = make_tasks(load_tasks([name], 2 + job.ranks.rank), run, folder)
        with pytest.raises(DataError) as raised:
            tasks.evaluate(1, StopOnSignal())
        messages.append(str(raised.value))
    return messages


def test_documents_that_differ_between_ranks_are_refused_on_all(ranks, tmp_path):
    for messages in ranks(2).run(differing, tmp_path):
        assert all("the documents or prompts differ between ranks" in message for message in messages)


def test_a_signal_on_one_rank_ends_the_tasks_on_all(ranks, tmp_path):
    """The second rank has no prompt to continue if there is one document."""
    for rows, row in ranks(2).run(stopping, tmp_path):
        assert rows == [None] * len(TASKS)
        assert row["eval/tasks/addition/exact_match"] == 0
    assert not (tmp_path / "tasks").exists()
