"""Regenerates the outputs that the pages print: `python docs/outputs.py [PAGE.md ...]`.

A page prints a command in a block of `bash`, and below it what the command wrote:

    <!-- [[[cog output() ]]] -->
    ```text
    ```
    <!-- [[[end]]] -->

`output` runs the block above it; its arguments are those of `Page.output`. All blocks of a page run in order
in one empty folder, in whose home `~/deepspeed-pipeline` is this clone, without a network and without a GPU.
tests/test_docs.py compares every page with what its commands print, with numbers, times and paths masked.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cogapp import Cog

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
BLOCK = re.compile(r"^```bash\n((?:(?!```).*\n)*)```\n+<!-- \[\[\[cog(?s:.*?)^<!-- \[\[\[end\]\]\] -->", re.M)
"""Block of commands with the block of their output."""
TRAINING = re.compile(r"^(?:ds-pipeline|deepspeed|torchrun|python|\S+/multi_gpu\.sh)\b.*?train\b.*", re.M)
"""Line that trains."""
FROM_OUTSIDE = ("WANDB_", "HF_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "CUDA_", "PYTEST_")
"""Beginnings of variables of the environment that the commands do not inherit."""
MASKS = [
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    (re.compile(r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?"), "#"),
    (re.compile(r"#(?:-#)+|#T#Z"), "#"),  # dates and ranges
    (re.compile(r"#(?:[dhms]#?)+\b"), "#s"),  # 45s, 1m16s
    (re.compile(r"# ?[kKMGT](?:i?B)?\b"), "#"),  # a busy machine prints 469 for 1.9k tok/s
    (re.compile(r"(?:[\w-]+ #%(?:, |$)?)+"), "#%"),  # shares of time, largest first
    (re.compile(r"[-─━]{2,}"), "--"),
    (re.compile(r"\s+"), " "),
]
"""Patterns of what differs between two runs of a command, each with what takes its place."""


class Page:
    """Runs the commands of one page.

    Args:
        path: The page.
        is_short: Whether trainings run with the arguments `short` of their block.
    """

    def __init__(self, path: Path, is_short: bool = False) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.differences: list[str] = []
        """Lines that the page prints and the commands do not, and the other way round."""
        self._is_short = is_short
        self._blocks = list(BLOCK.finditer(self.text))
        self._number = 0
        self._cog = Cog()

    def update(self) -> str:
        """Run the commands, and return the page's text with their outputs."""
        with tempfile.TemporaryDirectory() as home:
            self._folder = Path(home) / "my-project"
            self._folder.mkdir()
            (Path(home) / "deepspeed-pipeline").symlink_to(ROOT)
            inherited = {
                name: value for name, value in os.environ.items() if not name.startswith(FROM_OUTSIDE)
            }
            programs = os.pathsep.join([str(Path(sys.executable).parent), inherited["PATH"]])
            self._environment = inherited | {
                "HOME": home,
                "PATH": programs,
                "PYTHONPATH": os.pathsep.join([str(ROOT), "."]),
                "DS_ACCELERATOR": "cpu",
                "HF_HUB_OFFLINE": "1",
                "COLUMNS": "110",
                "NO_COLOR": "1",
                "PYTHONWARNINGS": "ignore",
            }
            self._home = home
            page = Path(home) / "page.md"
            result = Path(home) / "updated.md"
            page.write_text(self.text, encoding="utf-8")
            self._cog.process_file(str(page), str(result), str(self.path), {"output": self.output})
            return result.read_text(encoding="utf-8")

    def output(
        self,
        *,
        show: str = "",
        varies: str = "",
        short: str = "",
        setup: str = "",
        code: int = 0,
    ) -> None:
        """Write what the block above prints.

        Args:
            show: Pattern of the lines to keep; `...` takes the place of the others.
            varies: Pattern of lines whose words may differ: a model's text.
            short: Arguments that make a training take seconds, for the daily comparison.
            setup: Commands to run before, whose output is not shown.
            code: Exit code of the block.
        """
        block = self._blocks[self._number]
        self._number += 1
        commands = block[1].replace("\\\n", " ").strip()
        if self._is_short and short:
            commands = TRAINING.sub(rf"\g<0> {short}", commands)
        if setup:
            self._run(setup, 0)
        lines = self._run(commands, code)
        printed = re.search(r"^```text\n(.*?)^```", block[0], re.M | re.S)
        expected = _mask(printed[1].splitlines() if printed else [], varies)
        actual = _mask(_elide(lines, show), varies)
        place = f"{self.path.relative_to(ROOT)}: {commands.splitlines()[0]}"
        self.differences += [f"{place}\n  page only: {line}" for line in sorted(expected - actual)]
        self.differences += [f"{place}\n  not on the page: {line}" for line in sorted(actual - expected)]
        self._cog.cogmodule.outl("\n".join(["```text", *_elide(lines, show), "```"]))

    def _run(self, commands: str, code: int) -> list[str]:
        """Return the lines that commands print.

        Raises:
            RuntimeError: The exit code is another one.
        """
        port = str(random.SystemRandom().randrange(12_000, 32_000))  # several pages may be run at once
        done = subprocess.run(
            ["bash", "-ec", re.sub(r"^deepspeed ", f"deepspeed --master_port {port} ", commands, flags=re.M)],
            cwd=self._folder,
            env=self._environment | {"PET_MASTER_PORT": port},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != code:
            raise RuntimeError(
                f"{self.path}: exit code {done.returncode}, expected {code}: {commands}\n{done.stdout}"
            )
        text = done.stdout.replace(self._home, "~").replace(str(ROOT), "~/deepspeed-pipeline")
        return [line.rstrip() for line in text.strip("\n").splitlines()]


def _elide(lines: list[str], show: str) -> list[str]:
    """Return the lines that match, with `...` in the place of others."""
    kept: list[str] = []
    for line in lines:
        if not show or re.search(show, line):
            kept.append(line)
        elif kept[-1:] != ["..."]:
            kept.append("...")
    return kept


def _mask(lines: list[str], varies: str) -> set[str]:
    """Return the different lines, without what differs from run to run."""
    masked = set()
    for line in lines:
        if line.strip() in ("", "..."):
            continue
        text = "a line that varies" if varies and re.search(varies, line) else line
        for pattern, mask in MASKS:
            text = pattern.sub(mask, text)
        masked.add(text.strip())
    return masked


def main() -> None:
    """Write the outputs of the named pages, or of all."""
    for path in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        if "[[[cog" in path.read_text(encoding="utf-8"):
            print(path.relative_to(ROOT), flush=True)
            path.write_text(Page(path).update(), encoding="utf-8")


if __name__ == "__main__":
    main()
