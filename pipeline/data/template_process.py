"""Runs a chat template in a process that can be ended: a template is a program, and may be a stranger's.

It has limits of time and of memory for each conversation, and its text has one of size.
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

# Of computing, for one conversation, which takes a template a millisecond: a busy machine adds none.
SECONDS = 5
MEMORY = 1 << 30  # bytes, besides what this process has
CHARACTERS = 1 << 24  # besides ten times what was said
MEND = "mend data.chat_template, or the template that the tokenizer brings"


class TemplateProcess:
    """A ChatTemplate in a child of this process, which ends with it.

    Args:
        given: Arguments of ChatTemplate.

    Attributes:
        turn_stop: As of ChatTemplate.

    Raises:
        DataError: it is no Jinja.
        ConfigError: it comes to no end, or takes too much memory.
    """

    def __init__(self, *given: Any) -> None:
        require_package("jinja2", "the chat template")
        # The child works with what is imported here.
        from jinja2 import sandbox  # noqa: F401
        from transformers.utils import chat_template_utils  # noqa: F401

        self._connection, theirs = Pipe()
        self._process = os.fork()  # multiprocessing refuses it to a daemon, such as a rank of a pool
        if self._process == 0:
            try:
                self._connection.close()
                _serve(theirs, given)
            finally:
                os._exit(0)
        theirs.close()
        self.close = weakref.finalize(self, _end, self._connection, self._process, os.getpid())
        self.turn_stop: str | None = self._ask("turn_stop", [("the chat template",)])[0]

    def write(self, given: Sequence[tuple[str, Conversation]]) -> list[str]:
        """Return the text of each conversation; see ChatTemplate.write."""
        return self._ask("write", given)

    def write_question(self, question: str) -> str:
        """Return a question as text; see ChatTemplate.write_question."""
        return str(self._ask("write_question", [(question,)])[0])

    def find_answers(self, given: Sequence[tuple[str, Conversation, str]]) -> list[list[Spans]]:
        """Return where the assistant speaks in each conversation; see ChatTemplate.find_answers."""
        return self._ask("find_answers", given)

    def _ask(self, what: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        answers: list[Any] = []
        try:
            self._connection.send((what, list(given)))
            while len(answers) < len(given):
                failure, answer = self._connection.recv()
                if failure is not None:
                    raise failure
                answers.append(answer)
        except (EOFError, ConnectionError):
            raise self._death(given[len(answers)][0]) from None
        return answers

    def _death(self, where: str) -> PipelineError:
        code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        self.close.detach()
        if code == -signal.SIGPROF:
            return ConfigError(
                f"{where}: the chat template came to no end in {SECONDS} s of computing; {MEND}"
            )
        how = signal.Signals(-code).name if code < 0 else f"code {code}"
        return DataError(
            f"{where}: the process that ran the chat template ended by {how}; is there memory left?"
        )


def _end(connection: Connection, process: int, parent: int) -> None:
    if os.getpid() != parent:  # a fork of the parent, whose child it is not
        return
    connection.close()
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)  # it holds nothing, and a template may keep it from listening
        os.waitpid(process, 0)


def _serve(connection: Connection, given: tuple[Any, ...]) -> None:
    """Answer until the parent closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent sees to it
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
                # By default its signal ends the process, whatever that does.
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    template = template or ChatTemplate(*given)
                    asked = getattr(template, what)
                    answer = _bounded(asked(*item), item) if callable(asked) else asked
                except PipelineError as error:
                    failure = error
                except MemoryError:
                    failure = ConfigError(f"{item[0]}: the chat template takes too much memory; {MEND}")
                except Exception:  # ours: its traceback crosses to the process that asked
                    failure = RuntimeError(traceback.format_exc())
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send((failure, answer))
                if failure is not None:
                    break


def _limit_memory() -> None:
    with suppress(OSError, ValueError):  # no /proc; a limit that is lower already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _bounded(answer: Any, item: tuple[Any, ...]) -> Any:
    if isinstance(answer, str) and len(answer) > CHARACTERS:
        said = len(item[1].key if len(item) > 1 else item[0])
        if len(answer) > CHARACTERS + 10 * said:
            raise ConfigError(
                f"{item[0]}: the chat template makes {len(answer):,} characters of a conversation of "
                f"{said:,} bytes; {MEND}"
            )
    return answer
