"""Command `python -m pipeline inspect`: shows a recipe's data as the model would get it, or a trained model.

python -m pipeline inspect --config launch/recipes/python_stdlib.yaml data.sequence_length=512
python -m pipeline inspect runs/NAME-TIME
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any

from pipeline.cli.inputs import (
    add_recipe_arguments,
    add_source_arguments,
    open_argument_source,
    read_recipe,
)
from pipeline.config.data_schema import DocumentsConfig
from pipeline.config.schema import RunConfig
from pipeline.distributed.ranks import Ranks
from pipeline.errors import ConfigError
from pipeline.monitoring.logs import log_to_console

if TYPE_CHECKING:
    from pipeline.cli.screen import Screen
    from pipeline.data.bundle import Batch, DataBundle

HELP = "show a recipe's data as the model would get it, or a trained model"
DESCRIPTION = """\
Show a language model: its architecture, size, end tokens and chat template. Show the training data of a run,
or with --config of a recipe, after preparing it if needed. For text: number and lengths of documents, exact
copies, padding, and rows in which the tokens that count in the loss are marked. For images: classes and the
first micro-batch."""
AFTER_INTERRUPT = ""  # `pipeline/__main__.py` prints nothing more than "stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_source_arguments(parser, is_required=False)
    add_recipe_arguments(parser, is_required=False)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        default=2,
        help="number of rows of text to show; 0 for none (default: 2)",
    )
    parser.add_argument("--no-color", action="store_true", help="mark tokens by brackets in place of colours")


def run(arguments: argparse.Namespace) -> None:
    """Show the model of the source and the data of its run, or the data of the recipe.

    Raises:
        PipelineError: The recipe or an argument is invalid, or the model or data cannot be read.
    """
    log_to_console(Ranks(0, 0, 1, 1))
    if arguments.config is not None and "=" in (arguments.source or ""):
        arguments.overrides.insert(0, arguments.source)  # argparse takes the first override for the source
        arguments.source = None
    if (arguments.config is None) == (arguments.source is None):
        raise ConfigError(
            "give either SOURCE (a run, a folder or a hub name) or --config RECIPE.yaml, and not both"
        )
    if arguments.samples < 0:
        raise ConfigError(f"--samples {arguments.samples}: expected 0 or more")
    from pipeline.cli import inspect_view
    from pipeline.cli.screen import Screen
    from pipeline.data import prepare_data

    screen = Screen(arguments.no_color)
    if arguments.config is not None:
        config = read_recipe(arguments)
        _inspect_data(screen, config, prepare_data(config.data), arguments.samples)
        return
    source = open_argument_source(arguments)
    if source.run is None or source.run.config.model.language_model is not None:
        inspect_view.show_model(screen, source)
    if source.run is not None:
        from pipeline.evaluation.from_checkpoint import read_data

        _inspect_data(screen, source.run.config, read_data(source.run), arguments.samples)


def _inspect_data(screen: Screen, config: RunConfig, bundle: DataBundle, samples: int) -> None:
    """Show the data of a recipe."""
    from pipeline.cli import inspect_view

    if config.data.documents is not None:
        _inspect_text(screen, config, config.data.documents, bundle, samples=samples)
        return
    if config.data.custom is None:
        inspect_view.show_classes(screen, bundle.train, list(bundle.eval.values()))
    if config.data.images is not None:
        inspect_view.show_shared_images(screen, bundle.train, bundle.eval)
    _show_first_batch(screen, config, bundle)


def _inspect_text(
    screen: Screen,
    config: RunConfig,
    data: DocumentsConfig,
    bundle: DataBundle,
    *,
    samples: int,
) -> None:
    """Show documents, copies and rows of text or conversations, and the first `samples` rows of the run."""
    from pipeline.cli import inspect_view
    from pipeline.data.prepared import prepare_documents

    logger = logging.getLogger("pipeline.data.prepared")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the totals were already logged when `bundle` was made
    prepared = prepare_documents(data)  # only opens the files: `bundle` was made of the same data
    logger.setLevel(level)
    sources = [*prepared.sources, *prepared.eval_sets]
    inspect_view.show_documents(screen, sources)
    inspect_view.show_copies(screen, sources, [source.name for source in prepared.eval_sets])
    rows = _split_by_source(bundle)
    inspect_view.show_rows(screen, rows, data.sequence_length)
    if samples:
        batch = _load_first_batch(config, bundle, samples)
        pad_id = next((getattr(dataset, "pad_id", None) for dataset in rows.values()), None)
        inspect_view.show_batch(screen, batch, prepared.tokenizer, pad_id)


def _split_by_source(bundle: DataBundle) -> dict[str, Any]:
    """Return the data set of training rows of each source, by the source's name."""
    train: Any = bundle.train
    datasets = getattr(train, "datasets", [train])  # several sources are joined into one data set
    return {source.name: dataset for source, dataset in zip(bundle.sources, datasets, strict=True)}


def _show_first_batch(screen: Screen, config: RunConfig, bundle: DataBundle) -> None:
    """Show the sizes of the data sets, and the shape of each entry of the first micro-batch of one rank."""
    from pipeline.data.batches import describe_value

    stated = config.batch.micro_batch_size
    size = stated if isinstance(stated, int) else 1  # `auto`
    batch = _load_first_batch(config, bundle, size)
    datasets: dict[str, Any] = {"train": bundle.train, **bundle.eval}
    screen.title("Samples")
    screen.table(["data set", "samples"], [[name, f"{len(each):,}"] for name, each in datasets.items()])
    screen.title(f"The first micro-batch, of {size} sample{'s' * (size > 1)}")
    screen.table(["key", "shape and type"], [[key, describe_value(value)] for key, value in batch.items()])


def _load_first_batch(config: RunConfig, bundle: DataBundle, size: int) -> Batch:
    """Return the first `size` samples of the run, from the loader that a run of one rank would use."""
    import torch

    from pipeline.data.curriculum import build_order
    from pipeline.data.loader import TrainLoader

    loader = TrainLoader(
        bundle.train,
        bundle.collate,
        build_order(bundle, config.seed, config.batch.global_batch_size or size),
        torch.device("cpu"),
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        dp_rank=0,
        dp_world_size=1,
        seed=config.seed,
        num_workers=0,
    )
    (batch,) = loader.next_group()
    return batch
