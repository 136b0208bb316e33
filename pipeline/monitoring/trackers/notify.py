"""Alerts to a command or a webhook of the user's own.

An environment variable holds the address of the webhook; nothing that is written or logged here repeats it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from pipeline.config.schema import NotifyConfig
from pipeline.errors import ConfigError, summarize_error
from pipeline.monitoring.events import RUN_FAILED, Event

logger = logging.getLogger(__name__)

# Seconds.
TIMEOUT = 10.0  # of a command, and of each answer of a server
FAILURE_TIMEOUT = 5.0  # of a process that ends by a failure, for its last alert
MIN_INTERVAL = 60.0  # between two alerts of one name
MAX_TEXT_LENGTH = 1900  # characters; Discord takes 2000
LEVELS = ("info", "warning", "error")
CHAT_FIELDS = ("text", "content")  # Slack and Mattermost read the one, Discord the other
Channel = Callable[[Mapping[str, str | int]], None]
"""Delivers an alert; raises if it cannot, without the address in its message."""


class NotifyTracker:
    """Delivers events of a level or worse: one a minute of each name, with the number that was held back."""

    def __init__(
        self, ways: Mapping[str, Channel], level: str, run: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Deliver nothing yet.

        Args:
            ways: See build_channels.
            level: Least level to deliver.
            run: Name of the run.
            clock: Monotonic seconds.
        """
        self._ways = ways
        self._least = LEVELS.index(level)
        self._run = run
        self._clock = clock
        self._told_at: dict[str, float] = {}
        self._held_back: dict[str, int] = {}
        self._failed = set[str]()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Do nothing: rows go elsewhere."""

    def tell(self, step: int, event: Event) -> None:
        """Deliver an alert, unless one of its name was delivered in the last minute. Waits for answers."""
        if LEVELS.index(event.level) < self._least:
            return
        now = self._clock()
        if now - self._told_at.get(event.name, -MIN_INTERVAL) < MIN_INTERVAL:
            self._held_back[event.name] = self._held_back.get(event.name, 0) + 1
            return
        self._told_at[event.name] = now
        more = self._held_back.pop(event.name, 0)
        said = build_payload(self._run, step, event, more)
        for name, deliver in self._ways.items():
            try:
                deliver(said)
            except Exception as error:  # the next alert may be delivered
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning("notify.%s failed (%s); it is tried again", name, summarize_error(error))

    def close(self, exit_code: int) -> None:
        """Do nothing."""


def build_payload(run: str, step: int, event: Event, more: int = 0) -> dict[str, str | int]:
    """Return the fields that are delivered.

    Args:
        more: Number of alerts of this name that were held back since the last one.
    """
    held_back = f" (and {more} more since the last one told)" if more else ""
    text = f"{run}, step {step}: {event.name}{held_back}: {event.line}"[:MAX_TEXT_LENGTH]
    said: dict[str, str | int] = {"run": run, "step": step, "event": event.name, "level": event.level}
    said |= {"message": event.message + held_back, "advice": event.advice}
    return said | dict.fromkeys(CHAT_FIELDS, text)


def build_channels(config: NotifyConfig) -> dict[str, Channel]:
    """Return how alerts are delivered, by the key that asks for it; empty if none does.

    Raises:
        ConfigError: There is no such program; the variable is not set, or holds no address.
    """
    ways: dict[str, Channel] = {}
    if config.command is not None:
        words = shlex.split(config.command)
        if shutil.which(words[0]) is None:
            raise ConfigError(f"notify.command: there is no program {words[0]!r} here, or it may not be run")
        ways["command"] = lambda said: run_command(words, said)
    if config.webhook_env is not None:
        address = _address(config.webhook_env)
        ways["webhook_env"] = lambda said: post_json(address, said)
    return ways


def _address(name: str) -> str:
    address = os.environ.get(name, "").strip()
    if not address:
        raise ConfigError(
            f"notify.webhook_env: {name} is not set where the main process runs; export {name}=https://... "
            f"(multi_node.sh: --export {name}), or drop notify.webhook_env"
        )
    with suppress(ValueError):
        parts = urlsplit(address)
        is_plain = address.isascii() and address.isprintable() and " " not in address
        if parts.scheme in ("http", "https") and parts.hostname and is_plain:
            return address
    raise ConfigError(f"notify.webhook_env: what {name} holds is no address; give https://HOST/...")


def notify_failure(config: NotifyConfig, run: str, step: int, message: str) -> None:
    """Send that a run failed, from a process that ends; also on ranks without trackers.

    The training thread may hang. Raises nothing, logs nothing, and takes PATIENCE seconds at most.
    """
    said = build_payload(run, step, Event(RUN_FAILED, message, level="error"))

    def deliver() -> None:
        with suppress(Exception):
            for way in build_channels(config).values():
                with suppress(Exception):
                    way(said)

    thread = threading.Thread(target=deliver, name="notify", daemon=True)
    thread.start()
    thread.join(FAILURE_TIMEOUT)


def run_command(words: list[str], said: Mapping[str, str | int]) -> None:
    """Start the program, without a shell, and wait for it.

    Raises:
        RuntimeError: It did not end with 0, or not in time: then it is killed with its children.
    """
    named = {f"PIPELINE_{key.upper()}": str(value) for key, value in said.items() if key not in CHAT_FIELDS}
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **named},
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(dict(said)).encode(), timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"{words[0]} took longer than {TIMEOUT:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}")


def post_json(address: str, said: Mapping[str, str | int]) -> None:
    """Post an alert as JSON.

    Raises:
        RuntimeError: The server refused it, is not there or does not answer; the address is not repeated.
    """
    body = json.dumps(dict(said)).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise RuntimeError(f"the server answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # their texts may have the address
        reason = getattr(error, "reason", error)
        what = (isinstance(reason, OSError) and reason.strerror) or type(error).__name__
        raise RuntimeError(f"the server cannot be reached: {what}") from None
