"""Delivery of alerts to a command or a webhook that the recipe names.

The address of the webhook comes from an environment variable. The address is never written or logged.
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

from pipeline.config.command_lines import format_shell_line
from pipeline.config.schema import NotifyConfig
from pipeline.errors import ConfigError, summarize_error
from pipeline.monitoring.events import RUN_FAILED, Event

logger = logging.getLogger(__name__)

TIMEOUT = 10.0  # maximum seconds of a command, and of each response of a server
FAILURE_TIMEOUT = 5.0  # maximum seconds that a failing process waits for the delivery of its last alert
MIN_INTERVAL = 60.0  # minimum seconds between two alerts of the same name
MAX_TEXT_LENGTH = 1900  # characters; Discord allows 2000
LEVELS = ("info", "warning", "error")  # in ascending order
CHAT_FIELDS = ("text", "content")  # Slack and Mattermost show `text`, Discord `content`
Channel = Callable[[Mapping[str, str | int]], None]
"""Function that delivers the fields of an alert. The messages of its errors do not contain the address."""


class NotifyTracker:
    """Delivers events from a minimum level on, at most one per minute of each name.

    The next alert of a name says how many were suppressed.
    """

    def __init__(
        self,
        channels: Mapping[str, Channel],
        level: str,
        run: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the tracker.

        Args:
            channels: Channels by key of the recipe; see build_channels.
            level: Minimum level to deliver.
            run: Name of the run.
            clock: Monotonic clock in seconds.
        """
        self._channels = channels
        self._min_level = LEVELS.index(level)
        self._run = run
        self._clock = clock
        self._delivered_at: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}
        self._failed = set[str]()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Do nothing: only events are delivered."""

    def tell(self, step: int, event: Event) -> None:
        """Deliver an event unless one of its name was delivered within MIN_INTERVAL. Waits for responses.

        A channel that fails is logged once, and tried again at the next alert.
        """
        if LEVELS.index(event.level) < self._min_level:
            return
        now = self._clock()
        if now - self._delivered_at.get(event.name, -MIN_INTERVAL) < MIN_INTERVAL:
            self._suppressed[event.name] = self._suppressed.get(event.name, 0) + 1
            return
        self._delivered_at[event.name] = now
        num_suppressed = self._suppressed.pop(event.name, 0)
        payload = build_payload(self._run, step, event, num_suppressed)
        for name, deliver in self._channels.items():
            try:
                deliver(payload)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning(
                        "notify.%s failed (%s); it is tried again at the next alert",
                        name,
                        summarize_error(error),
                    )

    def close(self, exit_code: int) -> None:
        """Do nothing."""


def build_payload(run: str, step: int, event: Event, num_suppressed: int = 0) -> dict[str, str | int]:
    """Return the fields of an alert that are delivered.

    Args:
        run: Name of the run.
        step: Step of the event.
        event: The event.
        num_suppressed: Number of alerts of this name that were suppressed since the last one.
    """
    suppressed = f" (and {num_suppressed} more since the last one)" if num_suppressed else ""
    text = f"{run}, step {step}: {event.name}{suppressed}: {event.line}"[:MAX_TEXT_LENGTH]
    payload: dict[str, str | int] = {"run": run, "step": step, "event": event.name, "level": event.level}
    payload |= {"message": event.message + suppressed, "advice": event.advice}
    return payload | dict.fromkeys(CHAT_FIELDS, text)


def build_channels(config: NotifyConfig) -> dict[str, Channel]:
    """Return the channels by the key of the recipe's section `notify` that asks for them.

    Raises:
        ConfigError: The program does not exist, the variable is not set, or its value is not an address.
    """
    channels: dict[str, Channel] = {}
    if config.command is not None:
        words = split_command(config.command)
        channels["command"] = lambda payload: run_command(words, payload)
    if config.webhook_env is not None:
        address = _read_address(config.webhook_env)
        channels["webhook_env"] = lambda payload: post_json(address, payload)
    return channels


def split_command(command: str) -> list[str]:
    """Return the program of `notify.command` and its arguments.

    Raises:
        ConfigError: This machine has no such program, or its file is not executable.
    """
    words = shlex.split(command)
    if shutil.which(words[0]) is None:
        if os.path.isfile(words[0]) and not os.access(words[0], os.X_OK):
            fix = format_shell_line("chmod", "+x", words[0])
            raise ConfigError(f"notify.command: {words[0]} is not executable; run: {fix}")
        raise ConfigError(
            f"notify.command: there is no program {words[0]!r} here; give a program on PATH or its full path"
        )
    return words


def _read_address(name: str) -> str:
    """Return the webhook's address, given the name of its environment variable."""
    address = os.environ.get(name, "").strip()
    if not address:
        raise ConfigError(
            f"notify.webhook_env: {name} is not set where the main process runs; export {name}=https://... "
            f"(multi_node.sh: --export {name}), or remove notify.webhook_env"
        )
    with suppress(ValueError):
        parts = urlsplit(address)
        is_plain = address.isascii() and address.isprintable() and " " not in address
        if parts.scheme in ("http", "https") and parts.hostname and is_plain:
            return address
    raise ConfigError(
        f"notify.webhook_env: the value of {name} is not an address; set it to https://HOST/..."
    )


def notify_failure(config: NotifyConfig, run: str, step: int, message: str) -> None:
    """Send the message that a run failed, from a process that is about to end, on any rank.

    Works while the training thread hangs. Raises and logs nothing, and takes at most FAILURE_TIMEOUT.

    Args:
        config: The section `notify` of the recipe.
        run: Name of the run.
        step: Step at which it failed.
        message: Description of the failure.
    """
    payload = build_payload(run, step, Event(RUN_FAILED, message, level="error"))

    def deliver() -> None:
        with suppress(Exception):
            for send in build_channels(config).values():
                with suppress(Exception):
                    send(payload)

    thread = threading.Thread(target=deliver, name="notify", daemon=True)
    thread.start()
    thread.join(FAILURE_TIMEOUT)


def run_command(words: list[str], payload: Mapping[str, str | int]) -> None:
    """Run a program without a shell and wait for it.

    The program gets the alert as JSON on standard input, and its fields as environment variables
    `PIPELINE_<FIELD>`.

    Args:
        words: The program and its arguments.
        payload: Fields of the alert.

    Raises:
        RuntimeError: The exit code is not 0, or TIMEOUT passed; then the program is killed with its children.
        OSError: The program cannot be started.
    """
    variables = {
        f"PIPELINE_{key.upper()}": str(value) for key, value in payload.items() if key not in CHAT_FIELDS
    }
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(dict(payload)).encode(), timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise RuntimeError(f"{words[0]} took longer than {TIMEOUT:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with exit code {process.returncode}")


def post_json(address: str, payload: Mapping[str, str | int]) -> None:
    """Post an alert as JSON.

    Args:
        address: Address of the webhook.
        payload: Fields of the alert.

    Raises:
        RuntimeError: The server refused the alert or cannot be reached. The message omits the address.
    """
    body = json.dumps(dict(payload)).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError as error:
        error.close()
        raise RuntimeError(f"the server answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The message of the error may contain the address, so only its kind is shown.
        reason = getattr(error, "reason", error)
        detail = reason.strerror if isinstance(reason, OSError) else None
        raise RuntimeError(f"the server cannot be reached: {detail or type(error).__name__}") from None
