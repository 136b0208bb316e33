"""python -m pipeline export RUN OUT: a checkpoint's weights as a folder that transformers opens."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from pipeline.checkpoint.find import find_checkpoint
from pipeline.cli.inputs import add_checkpoint_arguments, report_file_errors

HELP = "write a checkpoint's weights as safetensors (a transformers folder, where the model is one)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = HELP
    add_checkpoint_arguments(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="of the weights (default: fp32; with --merge that of the base)",
    )

    parser.add_argument(
        "--merge",
        action="store_true",
        help="of an adapter: write it and its base as one model, not as a folder of peft's",
    )


@report_file_errors()
def run(arguments: argparse.Namespace) -> None:
    """Export a checkpoint as a Hugging Face folder."""
    from pipeline.checkpoint.adapters import STATE_KEY, dtype_of
    from pipeline.checkpoint.export import export
    from pipeline.checkpoint.reader import CheckpointWeights
    from pipeline.cli.screen import Screen

    directory, checkpoint, manifest = find_checkpoint(arguments.run, arguments.step)
    entries = CheckpointWeights(manifest).entries.values()
    values = sum(math.prod(entry.shape) for entry in entries)
    num_bytes = sum(math.prod(entry.shape) * dtype_of(entry).itemsize for entry in entries)
    screen = Screen(no_color=True)
    with screen.progress("exporting", 2 * num_bytes) as advance:  # verified, then written
        done = export(
            checkpoint, arguments.out, dtype=arguments.dtype, merge=arguments.merge, advance=advance
        )
    files = len(done.files)
    size = f"{values:,} values, {done.num_bytes / 1e6:,.1f} MB in {files} file{'s' * (files > 1)}"
    print(f"{checkpoint.name} of {directory}: {size}: {arguments.out}")
    if done.is_adapter:
        print(
            f'PeftModel.from_pretrained(model, "{arguments.out}") opens it; --merge writes one model instead'
        )
        if manifest.state[STATE_KEY].get("quantize") == "nf4":
            print(
                "the model it was trained over: quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
                'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
            )
    if done.rounding_error is not None:
        print(
            f"the base is as the adapter was trained over it, in nf4: {done.rounding_error:.2%} off the "
            "original weights (||W - W in nf4|| / ||W||)"
        )
    if done.auto_class is not None:
        print(f'{done.auto_class}.from_pretrained("{arguments.out}") opens it')
