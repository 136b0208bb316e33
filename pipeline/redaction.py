"""What leaves a machine is rid of keys first: fields and variables named as one, and what looks like one.

Not here: files that the user wrote, as a run's recipe.yaml, which stay as they are.
"""

from __future__ import annotations

import os
import re
from typing import Any

REDACTED = "[redacted]"
SHORTEST = 8  # characters of a secret: shorter ones are words

_NAME = r"(?:key|token|secret|password|passwd|credential)s?"
_IS_NAMED = re.compile(rf"(?:^|[_-]|[a-z](?=[A-Z])|api|access|auth){_NAME}$", re.IGNORECASE)
_KNOWN = re.compile(
    r"""-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | \bwandb_v1_\w{20,} | \blocal-[0-9a-f]{40}\b
    | \bhf_[A-Za-z0-9]{20,} | \bsk-[\w-]{16,} | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w{20,} | \bxox[abprs]-[\w-]{10,} | \bAIza[\w-]{30,}
    | \beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+""",
    re.VERBOSE | re.DOTALL,
)
_IN_URL = re.compile(r"(?<=://)[^\s/:@]*:[^\s/@]+(?=@)")
# W&B's older keys look as git's names of commits do.
_FORTY = re.compile(r"\b[0-9a-f]{40}\b")
_IS_COMMIT = re.compile(r"commit|revision|sha|hash|fingerprint|digest", re.IGNORECASE)
# NAME = "value", NAME: value and --name=value; a call or a mere name of code is no value.
_ASSIGNED = re.compile(
    rf"""(?P<name>[\w-]*{_NAME})(?P<between>["']?\s*[:=]\s*)
    (?: (?P<quote>["'])[^"'\s]{{{SHORTEST},}}(?P=quote)
    | (?=[^\s"']*\d)[\w+/=.~!@#$%^&*-]{{{SHORTEST},}}(?![\w(\[]) )""",
    re.VERBOSE | re.IGNORECASE,
)


def redact_text(text: str) -> str:
    """The text, with secrets replaced."""
    text = _KNOWN.sub(REDACTED, text)
    for value in _in_environment():
        text = text.replace(value, REDACTED)
    text = _IN_URL.sub(REDACTED, text)
    return "".join(map(_redact_line, text.splitlines(keepends=True)))


def redact(tree: Any, name: str = "") -> Any:
    """Dicts and lists of plain values, with secrets replaced.

    Args:
        name: Of the field that holds it.
    """
    if isinstance(tree, dict):
        return {key: redact(value, str(key)) for key, value in tree.items()}
    if isinstance(tree, list):
        return [redact(value, name) for value in tree]
    if not isinstance(tree, str):
        return tree
    if _IS_NAMED.search(name) and len(tree) >= SHORTEST:
        return REDACTED
    return tree if _IS_COMMIT.search(name) else redact_text(tree)


def _redact_line(line: str) -> str:
    if not _IS_COMMIT.search(line):
        line = _FORTY.sub(REDACTED, line)
    return _ASSIGNED.sub(lambda found: f"{found['name']}{found['between']}{REDACTED}", line)


def _in_environment() -> list[str]:
    """Values of variables that are named as secrets."""
    return [v for name, v in os.environ.items() if _IS_NAMED.search(name) and len(v) >= SHORTEST]
