"""Log lines: rank 0's on the console, every rank's in `logs/` of the run directory."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

from pipeline.distributed.ranks import Ranks


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stderr is now: a live console line replaces it while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_to_console(ranks: Ranks) -> None:
    """Rank 0 speaks, the others keep to warnings; libraries to warnings too."""
    console = _CurrentStderr()
    console.setFormatter(logging.Formatter("%(message)s"))
    console.setLevel(logging.INFO if ranks.is_main_process else logging.ERROR)
    console.addFilter(lambda record: record.name != "pipeline.failure")  # running.py shows that one, once
    logger = logging.getLogger("pipeline")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers[:] = [console]
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def log_to_file(run_dir: Path, ranks: Ranks) -> None:
    """Adds `logs/rank00000.log`, with times."""
    path = run_dir / "logs" / f"rank{ranks.rank:05d}.log"
    path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 made it on its own machine
    file = logging.FileHandler(path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.getLogger("pipeline").addHandler(file)
