"""Names on the Hugging Face hub: from its cache on this machine where the hub does not answer soon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from pipeline.errors import PipelineError, summarize_error

SECONDS_TO_ANSWER = 2.0
"""For the hub to answer. Without this question its client asks an unreachable hub for a minute."""
MEMORY_SECONDS = 60.0
"""Seconds, from when the hub was asked, for which its answer counts."""
MARKS = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""Files of which the cache has one if it has a model or a tokenizer."""


@contextmanager
def use_hub_or_cache(key: str, given: str, error: type[PipelineError]) -> Iterator[None]:
    """Let the hub's client read a name from its cache alone inside of this, if the hub does not answer.

    Args:
        key: Where the recipe has the name.
        given: A name, or a local path, for which nothing is asked.
        error: What to raise.

    Raises:
        PipelineError: as `error`; it cannot be a name, or neither the hub nor the cache gives it.
    """
    if Path(given).expanduser().exists():
        yield
        return
    from huggingface_hub import constants, try_to_load_from_cache  # half a second
    from huggingface_hub.errors import HFValidationError

    start, before = f"{key}: {given!r}: there is no such folder", constants.HF_HUB_OFFLINE
    try:
        is_cached = any(isinstance(try_to_load_from_cache(given, file), str) for file in MARKS)
    except HFValidationError as mistake:
        raise error(f"{start}, nor can the hub have such a name ({summarize_error(mistake)})") from None
    problem = "HF_HUB_OFFLINE is set" if before else _unreachable(constants.ENDPOINT)
    if problem is not None and not is_cached:
        raise error(
            f"{start}, the hub does not answer ({problem}), and its cache here has nothing of that name; "
            f"give a folder, or type where there is a network: hf download {given}"
        )
    constants.HF_HUB_OFFLINE = problem is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


_answers: dict[str, tuple[float, str | None]] = {}
"""Endpoint -> when this process asked it last, and why it did not answer; `None` if it did."""


def _unreachable(endpoint: str) -> str | None:
    """Return why the hub does not answer, or `None`. Asks at most once in `MEMORY_SECONDS`."""
    asked_at, problem = _answers.get(endpoint, (-MEMORY_SECONDS, None))
    now = time.monotonic()
    if now - asked_at >= MEMORY_SECONDS:
        problem = _ask(endpoint)
        _answers[endpoint] = (now, problem)
    return problem


def _ask(endpoint: str) -> str | None:
    """Return why the hub does not answer now, or `None`. Any answer counts, a refusal as well."""
    from huggingface_hub import get_session

    problems: list[str | None] = [f"{endpoint}: no answer within {SECONDS_TO_ANSWER:g} s"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=SECONDS_TO_ANSWER)
            problems.append(None)
        except Exception as error:  # whatever the network, a proxy or a certificate can do
            problems.append(f"{endpoint}: {summarize_error(error)}")

    thread = Thread(target=ask, name="hub", daemon=True)  # no timeout holds for the resolver of names
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return problems[-1]
