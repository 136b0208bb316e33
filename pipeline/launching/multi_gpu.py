"""python -m pipeline.launching.multi_gpu ...: what launch/multi_gpu.sh hands over to.

The deepspeed launcher on this machine alone, with a free port, and with an exit code that the ranks prove.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.distributed.ranks import HANDED_OVER
from pipeline.errors import report_errors
from pipeline.launching.arguments import split_arguments
from pipeline.launching.multi_node import TRAIN, program
from pipeline.launching.supervise import Post, Supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: the run's; 2 bad input."""
    options, arguments = split_arguments(sys.argv[1:] if argv is None else argv)
    folder = Path(tempfile.gettempdir()) / f"pipeline-{secrets.token_hex(8)}"
    # The ranks are children of this shell: their environment and arguments come by themselves.
    document = {"folder": str(folder), "environment": {}, "arguments": []}
    guard = Post("this machine", [sys.executable, "-m", "pipeline.launching.guard"])

    def start(master: Mapping[str, Any]) -> list[str]:
        # The user's own of these come later, and are taken.
        given = [f"--master_port={master['port']}", "--log_level=warning"]
        return [program("deepspeed"), *given, *options, str(TRAIN), *arguments]

    environment = os.environ | {HANDED_OVER: str(folder / "environment.json")}
    return report_errors(lambda: asyncio.run(Supervisor([guard], document, {}).run(start, environment)))


if __name__ == "__main__":
    sys.exit(main())
