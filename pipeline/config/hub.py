"""Access to the Hugging Face hub, or to its cache on this machine if the hub does not answer soon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from pipeline.errors import PipelineError, summarize_error
from pipeline.files import suggest_path

REMOTE_CODE = "model.trust_remote_code"
"""Key that an override has to set before Python code of a trained model's files runs."""
ANSWER_TIMEOUT_SECONDS = 2.0
"""Seconds that the hub has to answer. Without this limit, the hub's client retries for a minute if the hub
is unreachable."""
RECHECK_SECONDS = 60.0
"""Seconds before the hub is asked again whether it answers."""
MARKER_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json", "adapter_config.json")
"""Files of a model or tokenizer. If the cache has one of them, the model or tokenizer counts as cached."""


@contextmanager
def use_hub_or_cache(
    key: str, name_or_path: str, error: type[PipelineError], local: str = "folder"
) -> Iterator[None]:
    """Run the body with the hub's client offline if the hub does not answer.

    An offline client reads only its cache on this machine. The switch applies to the whole process, and is
    reset when the body ends.

    Args:
        key: Key of the recipe that has the name, for errors.
        name_or_path: Name on the hub, or a local path, for which the hub is not asked.
        error: Class of the errors to raise.
        local: What the path could be, for errors.

    Raises:
        PipelineError: As `error`; the name is not valid on the hub, or the hub does not answer and the cache
            does not have it.
    """
    if Path(name_or_path).expanduser().exists():
        yield
        return
    from huggingface_hub import constants, try_to_load_from_cache  # takes half a second
    from huggingface_hub.errors import HFValidationError

    hint = suggest_path(Path(name_or_path).expanduser())
    start = f"{key}: {name_or_path!r}: there is no such {local}"
    was_offline = constants.HF_HUB_OFFLINE
    try:
        is_cached = any(isinstance(try_to_load_from_cache(name_or_path, file), str) for file in MARKER_FILES)
    except HFValidationError as mistake:
        raise error(f"{start}, and it is no valid hub name ({summarize_error(mistake)}){hint}") from None
    problem = "HF_HUB_OFFLINE is set" if was_offline else _find_problem(constants.ENDPOINT)
    if problem is not None and not is_cached:
        download = (
            "; give one that exists, or download it on a machine with network access: "
            f"hf download {name_or_path}"
        )
        raise error(
            f"{start}, the hub does not answer ({problem}), and its cache on this machine "
            f"({constants.HF_HUB_CACHE}; HF_HOME chooses it) does not have it{hint or download}"
        )
    constants.HF_HUB_OFFLINE = problem is not None
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


@contextmanager
def go_offline_without_hub() -> Iterator[None]:
    """Run the body with the clients of the hub and of data sets offline if the hub does not answer.

    Otherwise they would retry for a minute before they read their caches.
    """
    import datasets
    from huggingface_hub import constants

    hub_was_offline = constants.HF_HUB_OFFLINE
    datasets_were_offline = datasets.config.HF_HUB_OFFLINE
    if not hub_was_offline and _find_problem(constants.ENDPOINT) is not None:
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = hub_was_offline
        datasets.config.HF_HUB_OFFLINE = datasets_were_offline


_answers: dict[str, tuple[float, str | None]] = {}
"""Endpoint -> `time.monotonic()` of the last request, and the problem; `None` if the endpoint answered."""


def _find_problem(endpoint: str) -> str | None:
    """Return why the hub does not answer; `None` if it does. Ask at most once in `RECHECK_SECONDS`."""
    asked_at, problem = _answers.get(endpoint, (-RECHECK_SECONDS, None))
    now = time.monotonic()
    if now - asked_at >= RECHECK_SECONDS:
        problem = _ask_hub(endpoint)
        _answers[endpoint] = (now, problem)
    return problem


def _ask_hub(endpoint: str) -> str | None:
    """Ask the hub, and return why it does not answer; `None` if it does. A refusal is an answer, too."""
    from huggingface_hub import get_session

    problems: list[str | None] = [f"{endpoint}: no answer within {ANSWER_TIMEOUT_SECONDS:g} s"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=ANSWER_TIMEOUT_SECONDS)
            problems.append(None)
        except Exception as error:  # any failure of the network, a proxy or a certificate
            problems.append(f"{endpoint}: {summarize_error(error)}")

    # A thread, since the timeout of `head` does not limit the resolution of the host name.
    thread = Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(ANSWER_TIMEOUT_SECONDS)
    return problems[-1]
