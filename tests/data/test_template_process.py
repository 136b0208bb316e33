"""The process of a chat template: it answers, has limits, and does not outlive whom it works for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pipeline.data import template_process
from pipeline.data.chat_layouts import Conversation
from pipeline.data.chat_template import BUILT_IN
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

TURNS = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_answers_again_after_a_refusal_and_ends_with_its_owner():
    template = TemplateProcess(BUILT_IN["chatml"] + "{{ messages[0]['content'] + 1 if tools }}", {}, [])
    good = ("a", Conversation(TURNS))
    bad = ("b", Conversation(TURNS, [{}]))
    with pytest.raises(DataError, match="b: the chat template refuses"):
        template.write([good, bad, good])
    first, second = template.write([good, good])
    assert first == second == "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    (((start, end),),) = template.find_answers([(*good, first)])[0]
    assert first[start:end] == "Yes.<|im_end|>\n"
    process = template._process
    template.close()
    assert not is_running(process)


@pytest.mark.nightly
def test_a_row_that_a_template_never_ends_with_is_named():
    endless = "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = TemplateProcess(endless + "{% endif %}{{ messages | length }}", {}, [])
    given = [("first", Conversation(TURNS)), ("second", Conversation(TURNS, [{}]))]
    with pytest.raises(ConfigError, match="second: the chat template did not end"):
        template.write(given)


def test_it_ends_when_its_owner_is_gone():
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        template = TemplateProcess(BUILT_IN["chatml"], {}, [])
        os.write(writing, str(template._process).encode())
        os._exit(0)  # as if killed: nothing is cleaned up
    process = int(os.read(reading, 100))
    os.waitpid(owner, 0)
    os.close(reading)
    os.close(writing)
    deadline = time.monotonic() + 300
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process)


def test_it_ends_when_its_failure_cannot_be_printed(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("the terminal is gone")

    owner = os.getpid()
    monkeypatch.setattr(template_process, "_serve", fail)
    monkeypatch.setattr(template_process.traceback, "print_exc", fail)
    try:
        with pytest.raises(DataError, match=r"ended unexpectedly \(code 1\)"):
            TemplateProcess(BUILT_IN["chatml"], {}, [])
    finally:
        if os.getpid() != owner:  # the child went on in place of its owner
            os._exit(2)
