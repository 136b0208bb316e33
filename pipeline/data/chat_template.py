"""Chat templates: which one a recipe uses, conversations written out by it, and where the assistant speaks.

Text alone: no tokens here. An answer goes from behind the generation prompt to the end of its turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.data_schema import ConversationsConfig
from pipeline.data.chat_layouts import Conversation
from pipeline.errors import ConfigError, DataError
from pipeline.foreign import CONFIGURATION, read_plain
from pipeline.optional_packages import require

Spans = list[tuple[int, int]]

BUILT_IN = {
    "chatml": "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
}
SPECIAL_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Halves of a surrogate pair cannot stand in valid text, so these are never part of a conversation.
BEGIN, END = "\ud800", "\ud801"  # around a special token in what somebody said
PLACEHOLDER = 0xDC00  # first of those that stand for a turn's content
MAX_TURNS = 1024  # there are no more of them
# Whatever goes wrong in a template is a fault of the template's.
FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


def find_template(config: ConversationsConfig, own: str | dict[str, str] | None) -> str:
    """The Jinja text of the recipe's template: built in, a file, or the tokenizer's own.

    Args:
        config: The recipe's data section.
        own: What the tokenizer brings: a template, several by name, or None.

    Raises:
        DataError: there is none, or the file cannot be read.
        ConfigError: jinja2 is not installed.
    """
    require("jinja2", "the chat template")  # before a tokenizer is trained
    given = config.chat_template
    if given is None:
        template = own.get("default") if isinstance(own, dict) else own
        if not template:
            which = config.tokenizer.pretrained or "trained on the data"
            raise DataError(
                f"the tokenizer ({which}) has no chat template; "
                "set data.chat_template: chatml, or a file with a Jinja template"
            )
        return str(template)
    if given in BUILT_IN:
        return BUILT_IN[given]
    try:
        return read_plain(Path(given).expanduser(), CONFIGURATION).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        known = ", ".join(BUILT_IN)
        raise DataError(
            f"data.chat_template: {given} cannot be read: {reason}; give a file, or a built-in one ({known})"
        ) from None


def special_tokens_of(config: ConversationsConfig) -> tuple[str, ...]:
    """Tokens that a tokenizer trained for the recipe's template needs; else they are text like any other."""
    return SPECIAL_TOKENS.get(config.chat_template or "", ())


class ChatTemplate:
    """Writes conversations out.

    Args:
        text: Jinja.
        variables: That it may read besides the conversation: `bos_token` and the like.
        special_tokens: Those that may end a turn.

    Raises:
        DataError: it is no Jinja.
    """

    def __init__(self, text: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        self._text = text
        self._variables = variables
        self._special_tokens = tuple(special_tokens)
        self._has_marks = MARKS_ANSWERS.search(text) is not None
        self._prompt = self._find_prompt()

    def _find_prompt(self) -> str:
        """What stands before an answer; empty where the template does not say."""
        from jinja2 import TemplateError, TemplateSyntaxError

        turns = [{"role": "user", "content": "?"}]
        try:
            alone, prompted = self._write(turns), self._write(turns, prompt=True)
        except TemplateSyntaxError as error:
            raise DataError(f"the chat template is no Jinja: line {error.lineno}: {error.message}") from None
        except (TemplateError, *FAULTS):
            return ""
        return prompted.removeprefix(alone) if prompted.startswith(alone) else ""

    def _write(self, turns: list[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        return self._write_marked(turns, tools, prompt, marks=False)[0]

    def _write_marked(
        self, turns: list[dict[str, Any]], tools: Any, prompt: bool, marks: bool
    ) -> tuple[str, Spans]:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[turns],
            tools=tools,
            chat_template=self._text,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self._variables,
        )
        return texts[0], spans[0] if marks else []

    def write(self, where: str, conversation: Conversation) -> str:
        """The conversation as text.

        Raises:
            DataError: the template refuses it.
        """
        from jinja2 import TemplateError

        try:
            return self._write(conversation.turns, conversation.tools)
        except (TemplateError, *FAULTS) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{where}: the chat template refuses the conversation: {reason}") from None

    def ask(self, question: str) -> str:
        """A user's question as text, up to where the assistant begins.

        Raises:
            DataError: the template refuses it.
        """
        from jinja2 import TemplateError

        try:
            return self._write([{"role": "user", "content": question}], prompt=True)
        except (TemplateError, *FAULTS) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"the chat template refuses the question: {reason}") from None

    def find_answers(self, where: str, conversation: Conversation, text: str) -> Spans:
        """Where in `text`, which `write` gave, the assistant speaks: (start, end) of each answer, in order.

        By the template's own marks, where it has `{% generation %}`. Else an answer is what the template adds
        to what stands before it. Where that changes with what follows (thoughts that are left out later),
        by placeholders; see `_by_placeholders`.

        Raises:
            ConfigError: it cannot be found out. No row is to blame, so none may be skipped for it.
        """
        from jinja2 import TemplateError

        try:
            if self._has_marks:
                spans = self._write_marked(conversation.turns, conversation.tools, False, marks=True)[1]
            else:
                spans = self._by_prefixes(conversation, text) or self._by_placeholders(conversation, text)
        except (TemplateError, *FAULTS):
            spans = []
        bounds = [bound for span in spans for bound in span]
        if not spans or bounds != sorted(bounds) or bounds[-1] > len(text):
            raise ConfigError(
                f"{where}: the chat template does not show which of its text the assistant says; "
                "mark that with {% generation %} and {% endgeneration %} in a copy of the template, and set "
                "data.chat_template to its file, or set data.learn_from: all"
            )
        return spans

    def _by_prefixes(self, conversation: Conversation, text: str) -> Spans:
        """Empty where one does not begin with the other.

        A template without a generation prompt leaves the header of the turn, if any, to the assistant to say.
        """
        spans = []
        for number in conversation.answers:
            if number == 0:  # few templates write nothing at all
                return []
            before = self._write(conversation.turns[:number], conversation.tools, prompt=True)
            after = self._write(conversation.turns[: number + 1], conversation.tools)
            if not after.startswith(before) or not text.startswith(after):
                return []
            spans.append((len(before), self._end_of_turn(text, len(before), len(after))))
        return spans

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """The end without white space behind a special token: that is no part of the turn any more."""
        said = text[start:end].rstrip()
        return start + len(said) if said.endswith(self._special_tokens) else end

    def _by_placeholders(self, conversation: Conversation, text: str) -> Spans:
        """With a placeholder for an answer, the text before and behind it shows where it is in `text`.

        With one for every turn, what stands between them is the template's own: there ends the generation
        prompt, and the answer begins. Empty where the template does not do the same with and without them.
        """
        turns, tools = conversation.turns, conversation.tools
        if len(turns) > MAX_TURNS:
            return []
        marks = [chr(PLACEHOLDER + number) for number in range(len(turns))]
        empty = [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)]
        bare = self._write(empty, tools)
        spans = []
        for number in conversation.answers:
            mark = marks[number]
            others = [*turns[:number], empty[number], *turns[number + 1 :]]
            texts = (bare, self._write(others, tools), self._write(others[: number + 1], tools))
            if any(each.count(mark) != 1 for each in texts):
                return []
            header = re.split("[\udc00-\udfff]", texts[0][: texts[0].index(mark)])[-1]
            (before, behind), (_, turn_end) = (each.split(mark) for each in texts[1:])
            if self._prompt not in header or not before.endswith(header):
                return []
            start = len(before) - len(header) + header.rindex(self._prompt) + len(self._prompt)
            if not text.startswith(before[:start]) or not text.endswith(behind):
                return []
            if not behind.startswith(turn_end):
                return []
            end = len(text) - len(behind) + len(turn_end)
            spans.append((start, self._end_of_turn(text, start, end)))
        return spans
