"""Finds a recipe's chat template, renders conversations, and locates the assistant's answers in their text.

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
from pipeline.data.chat_layouts import ASSISTANT, Conversation, Spans, count_common_prefix
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
SPECIAL_TOKENS = {"chatml": ("<|im_start|>", "<|im_end|>")}  # of the built-in templates
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Marks around a special token in a conversation's content, which is encoded as plain text. Valid text has no
# single halves of surrogate pairs, so the marks never occur in a conversation.
QUOTE_BEGIN = "\ud800"
QUOTE_END = "\ud801"
# Mark that a template writes as {{ divide }}; the texts before and after it are tokenised separately.
DIVIDE = "\ud806"
# A tag at the end of a generation prompt belongs to the answer: the model decides whether to reason.
REASONING_TAGS = re.compile(r"<think>|<thinking>|<thought>|<reasoning>|\[THINK\]")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # names of the same field
MAX_PROBE_CHARACTERS = 1 << 20  # written for one or two questions; searching more text takes seconds
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
_ANSWER: dict[str, Any] = {"role": ASSISTANT, "content": "!"}
# Exceptions that, raised while a template runs, are errors of the template.
TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


def find_template(config: ConversationsConfig, tokenizer_template: str | dict[str, str] | None) -> str:
    """Return the Jinja text of the recipe's template: a built-in one, a file, or the tokenizer's.

    Args:
        config: The recipe's data section.
        tokenizer_template: The tokenizer's template, its templates by name, or `None` if it has none.

    Raises:
        DataError: There is no template, or the file cannot be read.
        ConfigError: jinja2 is not installed.
    """
    require_package("jinja2", "the chat template")  # checked here, before a tokenizer is trained
    name = config.chat_template
    if name is None:
        template = tokenizer_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            which = config.tokenizer.pretrained or "trained on the data"
            raise DataError(
                f"the tokenizer ({which}) has no chat template; "
                "set data.chat_template: chatml, or a file with a Jinja template"
            )
        return str(template)
    if name in BUILT_IN:
        return BUILT_IN[name]
    try:
        return read_regular_file(Path(name).expanduser(), MAX_CONFIGURATION_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        built_in = ", ".join(BUILT_IN)
        raise DataError(
            f"data.chat_template: {name} cannot be read: {reason}; set it to a file, or to a built-in "
            f"template ({built_in})"
        ) from None


def get_special_tokens(config: ConversationsConfig) -> tuple[str, ...]:
    """Return the special tokens of a built-in template; no tokens for any other template.

    A tokenizer that is trained for the recipe needs them, or it would split the template's markers.
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
        self._has_generation_tags = GENERATION_TAG.search(text) is not None
        either = "|".join(map(re.escape, special_tokens)) or "(?!)"
        self._escaped_mark = re.compile(rf"\\+ud800({either})\\+ud801")
        try:
            self._marked = MarkedTemplate(text, variables, self._restore_marks)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}; correct the "
                "template"
            ) from None
        self._content_is_list = self._takes_content_as_list()
        self._arguments_are_text = self._takes_arguments_as_text()
        self._header = self._find_header()
        self.turn_stop = self._find_turn_stop()

    def _takes_content_as_list(self) -> bool:
        """Return whether the template reads content only as a list of pieces, as for vision models."""
        text = "probe"
        contents: tuple[Any, ...] = (text, [{"type": "text", "text": text}])
        for content in contents:
            rendered = self._render_probe([{"role": "user", "content": content}])
            if rendered is not None and text in rendered.text:
                return isinstance(content, list)
        return False

    def _takes_arguments_as_text(self) -> bool:
        """Return whether the template writes a call's arguments unchanged, and so needs them as JSON text."""
        arguments = {"key": "value"}
        texts = []
        for value in (arguments, json.dumps(arguments)):
            call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": value}}
            turns = [*_QUESTION, {"role": ASSISTANT, "content": "", "tool_calls": [call]}]
            turns.append({"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": "!"})
            rendered = self._render_probe(turns)
            texts.append("" if rendered is None else rendered.text)
        from_object, from_text = texts
        if not from_object:  # the template raised an error
            return "value" in from_text
        is_text_unchanged = json.dumps(arguments) in from_text
        is_object_misprinted = "value" not in from_object or str(arguments) in from_object
        return is_text_unchanged and is_object_misprinted

    def _adapt_turns(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return turns in the form that this template expects."""
        if not (self._content_is_list or self._arguments_are_text):
            return turns
        return [self._adapt_turn(turn) for turn in turns]

    def _adapt_turn(self, turn: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if self._content_is_list and isinstance(turn["content"], str):
            changes["content"] = [{"type": "text", "text": turn["content"]}]
        if self._arguments_are_text and turn.get("tool_calls"):
            changes["tool_calls"] = [_convert_arguments_to_text(call) for call in turn["tool_calls"]]
        return {**turn, **changes}

    def _find_header(self) -> str:
        """Return the text before an answer; empty if the template has no generation prompt.

        The header is the generation prompt up to an opening tag of reasoning, which belongs to the answer.
        """
        question = self._adapt_turns(_QUESTION)
        with_prompt = self._render_probe(question, prompt=True)
        without_prompt = self._render_probe(question)
        if with_prompt is None or without_prompt is None:
            return ""
        prompt = with_prompt.tail.removeprefix(without_prompt.tail)
        return REASONING_TAGS.split(prompt)[0]

    def _find_turn_stop(self) -> str | None:
        """Return the special token that begins a user's turn, if the assistant's turn has no end token."""
        rendered = self._render_probe(self._adapt_turns([*_QUESTION, _ANSWER, *_QUESTION, _ANSWER]))
        if rendered is None or not rendered.spans[1] or not rendered.spans[2]:
            return None
        _, answer_end = rendered.spans[1][-1]
        start, end = rendered.spans[2][0]
        if answer_end != start or rendered.text[:answer_end].rstrip().endswith(self._special_tokens):
            return None
        opening = rendered.text[start:end]
        return next((token for token in self._special_tokens if opening.startswith(token)), None)

    def _render_probe(self, turns: list[dict[str, Any]], prompt: bool = False) -> RenderedTurns | None:
        """Render a short conversation; return `None` if the template raises an error or writes too much."""
        from jinja2 import TemplateError

        try:
            return self._render(turns, prompt=prompt, max_characters=MAX_PROBE_CHARACTERS)
        except (TemplateError, *TEMPLATE_ERRORS):
            return None

    def _render(
        self,
        turns: list[dict[str, Any]],
        tools: Any = None,
        prompt: bool = False,
        max_characters: int | None = None,
    ) -> RenderedTurns:
        messages = [_copy_reasoning(turn) for turn in turns]
        return self._marked.render(messages, tools, prompt=prompt, max_characters=max_characters)

    def _restore_marks(self, text: str) -> str:
        """Restore marks around special tokens that Python escaped when the template printed a list."""
        return self._escaped_mark.sub(f"{QUOTE_BEGIN}\\1{QUOTE_END}", text) if "ud800" in text else text

    def _write_turns(
        self, turns: list[dict[str, Any]], tools: Any, prompt: bool, find_generation: bool
    ) -> tuple[str, Spans]:
        """Return the text of turns, as transformers renders it, and the spans inside of `{% generation %}`.

        There are no spans unless `find_generation` is set.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[turns],
            tools=tools,
            chat_template=self._text,
            return_assistant_tokens_mask=find_generation,
            add_generation_prompt=prompt,
            **self._variables,
        )
        return texts[0], spans[0] if find_generation else []

    def write(self, where: str, conversation: Conversation, prompt: bool = False) -> str:
        """Return the conversation as text, up to the start of the next answer if `prompt` is set.

        Raises:
            DataError: The template raises an error.
        """
        from jinja2 import TemplateError

        try:
            turns = self._adapt_turns(conversation.turns)
            text, _ = self._write_turns(turns, conversation.tools, prompt, find_generation=False)
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            reason = " ".join(str(error).split())
            raise DataError(f"{where}: the chat template refuses the conversation: {reason}") from None
        return self._restore_marks(text)

    def find_answers(self, where: str, conversation: Conversation, text: str) -> list[Spans]:
        """Return the positions of the assistant's answers in `text`, the result of `write`.

        An answer is the text of its turn after the turn's header, or the part that the template marks with
        `{% generation %}`. If a turn has no end token, the token that begins the next turn ends it.

        Args:
            where: File and line, for messages.
            conversation: Conversation that was passed to `write`.
            text: Text that `write` returned.

        Returns:
            Spans of `text` for each answer of the conversation; empty for an answer that is not written.

        Raises:
            ConfigError: The answers cannot be located. This is not a DataError, because the fault is in the
                template, and skipping rows would hide it.
        """
        from jinja2 import TemplateError

        answers: list[Spans] = []
        try:
            turns = self._adapt_turns(conversation.turns)
            rendered = self._render(turns, conversation.tools)
            # If the texts differ, the positions in one are not those in the other: no answer is located.
            if rendered.text == text and self._has_generation_tags:
                tagged_text, spans = self._write_turns(turns, conversation.tools, False, find_generation=True)
                if tagged_text == text:
                    answers = _group_by_answer(spans, rendered.spans, conversation.answers)
            elif rendered.text == text:
                numbers = conversation.answers
                answers = [self._strip_header(text, rendered.spans[number]) for number in numbers]
        except (TemplateError, *TEMPLATE_ERRORS):
            answers = []
        if not any(answers):
            raise ConfigError(
                f"{where}: the chat template does not show which part of its text is the assistant's answer; "
                "put {% generation %} and {% endgeneration %} around the answer in a copy of the template, "
                "and set data.chat_template to its file, or set data.learn_from: all"
            )
        return answers

    def _strip_header(self, text: str, turn: Spans) -> Spans:
        """Return the spans of a turn without its header, and with the token that ends the turn."""
        if not turn:
            return []
        (start, end), *others = turn
        start += self._count_header_characters(text[start:end])
        spans = [span for span in ((start, end), *others) if span[0] < span[1]]
        if self.turn_stop and spans:
            start, end = spans[-1]
            next_token = next((token for token in self._special_tokens if text.startswith(token, end)), "")
            spans[-1] = (start, end + len(next_token))
        return spans

    def _count_header_characters(self, turn: str) -> int:
        """Return the number of characters in an assistant's turn that precede its answer."""
        place = turn.find(self._header)
        if place >= 0 and not self._remove_special_tokens(turn[:place]).strip():
            return place + len(self._header)
        # Only a part of the header was written: up to a space or a special token in it.
        length = count_common_prefix(turn, self._header)
        while length and not (turn[length - 1].isspace() or turn[:length].endswith(self._special_tokens)):
            length -= 1
        return length

    def _remove_special_tokens(self, text: str) -> str:
        for token in self._special_tokens:
            text = text.replace(token, "")
        return text


def _convert_arguments_to_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _copy_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a turn with its reasoning under each name that templates read, as in transformers."""
    names = (name for name in REASONING_FIELDS if turn.get(name) is not None)
    reasoning = next((turn[name] for name in names), None)
    if reasoning is None:
        return dict(turn)
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _group_by_answer(spans: Spans, turns: list[Spans], answers: list[int]) -> list[Spans]:
    """Return the spans of each answer.

    If the last turn is an answer, a span after all turns belongs to it.

    Args:
        spans: Spans of text inside of `{% generation %}`.
        turns: Spans of each turn of the conversation.
        answers: Numbers of the turns that are answers, in order.

    Raises:
        ValueError: A span belongs to no answer.
    """
    by_answer: list[Spans] = [[] for _ in answers]
    last_end = max((turn[-1][1] for turn in turns if turn), default=0)
    for start, end in spans:
        containing = (n for n, turn in enumerate(turns) if turn and turn[0][0] <= start < turn[-1][1])
        number = next(containing, -1)
        is_after_all_turns = number < 0 and start >= last_end
        if is_after_all_turns and answers[-1] == len(turns) - 1:
            number = answers[-1]
        if start < end:
            by_answer[answers.index(number)].append((start, end))
    return by_answer
