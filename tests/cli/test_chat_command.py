"""`chat` in a pipe and in a terminal, with models whose answers are known."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.launch import ROOT, make_environment
from support.scripted_model import TEMPLATE, write_scripted_model
from support.terminal import TerminalProgram

from pipeline.__main__ import main
from pipeline.cli.chat import ReasoningDimmer

pytestmark = pytest.mark.slow

# The last character of a message decides the answer; see write_scripted_model.
SCRIPTS = [
    "1ok 😀!<|end|>",
    "2<think>hm,\n</think>yes<|end|>",
    "3vwvwvw",  # never ends
    *("4A<|end|>", "4B<|end|>", "4C<|end|>", "4D<|end|>", "4E<|end|>"),
    "5\x1b[<|end|>",
]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder):
    return write_scripted_model(folder / "talker", SCRIPTS)


@pytest.fixture(scope="module")
def base(folder):
    return write_scripted_model(folder / "base", ["x dog."], chat_template=None)


@pytest.fixture
def chat(capsys, monkeypatch):
    """`chat(model, lines, ...)` -> (exit code, stdout, stderr without progress bars), in this process."""

    def function(model, lines, *arguments):
        data = lines if isinstance(lines, bytes) else lines.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        capsys.readouterr()
        code = main(["chat", str(model), *map(str, arguments)])
        out, errors = capsys.readouterr()
        lines = [line for line in errors.splitlines() if line.startswith(("error:", "note:", "warning:"))]
        return code, out, lines

    return function


def test_a_pipe_gets_the_answers_alone(model):
    words = [sys.executable, "-m", "pipeline", "chat", str(model), "--temperature", "0"]
    done = subprocess.run(
        words, input=b"say 1\n\nand 2\n", capture_output=True, check=False, cwd=ROOT, env=make_environment()
    )
    assert (done.returncode, done.stdout.decode()) == (0, "ok 😀!\n<think>hm,\n</think>yes\n"), done.stderr


def test_ctrl_c_in_a_pipe_ends_the_program(model):
    words = [sys.executable, "-m", "pipeline", "chat", str(model), "--max-new-tokens", "4000"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=make_environment()
    ) as program:
        program.stdin.write(b"3\n3\n")
        program.stdin.flush()
        assert program.stdout.read(4) == b"vwvw"
        program.send_signal(signal.SIGINT)
        assert program.wait(120) == 130


def test_each_line_is_a_message_and_a_backslash_continues_it(model, chat):
    assert chat(model, "1\n") == (0, "ok 😀!\n", [])
    assert chat(model, "1\r\n1") == (0, "ok 😀!\nok 😀!\n", [])
    assert chat(model, "1\\\n2\n") == (0, "<think>hm,\n</think>yes\n", [])
    assert chat(model, "1\\") == (0, "ok 😀!\n", [])
    assert chat(model, "") == chat(model, "\n \n") == (0, "", [])
    assert chat(model, "/reset 1\n/1") == (0, "ok 😀!\nok 😀!\n", [])  # text, since there is no terminal


def test_the_same_seed_gives_the_same_conversation(model, chat):
    lines = "4\n" * 12

    def talk(*arguments):
        code, out, errors = chat(model, lines, *arguments)
        assert (code, errors) == (0, [])
        return out

    assert talk("--seed", 1) == talk("--seed", 1) != talk("--seed", 2)
    assert set(talk("--seed", 3).split()) > {talk("--temperature", 0)[0]}
    assert talk("--top-k", 1) == talk("--top-p", "1e-9") == "A\n" * 12
    assert talk("--system", "Be kind.") == talk("--system", "Be kind.")


def test_an_answer_ends_at_a_stop_text_or_after_its_tokens(model, chat):
    assert chat(model, "1", "--stop", " ", "--stop", "x") == (0, "ok\n", [])
    note = "note: the answer was cut after 5 tokens"
    assert chat(model, "3", "--max-new-tokens", 5) == (0, "vwvwv\n", [note])
    assert chat(model, "1", "--max-new-tokens", 4)[1] == "ok �\n"  # the text ends inside of the emoji


def test_a_terminal_code_is_not_obeyed(model, chat):
    assert chat(model, "5") == (0, "\\x1b[\n", [])


def test_a_base_model_continues_each_line(base, chat):
    assert chat(base, "the x\nx\n", "--temperature", 0) == (0, " dog.\n dog.\n", [])
    assert chat(base, "x", "--temperature", 0, "--max-new-tokens", 2) == (0, " d\n", [])
    code, out, (error,) = chat(base, "x" * 4096)
    assert (code, out) == (2, "")
    assert error.startswith("error: the prompt has 4,096 tokens, and the model takes 4,096 together")


def test_the_oldest_messages_are_left_out_of_a_long_conversation(folder, chat):
    small = write_scripted_model(folder / "small", SCRIPTS, max_positions=64)
    lines = "".join("h" * length + "1\n" for length in range(20))
    code, out, errors = chat(small, lines, "--system", "Be kind.", "--temperature", 0)
    assert (code, out) == (0, "ok 😀!\n" * 20)  # each has room for its answer
    (note,) = errors
    assert note.startswith("note: the conversation is longer than the model's 64 positions: its oldest ")
    code, out, errors = chat(small, "1\n" + "word " * 20 + "1\n")
    assert (code, out, len(errors)) == (2, "ok 😀!\n", 1)
    assert errors[0].startswith("error: the prompt has 102 tokens, and the model takes 64 together with")


@pytest.mark.parametrize(
    ("arguments", "lines", "message"),
    [
        (["--temperature", "-1"], "1", "error: --temperature is -1.0; give 0, or a number"),
        (["--max-new-tokens", "0"], "1", "error: --max-new-tokens is 0; give 1 or more"),
        (["--stop", ""], "1", "error: a stop string is empty; give it one character or more"),
        (["--step", "7"], "1", "error: --step 7: "),
        ([], b"a\xff1", "error: message: not UTF-8; set the terminal to UTF-8 (LANG=C.UTF-8)"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(model, chat, arguments, lines, message):
    code, out, errors = chat(model, lines, *arguments)
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith(message)


def test_a_system_message_that_is_not_written_is_refused(folder, base, chat):
    refusing = write_scripted_model(folder / "refusing", SCRIPTS, NO_SYSTEM + TEMPLATE)
    assert chat(refusing, "1") == (0, "ok 😀!\n", [])
    code, out, (error,) = chat(refusing, "1", "--system", "Be kind.")
    assert (code, out) == (2, "")
    assert error == "error: messages: the chat template refuses the conversation: no system role"
    code, out, (error,) = chat(base, "1", "--system", "Be kind.")
    assert (code, out) == (2, "")
    assert error == "error: a model without a chat template takes no system message; leave it out"


def test_a_prompt_that_begins_the_reasoning(folder, chat):
    prefill = "{% if add_generation_prompt %}<think>{% endif %}"
    thinking = write_scripted_model(folder / "thinking", ["<think>so</think>.<|end|>"], TEMPLATE + prefill)
    assert chat(thinking, "why\nwhy", "--temperature", 0) == (0, "<think>so</think>.\n" * 2, [])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_reasoning_is_dimmed_however_its_tags_are_cut(size):
    text = "a <b> [c <think>x < y <think> z</think> </think> [THINK]w[/THINK]</th <thinking>open"
    dimmer = ReasoningDimmer()
    parts = [dimmer.push(text[start : start + size]) for start in range(0, len(text), size)]
    assert "".join([*parts, dimmer.push("", is_end=True)]) == (
        "a <b> [c \x1b[2m<think>x < y <think> z</think>\x1b[22m </think> \x1b[2m[THINK]w[/THINK]\x1b[22m</th "
        "\x1b[2m<thinking>open\x1b[22m"
    )


@pytest.fixture
def open_terminal():
    """`open_terminal(model, ..., NAME=value)` starts a conversation in a terminal, up to its prompt."""
    programs = []

    def function(model, *arguments, **extra):
        environment = {key: value for key, value in make_environment().items() if key != "NO_COLOR"}
        words = ["-m", "pipeline", "chat", str(model), *arguments]
        terminal = TerminalProgram(words, environment | {"TERM": "xterm-256color"} | extra)
        programs.append(terminal)
        terminal.banner = read_to_prompt(terminal)
        return terminal

    yield function
    for program in programs:
        program.close()


def read_to_prompt(terminal):
    shown = terminal.read_to("> ").removesuffix("> ")
    while shown and not shown.endswith(("\n", READLINE_BEGINS)):
        shown += terminal.read_to("> ").removesuffix("> ")
    return re.sub(r"\x1b\[\?2004[hl]\r?", "", shown).strip("\r\n")


READLINE_BEGINS = "\x1b[?2004h"  # readline asks the terminal to mark text that is pasted


def say(terminal, line):
    """Return what is shown after a line, up to the next prompt."""
    terminal.type(line + "\n")
    terminal.read_to(line + "\r\n")  # the terminal's echo
    return read_to_prompt(terminal)


def interrupt_input(terminal):
    time.sleep(1)  # a signal before Python waits for a key is handled after the next key
    terminal.type("\x03")


def test_commands(model, open_terminal, tmp_path):
    terminal = open_terminal(model, "--temperature", "0")
    assert terminal.banner == "talker, float32 on cpu; Ctrl-D ends, /help lists commands"
    assert say(terminal, "/regenerate") == "error: /regenerate: there is no answer yet; write a message"
    assert say(terminal, "/save a.json") == "error: /save: there is no message yet"
    assert say(terminal, "1") == "ok 😀!"
    file = tmp_path / "talk.json"
    assert say(terminal, f"/save {file}") == f"saved 2 messages to {file}"
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "ok 😀!"}]
    assert json.loads(file.read_text()) == {"messages": talk}
    assert say(terminal, "/system Be kind.") == ""
    assert say(terminal, " /1") == "ok 😀!"
    assert say(terminal, f"/save {file}") == f"saved 5 messages to {file}"
    asked = [{"role": "user", "content": " /1"}, talk[1]]
    assert json.loads(file.read_text())["messages"] == [
        {"role": "system", "content": "Be kind."},
        *talk,
        *asked,
    ]
    other = tmp_path / "other.json"
    other.write_text("precious")
    assert say(terminal, f"/save {other}") == f"error: /save: {other} exists; choose another name"
    assert other.read_text() == "precious"
    missing = tmp_path / "no" / "a"
    assert say(terminal, f"/save {missing}") == f"error: /save: {missing}: No such file or directory"
    assert say(terminal, "/save") == "error: /save: name a file, such as /save talk.json"
    assert say(terminal, "/resett") == 'error: /resett is no command (did you mean "/reset"?)'
    assert say(terminal, "/xyz").startswith("error: /xyz is no command (valid: /help, /quit, ")
    assert say(terminal, "/help").count("\n") == 5
    assert say(terminal, "/reset") == say(terminal, "") == ""
    assert say(terminal, "/regenerate").startswith("error: /regenerate: there is no answer yet")
    terminal.type("4\\\n")
    assert "... " in terminal.read_to("... ")
    assert say(terminal, "1") == "ok 😀!"
    terminal.type("/quit\n")
    assert terminal.wait() == 0


def test_an_answer_is_generated_again_from_another_sample(model, open_terminal):
    terminal = open_terminal(model)
    first = [say(terminal, "4"), *(say(terminal, "/regenerate") for _ in range(7))]
    assert set(first) <= set("ABCDE")
    assert len(set(first)) > 1
    assert say(terminal, "/reset") == ""
    assert [say(terminal, "4"), *(say(terminal, "/regenerate") for _ in range(7))] == first


def test_ctrl_c_stops_the_answer_and_then_the_program(model, open_terminal, tmp_path):
    terminal = open_terminal(model, "--temperature", "0", "--max-new-tokens", "4000")
    terminal.type("3\n")
    terminal.read_to("vwvwvwvwvw")
    terminal.type("\x03")
    note = "note: stopped; the conversation has the answer up to here"
    assert re.fullmatch(rf"(vw)*v?\^C\n{note}", read_to_prompt(terminal))
    assert say(terminal, "1") == "ok 😀!"
    file = tmp_path / "talk.json"
    assert say(terminal, f"/save {file}") == f"saved 4 messages to {file}"
    assert re.fullmatch("(vw)+v?", json.loads(file.read_text())["messages"][1]["content"])
    terminal.type("not sent")
    interrupt_input(terminal)
    terminal.read_to("Ctrl-C again or Ctrl-D ends")
    terminal.read_to("> ")
    assert say(terminal, "1") == "ok 😀!"
    interrupt_input(terminal)
    terminal.read_to("Ctrl-C again or Ctrl-D ends")
    terminal.read_to("> ")
    interrupt_input(terminal)
    assert terminal.wait() == 130


def test_reasoning_is_dimmed_but_not_without_colour(model, open_terminal):
    terminal = open_terminal(model, "--temperature", "0")
    assert say(terminal, "2") == "\x1b[2m<think>hm,\n</think>\x1b[22myes"
    terminal.type("\x04")
    assert terminal.wait() == 0
    terminal = open_terminal(model, "--temperature", "0", NO_COLOR="1")
    assert say(terminal, "2") == "<think>hm,\n</think>yes"


def test_a_base_model_in_a_terminal(base, open_terminal):
    terminal = open_terminal(base, "--temperature", "0")
    assert terminal.banner.endswith("\nthis model has no chat template: it continues each line")
    assert say(terminal, "x") == " dog."
    assert say(terminal, "/system Be kind.").startswith(
        "error: a model without a chat template takes no system"
    )


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_screen_of_tmux(model, tmp_path):
    tmux = ["tmux", "-S", str(tmp_path / "socket")]
    words = [sys.executable, "-m", "pipeline", "chat", str(model), "--temperature", "0"]
    environment = make_environment(PYTHONPATH=str(ROOT))

    def screen():
        return subprocess.run(
            [*tmux, "capture-pane", "-e", "-p"], capture_output=True, check=True
        ).stdout.decode()

    def wait_for(text):
        deadline = time.monotonic() + 300
        while text not in screen():
            assert time.monotonic() < deadline, screen()
            time.sleep(0.1)

    subprocess.run(
        [*tmux, "-u", "new-session", "-d", "-x", "100", "-y", "30", *words], env=environment, check=True
    )
    try:
        wait_for("/help lists commands\n>")
        for keys in (["1", "Enter"], ["2", "Enter"], ["3", "Enter"]):
            subprocess.run([*tmux, "send-keys", *keys], check=True)
        wait_for("vwvwvw")
        subprocess.run([*tmux, "send-keys", "C-c"], check=True)
        wait_for("note: stopped")
        shown = screen()
        assert "ok 😀!\n" in shown
        assert "\x1b[2m<think>hm,\n</think>\x1b[0m" in shown  # the rest of the answer is not dimmed
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
