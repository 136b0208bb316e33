"""Command `python -m pipeline export SOURCE OUT`: writes a model's weights as a transformers folder."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import add_source_arguments, report_file_errors
from pipeline.errors import ConfigError
from pipeline.evaluation.sources import names_run, open_source

if TYPE_CHECKING:
    from pipeline.checkpoint.export import ExportResult

HELP = "write a model's weights as safetensors (a transformers folder for a transformers model)"
DESCRIPTION = """\
Verify a checkpoint of any split, and write its weights into a new folder as safetensors. `from_pretrained`
opens the folder of a transformers model; PEFT opens the folder of an adapter. A transformers folder or a
model on the hub is written in another precision, and a PEFT folder with --merge as one model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_source_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not exist")
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="precision of the weights (default: fp32 of a run, else the source's; with --merge, the base's)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge an adapter into its base and write one model, in place of a PEFT folder",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="model.trust_remote_code=true runs the Python code of a folder or of the hub",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Write the folder, and print its size and how to open it.

    Raises:
        PipelineError: The source cannot be found or read, or the folder cannot be written.
    """
    if names_run(arguments.source):
        result = _export_run(arguments)
    else:
        from pipeline.checkpoint.export import export_source

        source = open_source(arguments.source, arguments.step, arguments.overrides, base=arguments.base)
        result = export_source(source, arguments.out, dtype=arguments.dtype, merge=arguments.merge)
        print(f"{source.name}: {_format_size(result)}: {arguments.out}")
    if result.auto_class is not None:
        print(f'{result.auto_class}.from_pretrained("{arguments.out}") opens it')


def _export_run(arguments: argparse.Namespace) -> ExportResult:
    """Export a checkpoint, and print its size and what is to be known of an adapter."""
    from pipeline.checkpoint.adapters import STATE_KEY, dtype_of
    from pipeline.checkpoint.export import export
    from pipeline.checkpoint.reader import CheckpointWeights
    from pipeline.cli.screen import Screen

    if arguments.base or arguments.overrides:
        unused = arguments.base or arguments.overrides[0]
        raise ConfigError(
            f"{unused}: {arguments.source} is a run, whose checkpoint determines this; remove it"
        )
    directory, checkpoint, manifest = find_checkpoint(Path(arguments.source), arguments.step)
    entries = CheckpointWeights(manifest).entries.values()
    num_values = sum(math.prod(entry.shape) for entry in entries)
    num_bytes = sum(math.prod(entry.shape) * dtype_of(entry).itemsize for entry in entries)
    screen = Screen(no_color=True)
    with screen.progress("exporting", 2 * num_bytes) as advance:  # each byte is verified, then written
        result = export(
            checkpoint, arguments.out, dtype=arguments.dtype, merge=arguments.merge, advance=advance
        )
    print(f"{checkpoint.name} of {directory}: {num_values:,} values, {_format_size(result)}: {arguments.out}")
    if result.is_adapter:
        print(
            f'PeftModel.from_pretrained(model, "{arguments.out}") opens it; --merge writes one model instead'
        )
        if manifest.state[STATE_KEY].get("quantize") == "nf4":
            print(
                "to load the base as in training: quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
                'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
            )
    if result.rounding_error is not None:
        print(
            "the merged base has the nf4 weights of the training, which are "
            f"{result.rounding_error:.2%} off the original ones (||W - W in nf4|| / ||W||)"
        )
    return result


def _format_size(result: ExportResult) -> str:
    num_files = len(result.files)
    return f"{result.num_bytes / 1e6:,.1f} MB in {num_files} file{'s' * (num_files > 1)}"
