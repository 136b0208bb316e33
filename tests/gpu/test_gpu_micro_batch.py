"""`micro_batch_size: auto` by what torch's allocator gives out."""

from __future__ import annotations

import pytest
import torch
from training.test_micro_batch import ANSWER, SAMPLES, train

from pipeline.distributed.process_group import Job
from pipeline.distributed.ranks import Ranks
from pipeline.training.micro_batch import MAX_TRIALS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_same_is_found_whatever_the_guess(tmp_path):
    job = Job(Ranks(0, 0, 1, 1), torch.device("cuda", 0))
    limit = train(job, None, "auto", tmp_path, calibrates=True)
    given = train(job, None, ANSWER, tmp_path)
    for guess in (2 * ANSWER, ANSWER // 2):
        plan, curve, _, tried = train(job, None, "auto", tmp_path / str(guess), guess, limit)
        assert plan == given[0]
        assert tried[0] <= MAX_TRIALS
        for found, expected in zip(curve, given[1], strict=True):
            assert found[:2] == pytest.approx(expected[:2], rel=1e-5)  # sums in any order


def test_where_a_card_has_room_for_all_of_it_all_of_it_is_taken(tmp_path):
    job = Job(Ranks(0, 0, 1, 1), torch.device("cuda", 0))
    assert train(job, None, "auto", tmp_path)[0].micro_batch_size == SAMPLES
