"""The lines of DeepSpeed's own log that a rank shows."""

from __future__ import annotations

import logging

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils import set_log_level_from_string

from pipeline.distributed.ranks import Ranks
from pipeline.engine.deepspeed_base import is_record_shown, quiet_deepspeed
from pipeline.monitoring.logs import log_to_console


@pytest.fixture
def shown():
    """Have DeepSpeed's logger write to a list, and leave it as it was."""
    logger = deepspeed.utils.logger
    level = logger.level
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.removeFilter(is_record_shown)
    set_log_level_from_string(logging.getLevelName(level))
    pipeline = logging.getLogger("pipeline")
    pipeline.handlers.clear()
    pipeline.propagate = True
    pipeline.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("console", "json_level", "expected"),
    [
        ("info", None, ["a warning", "an error"]),
        ("warning", None, ["a warning", "an error"]),
        ("debug", None, ["OVERFLOW", "untested", "news", "a warning", "an error"]),
        ("info", "info", ["OVERFLOW", "untested", "news", "a warning", "an error"]),
    ],
)
def test_news_and_overflows_are_shown_where_they_are_asked_for(console, json_level, expected, shown):
    log_to_console(Ranks(0, 0, 1, 1), console)
    quiet_deepspeed()
    if json_level is not None:
        set_log_level_from_string(json_level)  # as deepspeed.initialize does with the JSON's log_level
    LossScaler(scale=torch.tensor(8.0)).update_scale(True)
    deepspeed.utils.logger.warning("**** You are using ZeRO with an untested optimizer ****")
    deepspeed.utils.logger.info("news")
    deepspeed.utils.logger.warning("a warning")
    deepspeed.utils.logger.error("an error")
    short = {"OVERFLOW!": "OVERFLOW", "untested": "untested"}
    found = [next((short[words] for words in short if words in line), line) for line in shown]
    assert found == expected
