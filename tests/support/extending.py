"""Runs the Python code of docs/how-to/extending.md, so that recipes of tests can name it by import path."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)

for block in BLOCKS:
    exec(compile(block, str(PAGE), "exec"), globals())
