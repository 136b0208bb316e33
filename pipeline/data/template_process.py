"""Runs a chat template in a child process with limits, since a template is an untrusted program.

A limit of CPU time kills the process whatever it is doing; the time of other processes does not count. A
limit of memory stops strings of terabytes. The length of each conversation's text is limited, too.
Conversations are sent in batches.
"""

from __future__ import annotations

import os
import resource
import signal
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.config.optional_packages import require_package
from pipeline.data.chat_layouts import Conversation, Spans
from pipeline.data.chat_template import ChatTemplate
from pipeline.errors import ConfigError, DataError, PipelineError

CPU_SECONDS_LIMIT = 5  # for one conversation, which usually takes a millisecond
EXTRA_MEMORY_LIMIT = 1 << 30  # bytes, in addition to the memory of this process at the start
EXTRA_CHARACTERS_LIMIT = 1 << 24  # in addition to ten times the length of the conversation
ADVICE = "correct data.chat_template, or the template that comes with the tokenizer"


class TemplateProcess:
    """A ChatTemplate in a child process, which ends with this process.

    Args:
        template_arguments: Arguments of ChatTemplate.

    Attributes:
        turn_stop: Special token that begins a user's turn, if an assistant's turn has no end token of its
            own; otherwise `None`.
        close: Function that ends the child process; safe to call twice.

    Raises:
        DataError: The template is not valid Jinja.
        ConfigError: The template does not end in time, or takes too much memory.
    """

    def __init__(self, *template_arguments: Any) -> None:
        require_package("jinja2", "the chat template")
        # Import these before the fork, so that the child need not.
        from jinja2 import sandbox  # noqa: F401
        from transformers.utils import chat_template_utils  # noqa: F401

        self._connection, theirs = Pipe()
        self._process = os.fork()  # multiprocessing allows no children of daemons, such as workers of a pool
        if self._process == 0:
            code = 1
            try:
                self._connection.close()
                _serve(theirs, template_arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:  # also if the traceback cannot be printed: a copy of the parent must not go on
                os._exit(code)
        theirs.close()
        self.close = weakref.finalize(self, _end_child, self._connection, self._process, os.getpid())
        self.turn_stop: str | None = self._call("turn_stop", [("the chat template",)])[0]

    def write(
        self, conversations: Sequence[tuple[str, Conversation] | tuple[str, Conversation, bool]]
    ) -> list[str]:
        """Return the text of each conversation; each item has the arguments of ChatTemplate.write."""
        return self._call("write", conversations)

    def find_answers(self, conversations: Sequence[tuple[str, Conversation, str]]) -> list[list[Spans]]:
        """Return the answers' positions; each item has the arguments of ChatTemplate.find_answers."""
        return self._call("find_answers", conversations)

    def _call(self, attribute: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the results of calls of a method of the child's ChatTemplate, or the value of an attribute.

        Args:
            attribute: Name of the method or attribute.
            calls: Arguments of each call; the first argument is its location, for messages.
        """
        results: list[Any] = []
        try:
            self._connection.send((attribute, list(calls)))
            while len(results) < len(calls):
                failure, result = self._connection.recv()
                if failure is not None:
                    raise failure
                results.append(result)
        except (EOFError, ConnectionError):
            raise self._explain_death(calls[len(results)][0]) from None
        return results

    def _explain_death(self, where: str) -> PipelineError:
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        self.close.detach()
        if code == -signal.SIGPROF:
            return ConfigError(
                f"{where}: the chat template did not end within {CPU_SECONDS_LIMIT} s of CPU time; {ADVICE}"
            )
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return DataError(
            f"{where}: the process that ran the chat template ended unexpectedly ({how}); the machine may be "
            "out of memory"
        )


def _end_child(connection: Connection, process: int, parent: int) -> None:
    if os.getpid() != parent:  # this is another fork of the parent
        return
    connection.close()
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)  # it has nothing to save, and a template may keep it busy
        os.waitpid(process, 0)


def _serve(connection: Connection, template_arguments: tuple[Any, ...]) -> None:
    """Answer requests until the parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    _limit_memory()
    template: ChatTemplate | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            what, items = connection.recv()
            for item in items:
                failure: Exception | None = None
                answer = None
                # The timer's signal ends the process by default, whatever it is doing.
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS_LIMIT)
                try:
                    template = template or ChatTemplate(*template_arguments)
                    attribute = getattr(template, what)
                    answer = _check_length(attribute(*item), item) if callable(attribute) else attribute
                except PipelineError as error:
                    failure = error
                except MemoryError:
                    failure = ConfigError(f"{item[0]}: the chat template takes too much memory; {ADVICE}")
                except Exception:  # a fault of this code: send the traceback to the parent
                    failure = RuntimeError(traceback.format_exc())
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send((failure, answer))
                if failure is not None:
                    break


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # no /proc, or a lower limit is set already: no limit here
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + EXTRA_MEMORY_LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _check_length(answer: Any, item: tuple[Any, ...]) -> Any:
    if isinstance(answer, str) and len(answer) > EXTRA_CHARACTERS_LIMIT:
        input_size = len(item[1].key if len(item) > 1 else item[0])  # a conversation's key is its JSON
        limit = EXTRA_CHARACTERS_LIMIT + 10 * input_size
        if len(answer) > limit:
            raise ConfigError(
                f"{item[0]}: the chat template turns a conversation of {input_size:,} bytes into "
                f"{len(answer):,} characters, more than the limit of {limit:,}; {ADVICE}"
            )
    return answer
