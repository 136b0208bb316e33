"""Command `python -m pipeline export RUN OUT`: writes a checkpoint's weights as a transformers folder."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import add_checkpoint_arguments, report_file_errors

HELP = "write a checkpoint's weights as safetensors (a transformers folder for a transformers model)"
DESCRIPTION = """\
Verify a checkpoint of any split, and write its weights into a new folder as safetensors. `from_pretrained`
opens the folder of a transformers model; PEFT opens the folder of an adapter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = DESCRIPTION
    add_checkpoint_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not exist")
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="precision of the weights (default: fp32; with --merge, the base's)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge an adapter into its base and write one model, in place of a PEFT folder",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Write the folder, and print its size and how to open it.

    Raises:
        PipelineError: The checkpoint cannot be found or read, or the folder cannot be written.
    """
    from pipeline.checkpoint.adapters import STATE_KEY, dtype_of
    from pipeline.checkpoint.export import export
    from pipeline.checkpoint.reader import CheckpointWeights
    from pipeline.cli.screen import Screen

    directory, checkpoint, manifest = find_checkpoint(arguments.run, arguments.step)
    entries = CheckpointWeights(manifest).entries.values()
    num_values = sum(math.prod(entry.shape) for entry in entries)
    num_bytes = sum(math.prod(entry.shape) * dtype_of(entry).itemsize for entry in entries)
    screen = Screen(no_color=True)
    with screen.progress("exporting", 2 * num_bytes) as advance:  # each byte is verified, then written
        result = export(
            checkpoint, arguments.out, dtype=arguments.dtype, merge=arguments.merge, advance=advance
        )
    num_files = len(result.files)
    size = (
        f"{num_values:,} values, {result.num_bytes / 1e6:,.1f} MB in {num_files} file{'s' * (num_files > 1)}"
    )
    print(f"{checkpoint.name} of {directory}: {size}: {arguments.out}")
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
    if result.auto_class is not None:
        print(f'{result.auto_class}.from_pretrained("{arguments.out}") opens it')
