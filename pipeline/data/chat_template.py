"""Chat templates: finds a recipe's template, renders conversations, and locates the assistant's answers.

This module works on text, not on tokens. An answer begins after the generation prompt and ends with its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import ConversationsConfig
from pipeline.config.optional_packages import require_package
from pipeline.data.chat_layouts import ASSISTANT, Conversation, Spans, common_prefix_length
from pipeline.errors import ConfigError, DataError
from pipeline.files import MAX_CONFIGURATION_BYTES, read_regular_file

if TYPE_CHECKING:
    from pipeline.data.template_turns import RenderedTurns

BUILT_IN = {
    "chatml": "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
}
SPECIAL_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Marks around a special token that is part of a conversation's content. Valid text has no single halves of
# surrogate pairs, so they never occur in a conversation.
BEGIN = "\ud800"
END = "\ud801"
DIVIDE = (
    "\ud806"  # the text before and after it is tokenised separately; a template writes it as {{ divide }}
)
# One of these at the end of a generation prompt belongs to the answer: the model decides whether to think.
THINKING = re.compile(r"<think>|<thinking>|<thought>|<reasoning>|\[THINK\]")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # synonyms
LONGEST_PROBE = 1 << 20  # characters for a question or two; searching longer text takes seconds
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
_ANSWER: dict[str, Any] = {"role": ASSISTANT, "content": "!"}
# Any of these exceptions inside of a template is an error of the template.
FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


def find_template(config: ConversationsConfig, own: str | dict[str, str] | None) -> str:
    """Return the Jinja text of the recipe's template: a built-in one, a file, or the tokenizer's own.

    Args:
        config: The recipe's data section.
        own: The tokenizer's template, its templates by name, or `None`.

    Raises:
        DataError: There is no template, or the file cannot be read.
        ConfigError: jinja2 is not installed.
    """
    require_package("jinja2", "the chat template")  # before a tokenizer is trained
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
        return read_regular_file(Path(given).expanduser(), MAX_CONFIGURATION_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        known = ", ".join(BUILT_IN)
        raise DataError(
            f"data.chat_template: {given} cannot be read: {reason}; give a file, or a built-in one ({known})"
        ) from None


def get_special_tokens(config: ConversationsConfig) -> tuple[str, ...]:
    """Return the special tokens of the recipe's template.

    A tokenizer that is trained for the recipe needs them; without them it would split the template's markers.
    """
    return SPECIAL_TOKENS.get(config.chat_template or "", ())


class ChatTemplate:
    """Renders conversations as text with a chat template.

    Args:
        text: Jinja text of the template.
        variables: Further variables that the template may read, such as `bos_token`.
        special_tokens: Special tokens that may end a turn.

    Attributes:
        turn_stop: Special token that begins a user's turn, if an assistant's turn has no end token of its
            own. The model then ends its turn with that token. `None` if a turn has an end token, or ends with
            the document.

    Raises:
        DataError: The text is not valid Jinja.
    """

    def __init__(self, text: str, variables: dict[str, Any], special_tokens: Sequence[str]) -> None:
        from jinja2 import TemplateSyntaxError

        from pipeline.data.template_turns import MarkedTemplate  # needs jinja2, which is optional

        self._text = text
        self._variables = variables
        self._special_tokens = tuple(special_tokens)
        self._has_marks = MARKS_ANSWERS.search(text) is not None
        either = "|".join(map(re.escape, special_tokens)) or "(?!)"
        self._escaped_mark = re.compile(rf"\\+ud800({either})\\+ud801")
        try:
            self._marked = MarkedTemplate(text, variables, self._restore_marks)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is no Jinja: line {error.lineno}: {error.message}; correct the template"
            ) from None
        self._content_is_list = self._takes_content_as_list()
        self._arguments_are_text = self._takes_arguments_as_text()
        self._header = self._find_header()
        self.turn_stop = self._find_turn_stop()

    def _takes_content_as_list(self) -> bool:
        """Return whether the template reads content as a list of pieces, as those of vision models do."""
        text = "probe"
        for is_list in (False, True):
            rendered = self._try(
                [{"role": "user", "content": [{"type": "text", "text": text}] if is_list else text}]
            )
            if rendered is not None and text in rendered.text:
                return is_list
        return False

    def _takes_arguments_as_text(self) -> bool:
        """Return whether the template writes a call's arguments unchanged, and so needs them as JSON."""
        arguments = {"key": "value"}
        written = []
        for value in (arguments, json.dumps(arguments)):
            call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": value}}
            turns = [*_QUESTION, {"role": ASSISTANT, "content": "", "tool_calls": [call]}]
            turns.append({"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "!"})
            rendered = self._try(turns)
            written.append("" if rendered is None else rendered.text)
        as_object, as_text = written
        if not as_object:  # the template raised an error
            return "value" in as_text
        return json.dumps(arguments) in as_text and ("value" not in as_object or str(arguments) in as_object)

    def _adapt_turns(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return turns in the form that this template expects."""
        return (
            [self._adapt_turn(turn) for turn in turns]
            if self._content_is_list or self._arguments_are_text
            else turns
        )

    def _adapt_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self._content_is_list and isinstance(turn["content"], str):
            changes["content"] = [{"type": "text", "text": turn["content"]}]
        if self._arguments_are_text and turn.get("tool_calls"):
            changes["tool_calls"] = [_with_arguments_as_text(call) for call in turn["tool_calls"]]
        return {**turn, **changes}

    def _find_header(self) -> str:
        """Return the text before an answer; empty if the template has no generation prompt.

        It is the generation prompt up to an opening tag of reasoning, which belongs to the answer.
        """
        question = self._adapt_turns(_QUESTION)
        rendered = [self._try(question, prompt=True), self._try(question)]
        if rendered[0] is None or rendered[1] is None:
            return ""
        prompt = rendered[0].tail.removeprefix(rendered[1].tail)
        return THINKING.split(prompt)[0]

    def _find_turn_stop(self) -> str | None:
        """Return the special token that begins a user's turn if nothing else ends the assistant's turn."""
        rendered = self._try(self._adapt_turns([*_QUESTION, _ANSWER, *_QUESTION, _ANSWER]))
        if rendered is None or not rendered.spans[1] or not rendered.spans[2]:
            return None
        _, answer_end = rendered.spans[1][-1]
        start, end = rendered.spans[2][0]
        if answer_end != start or rendered.text[:answer_end].rstrip().endswith(self._special_tokens):
            return None
        opening = rendered.text[start:end]
        return next((token for token in self._special_tokens if opening.startswith(token)), None)

    def _try(self, turns: list[dict[str, Any]], prompt: bool = False) -> RenderedTurns | None:
        """Render a short conversation; return `None` if the template raises an error or writes too much."""
        from jinja2 import TemplateError

        try:
            return self._render(turns, prompt=prompt, longest=LONGEST_PROBE)
        except (TemplateError, *FAULTS):
            return None

    def _render(
        self,
        turns: list[dict[str, Any]],
        tools: Any = None,
        prompt: bool = False,
        longest: int | None = None,
    ) -> RenderedTurns:
        given = [_with_reasoning(turn) for turn in turns]
        return self._marked.render(given, tools, prompt=prompt, longest=longest)

    def _restore_marks(self, text: str) -> str:
        """Restore marks around special tokens that Python escaped when the template printed a list."""
        return self._escaped_mark.sub(f"{BEGIN}\\1{END}", text) if "ud800" in text else text

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
        """Return the conversation as text.

        Raises:
            DataError: The template raises an error.
        """
        return self._render_text(f"{where}: the chat template refuses the conversation", conversation)

    def write_question(self, question: str) -> str:
        """Return a user's question as text, including the generation prompt.

        Raises:
            DataError: The template raises an error.
        """
        asked = Conversation([{"role": "user", "content": question}])
        return self._render_text("the chat template refuses the question", asked, prompt=True)

    def _render_text(self, refusal: str, conversation: Conversation, prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            turns = self._adapt_turns(conversation.turns)
            text, _ = self._write_marked(turns, conversation.tools, prompt, marks=False)
        except (TemplateError, *FAULTS) as error:
            raise DataError(f"{refusal}: {' '.join(str(error).split())}") from None
        return self._restore_marks(text)

    def find_answers(self, where: str, conversation: Conversation, text: str) -> list[Spans]:
        """Return the positions of the assistant's answers in `text`, the result of `write`.

        An answer is the text of its turn after the turn's header, or the part that the template marks with
        `{% generation %}`. If a turn has no end token, the token that begins the next turn ends it.

        Returns:
            Spans of `text` for each answer of the conversation; empty for an answer that is not written.

        Raises:
            ConfigError: The answers cannot be located. This is no DataError, because the template is to blame
                and no row may be skipped for it.
        """
        from jinja2 import TemplateError

        found: list[Spans] = []
        try:
            given = self._adapt_turns(conversation.turns)
            rendered = self._render(given, conversation.tools)
            if rendered.text == text:
                turns = [rendered.spans[number] for number in conversation.answers]
                if self._has_marks:
                    same, marks = self._write_marked(given, conversation.tools, False, marks=True)
                    if same == text:
                        found = _group_by_answer(marks, rendered.spans, conversation.answers)
                else:
                    found = [self._strip_header(text, own) for own in turns]
        except (TemplateError, *FAULTS):
            found = []
        if not any(found):
            raise ConfigError(
                f"{where}: the chat template does not show which of its text the assistant says; "
                "mark that with {% generation %} and {% endgeneration %} in a copy of the template, and set "
                "data.chat_template to its file, or set data.learn_from: all"
            )
        return found

    def _strip_header(self, text: str, turn: Spans) -> Spans:
        """Return the spans of a turn without its header."""
        if not turn:
            return []
        (start, end), *others = turn
        start += self._header_length(text[start:end])
        spans = [span for span in ((start, end), *others) if span[0] < span[1]]
        if self.turn_stop and spans:
            start, end = spans[-1]
            behind = next((token for token in self._special_tokens if text.startswith(token, end)), "")
            spans[-1] = (start, end + len(behind))
        return spans

    def _header_length(self, turn: str) -> int:
        """Return the number of characters in an assistant's turn that precede its answer."""
        place = turn.find(self._header)
        if place >= 0 and not self._without_special_tokens(turn[:place]).strip():
            return place + len(self._header)
        shared = common_prefix_length(turn, self._header)
        while shared and not (turn[shared - 1].isspace() or turn[:shared].endswith(self._special_tokens)):
            shared -= 1
        return shared

    def _without_special_tokens(self, text: str) -> str:
        for token in self._special_tokens:
            text = text.replace(token, "")
        return text


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Copy a turn with its reasoning under each name that templates read, as transformers does."""
    names = (name for name in REASONING_FIELDS if turn.get(name) is not None)
    reasoning = next((turn[name] for name in names), None)
    return (
        dict(turn) if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    )


def _group_by_answer(marks: Spans, turns: list[Spans], answers: list[int]) -> list[Spans]:
    """Return the marked spans of each answer.

    A span after all turns belongs to the last answer.

    Raises:
        ValueError: A span belongs to no answer.
    """
    found: list[Spans] = [[] for _ in answers]
    last_end = max((turn[-1][1] for turn in turns if turn), default=0)
    for start, end in marks:
        owner = next((n for n, turn in enumerate(turns) if turn and turn[0][0] <= start < turn[-1][1]), None)
        if owner is None and start >= last_end and answers[-1] == len(turns) - 1:
            owner = answers[-1]
        if start < end:
            found[answers.index(-1 if owner is None else owner)].append((start, end))
    return found
