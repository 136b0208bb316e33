"""Text into tokens, and tokens into the training loop, side by side: python benchmarks/data.py

First data_prepare.py: preparing against the bare tokeniser. Then data_loader.py: the loader against nanoGPT's
and `datasets` with torch's, its start-up, memory and seeking; and what the default run waits for data. About
ten minutes on two cores; the exit code says whether every target was reached.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from data_prepare import measure_prepare, missed_prepare, print_prepare
from data_wait import measure_wait, missed_wait, print_wait
from report import machine
from rich.console import Console


def main() -> int:
    arguments = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 130)
    logging.getLogger("pipeline").setLevel(logging.WARNING)
    about = machine()
    console.print(" · ".join(f"{key} {value}" for key, value in about.items()))
    results: dict[str, Any] = {"machine": about, "command": sys.argv[1:]}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="data-prepare-", dir=arguments.folder) as folder:
        if arguments.prepare_rounds:
            speeds = measure_prepare(arguments, Path(folder))
            print_prepare(console, speeds, arguments)
            failures += missed_prepare(speeds)
            results["prepare_megabytes_per_second"] = speeds
    with tempfile.TemporaryDirectory(prefix="data-loader-", dir=arguments.folder) as folder:
        if arguments.loader_rounds:
            # After the rest: this needs torch, which the processes that tokenise would import along with it.
            import data_loader

            loading = data_loader.parse_arguments(["--rounds", str(arguments.loader_rounds)])
            rates = data_loader.measure_speed(loading, Path(folder))
            claims = data_loader.measure_claims(loading, Path(folder))
            data_loader.print_results(console, rates, claims)
            failures += data_loader.missed(rates, claims)
            results |= {"loader_tokens_per_second": rates, "loader_claims": claims}
    if arguments.wait:
        with tempfile.TemporaryDirectory(prefix="data-wait-", dir=arguments.folder) as folder:
            found = measure_wait(Path(folder))
            print_wait(console, found)
            failures += missed_wait(found)
            results["default_run"] = found
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results | {"failures": failures}, indent=1) + "\n")
    for failure in failures:
        print(f"not reached: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--megabytes", type=float, default=200, help="of text, with gigatoken")
    add(
        "--standard-megabytes", type=float, default=66, help="of that text, with tokenizers, which takes long"
    )
    add("--prepare-rounds", type=int, default=2, help="0: leave out")
    add("--loader-rounds", type=int, default=7, help="0: leave out")
    add("--wait", action=argparse.BooleanOptionalAction, default=True, help="of the default run for data")
    add("--folder", type=Path, help="where the files are made; default: the system's temporary folder")
    add("--output", type=Path, help="JSON file of all numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
