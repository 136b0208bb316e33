"""The planner's model of what has to be built to be known: any nn.Module, made without values."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pipeline.config.schema import RunConfig
from pipeline.errors import ModelError, PipelineError, one_line
from pipeline.importing import import_object
from pipeline.models import build_model
from pipeline.models.sharding import ModelRequest, Whole
from pipeline.models.sizes import model_of
from pipeline.models.traced import trial_of
from pipeline.planning.model import Model
from pipeline.planning.shapes import needed_words, trained_parts

log = logging.getLogger(__name__)

CLASSES = {"digits": 10}  # of data that say so themselves; of others as many as ImageNet's


class Unfilled(Whole):
    """A model without values."""

    def construct(self) -> Any:
        return torch.device("meta")


def count(config: RunConfig) -> Model:
    """Names and shapes of the parameters of what a recipe trains.

    Raises:
        ModelError: it cannot be made, or not without values.
    """
    asked = config.model
    try:
        module = _make(config)
    except PipelineError:
        raise
    except Exception as error:  # of a stranger's code, or of a library that it needs values for
        log.debug("%s is not made without values", asked.kind, exc_info=True)
        raise ModelError(
            f"model: it cannot be counted without values ({type(error).__name__}: {one_line(error)}); a run "
            "says what it takes before its first step"
        ) from None
    language = asked.language_model
    name = asked.kind if language is None else language.pretrained or language.architecture or asked.kind
    model = model_of(module)
    model = replace(model, name=name, trial=None if model.dimensions else trial_of(config, module))
    return trained_parts(model, asked.freeze, config.adapter)


def _make(config: RunConfig) -> nn.Module:
    asked, words = config.model, needed_words(config)
    if asked.custom is not None:
        with torch.device("meta"):
            module = import_object(asked.kind, ModelError)(**asked.custom.args)
        if not isinstance(module, nn.Module):
            raise ModelError(f"model.kind: {asked.kind} returned a {type(module).__name__}, not an nn.Module")
        return module
    language = asked.language_model
    if language is not None and language.pretrained is not None:
        from pipeline.models.huggingface import read_config
        from pipeline.models.reward_model import model_class, reward_model_class

        _, theirs = read_config(language)
        if language.grow_vocabulary:
            text = theirs.get_text_config()
            text.vocab_size = max(words or 0, text.vocab_size)
        is_reward = config.objective.kind == "reward"
        made: nn.Module
        with torch.device("meta"):
            made = (reward_model_class if is_reward else model_class)(theirs).from_config(theirs)
        return made
    cnn = asked.cnn
    images = config.data.images
    request = ModelRequest(
        Unfilled(),
        vocab_size=words,
        sequence_length=config.data.tokens_per_row,
        longest=1 if config.data.kind == "preference" else None,  # known once the answers are prepared
        num_classes=(cnn.num_classes if cnn is not None else None) or CLASSES.get(config.data.kind, 1000),
        num_channels=images.channels if images is not None else None,
        gives_scores=config.objective.kind == "reward",
        draws=False,
    )
    return build_model(asked, request, config.seed)
