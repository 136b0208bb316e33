"""Objectives on answers: what a batch must hold, and what does not depend on what is not an answer."""

from __future__ import annotations

import math

import pytest
import torch
from support.preferences import ALONE, PreferenceRows, make_recipe, preference_bundle
from support.tiny import resolve

from pipeline.data.batches import as_batch, collate_items
from pipeline.data.preference_layouts import MISMATCHED
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.held_out import evaluate
from pipeline.objectives import LogprobRecorder, build_objective
from pipeline.objectives.preferences import UNDIVIDED_SEQUENCE, SegmentLogprobs, log1mexp
from pipeline.training.assemble import build_engine, build_eval_loader

pytestmark = pytest.mark.slow


def objective_of(loss: str):
    return build_objective(resolve(make_recipe(loss), None, 1)[0])


def batch_of(examples: bool = False):
    rows = PreferenceRows(examples)
    return as_batch(collate_items([rows[0], rows[1]]))


def test_a_batch_without_answers_names_the_data_that_has_them():
    batch = as_batch({key: batch_of()[key] for key in ("input_ids", "shift_labels")})
    with pytest.raises(
        DataError, match=r"objective dpo needs 'segments', but the batch has .*data\.kind: pref"
    ):
        objective_of("dpo").count(batch)


@pytest.mark.parametrize("kinds", [[2, 1], [1, 0], [1, 3]])
def test_segments_that_are_no_pairs_are_shown(kinds):
    batch = batch_of()
    batch["segment_kinds"][1] = torch.tensor(kinds)
    with pytest.raises(
        DataError,
        match=rf"'segment_kinds' of a row are \[{kinds[0]}, {kinds[1]}\]: expected 1 \(chosen\) and 2",
    ):
        objective_of("simpo").count(batch)


def test_an_odd_number_of_places_is_an_error():
    batch = batch_of()
    batch["segment_kinds"] = torch.tensor([[1, 2, 0], [1, 2, 0]])
    with pytest.raises(DataError, match=r"'segment_kinds' has 3 places in each row; give an even number"):
        objective_of("simpo").count(batch)


def test_a_segment_without_a_kind_is_an_error():
    batch = batch_of()
    batch["segments"][0, 3] = 2
    with pytest.raises(DataError, match="'segments' has 2, but 'segment_kinds' is for 2 segments a row"):
        objective_of("dpo").count(batch)


def test_kto_wants_mismatched_answers():
    with pytest.raises(DataError, match=r"needs mismatched answers .* a micro-batch has none"):
        objective_of("kto").count(batch_of())
    assert objective_of("kto").count(batch_of(examples=True)) == 2


@pytest.mark.parametrize("is_training", [True, False])
def test_an_infinite_mismatched_answer_reaches_ktos_loss(monkeypatch, is_training):
    """KTO's baseline is 0 at least, so the baseline alone would hide a log-ratio of minus infinity."""
    objective = objective_of("kto")
    batch = batch_of(examples=True)
    kinds_BS = batch["segment_kinds"]
    logps_BS = torch.where(kinds_BS == MISMATCHED, -math.inf, -1.0).double().requires_grad_()
    segments = SegmentLogprobs(logps_BS, torch.ones_like(logps_BS), kinds_BS, UNDIVIDED_SEQUENCE)
    monkeypatch.setattr(objective, "compute_segment_logprobs", lambda *_: segments)
    with torch.set_grad_enabled(is_training):
        assert objective(lambda **_: None, batch).loss_sum.isnan()


def test_a_reference_that_is_not_there_is_named():
    batch = batch_of()
    del batch["reference_logps"]
    with pytest.raises(DataError, match=r"objective dpo needs 'reference_logps' \(samples, segments\)"):
        objective_of("dpo").read_reference_logps(batch)


def test_places_without_a_pair_add_nothing_and_have_no_gradient():

    config, resolved = resolve(make_recipe("orpo"), None, 1)
    engine = build_engine(config, resolved, ALONE, preference_bundle())
    batch = batch_of()
    objective = build_objective(config)
    with torch.no_grad():
        plain = objective(engine.module, batch)
    wide = as_batch(dict(batch))
    for name in ("segment_kinds", "reference_logps"):
        wide[name] = torch.nn.functional.pad(batch[name], (0, 2))
    with torch.no_grad():
        padded = objective(engine.module, wide)
    assert padded.loss_sum == plain.loss_sum
    assert padded.count == plain.count == 2
    objective._pairs_per_token = torch.ones(())
    objective(engine.module, wide).loss_sum.backward()
    assert all(p.grad.isfinite().all() for p in engine.module.parameters())


def test_an_evaluation_with_kto_takes_the_baseline_of_all_held_out_answers():
    config, resolved = resolve(make_recipe("kto", 2), None, 1)
    data = preference_bundle(examples=True)
    engine = build_engine(config, resolved, ALONE, data)
    objective = build_objective(config)
    row = evaluate(engine, objective, build_eval_loader(config, resolved.batch_plan, data, engine), ALONE)
    held_out = data.eval["held out"]
    batch = as_batch(collate_items([*map(held_out.__getitem__, range(12))]))
    recorded = LogprobRecorder(objective)
    engine.eval_step(batch, recorded)
    beyond = (recorded.logps_BS - batch["reference_logps"])[batch["segment_kinds"] == 3]
    assert row["eval/kl"] == pytest.approx(float(beyond.mean()), rel=1e-6)
    assert row["eval/kl"] > 1


def test_routers_that_are_to_be_balanced_are_refused():
    """A recipe that asks for the loss is refused before the start, a model that does once it computes."""
    tree = make_recipe("simpo")
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    tree["model"] = tree["model"] | {"architecture": "mixtral", "extra": extra}
    config, resolved = resolve(tree, None, 1)
    engine = build_engine(config, resolved, ALONE, preference_bundle())
    engine.module.config.output_router_logits = True  # as a pretrained model's own config.json may say
    message = r"output_router_logits: .* not part of objective simpo; set it to f"
    with pytest.raises(ConfigError, match=message):
        engine.eval_step(batch_of(), build_objective(config))
    extra["output_router_logits"] = True
    with pytest.raises(ConfigError, match=message):
        resolve(tree, None, 1)


def test_log1mexp_is_exact_where_a_plain_one_is_not():
    x = torch.tensor([-1e-12, -1e-3, -0.7, -30.0], dtype=torch.float64, requires_grad=True)
    expected = [math.log(-math.expm1(each)) for each in x.tolist()]
    assert log1mexp(x).tolist() == pytest.approx(expected, rel=1e-12)
    log1mexp(x).sum().backward()
    assert x.grad.isfinite().all()


def test_smoothing_of_a_loss_that_knows_none_is_refused():
    tree = make_recipe("dpo hinge")
    tree["objective"] = tree["objective"] | {"label_smoothing": 0.1}
    with pytest.raises(ConfigError, match=r"label_smoothing is 0\.1, and the loss hinge has none"):
        resolve(tree, None, 1)
