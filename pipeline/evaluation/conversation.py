"""Turns a conversation into the tokens of a prompt, and the tokens of an answer into text as they come."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from pipeline.data.chat_layouts import ASSISTANT, Conversation, read_conversation
from pipeline.data.chat_template import REASONING_TAGS
from pipeline.data.template_encoder import TemplateEncoder, get_template_variables
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import DataError

INCOMPLETE = "\ufffd"
"""Character that a decoder writes for bytes that are no character, or not yet."""
MESSAGES = "messages"  # location of a conversation in error messages
SYSTEM_ADVICE = "leave the system message out, or write it into the user's first message"
REASONING_OPENED = re.compile(rf"(?:{REASONING_TAGS.pattern})\s*\Z")
_PROBE = Conversation([{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}])


class ChatFormat:
    """Writes conversations in the chat template of a tokenizer, as they were written for training.

    Special tokens in a message are plain text, so no message can end its turn or begin another one.

    Args:
        tokenizer: Tokenizer of transformers with a chat template.

    Raises:
        DataError: There is no chat template, or it is not valid Jinja.
        ConfigError: The template does not end in time, or takes too much memory.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        template = tokenizer.chat_template
        if isinstance(template, dict):  # several templates by name, as transformers allows
            template = template.get("default")
        if not template:
            raise DataError(
                "the tokenizer has no chat template, so the model continues text and answers no messages"
            )
        serialized = tokenizer.backend_tokenizer.to_str()
        self._encoder = TemplateEncoder(lambda: Tokenizer.from_str(serialized))
        self._template = TemplateProcess(
            template, get_template_variables(tokenizer), self._encoder.special_tokens
        )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Return the ids of a conversation up to the start of the next answer; see `write`."""
        return self.encode(self.write(messages, tools))

    def write(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Return the text of a conversation up to the start of the next answer, with marks for `encode`.

        Args:
            messages: Messages with `role` (system, user, assistant or tool) and `content` (text).
            tools: Functions that the assistant may call; `None` if there are none.

        Raises:
            DataError: A message has an unknown role or no text, or the template refuses the conversation or
                leaves out a system message.
            ConfigError: The template does not end in time, takes too much memory, or writes too much text.
        """
        row = {"messages": list(map(dict, messages)), "tools": tools}
        conversation = self._encoder.escape(read_conversation(MESSAGES, row, "messages"))
        others = [turn for turn in conversation.turns if turn["role"] != "system"]
        without_system = None
        if len(others) < len(conversation.turns):
            without_system = self._try_write(Conversation(others, conversation.tools))
        try:
            (text,) = self._template.write([(MESSAGES, conversation, True)])
        except DataError as error:
            if without_system is None:
                raise
            reason = str(error).partition("the conversation: ")[2]
            raise DataError(
                f"the chat template refuses a system message: {reason}; {SYSTEM_ADVICE}"
            ) from None
        if text == without_system:
            raise DataError(f"the chat template does not write a system message; {SYSTEM_ADVICE}")
        return text

    def _try_write(self, conversation: Conversation) -> str | None:
        """Return the text of a conversation; `None` if the template refuses it."""
        try:
            return self._template.write([(MESSAGES, conversation, True)])[0]
        except DataError:
            return None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that `write` returned."""
        return self._encoder.encode_marked(text)[0]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Special tokens that end an answer; empty if the template writes none after an answer."""
        text = self._template.write([(MESSAGES, _PROBE)])[0]
        after_answer = text[text.rfind(_PROBE.turns[-1]["content"]) :]
        end = self._encoder.special_pattern.search(after_answer)
        tokens = [self._template.turn_stop, end[0] if end else None]
        return frozenset(i for token in tokens if token for i in self.encode(token))


def find_opened_reasoning(prompt: str) -> str:
    """Return the tag of reasoning, such as `<think>` and a line break, that ends a prompt; empty for none.

    The answer to such a prompt begins inside of the model's reasoning.
    """
    match = REASONING_OPENED.search(prompt)
    return match[0] if match else ""


class TextStream:
    """Turns the tokens of one answer into text, and returns each part of the text once it is certain.

    A part is certain if its characters are complete and no stop string can begin in it. Together, the parts
    are the decoded answer up to its first stop string. The text has no end tokens, no stop strings, and no
    special tokens other than tags of reasoning.

    A decoder's text depends on the tokens before: the first word loses its space. So each token is decoded
    after the previous ones, as by DecodeStream of the tokenizers library. If bytes of a byte fallback are no
    character, that class raises an exception, and decoding all tokens loses the characters before these
    bytes. Here such bytes are written as U+FFFD, and nothing else is.

    Args:
        tokenizer: Tokenizer of transformers.
        end_ids: Tokens that end the answer.
        stop: Strings that end the answer before their first character.
        prompt_ids: Tokens before the answer if the text continues them; then a space at its start is kept.

    Attributes:
        finish_reason: "stop" after an end token or stop string, "length" if the answer ended without one,
            `None` before its end.

    Raises:
        DataError: A stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        if not all(stop):
            raise DataError("a stop string is empty; give it one character or more")
        self.finish_reason: Literal["stop", "length"] | None = None
        self._core = tokenizer.backend_tokenizer
        self._hidden_ids = {
            token_id
            for token_id, token in self._core.get_added_tokens_decoder().items()
            if token.special and not REASONING_TAGS.fullmatch(token.content.replace("/", "", 1))
        }
        self._end_ids = frozenset(end_ids)
        self._stop = tuple(stop)
        self._ids = [i for i in prompt_ids if i not in self._hidden_ids]  # that the next text depends on
        self._text = self._decode()  # of these ids, as far as it has been read
        self._num_read = len(self._ids)
        self._held = ""  # text that has been read, and may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Return the further text that is certain after this token, and set `finish_reason` at the end."""
        if self.finish_reason is not None:
            return ""
        if token_id in self._end_ids:
            return self._end("stop")
        if token_id in self._hidden_ids:
            return ""
        self._ids.append(token_id)
        return self._release(self._read(is_end=False), is_end=False)

    def finish(self) -> str:
        """Return the rest of the text after the last token; afterwards `finish_reason` is not `None`."""
        return self._end("length") if self.finish_reason is None else ""

    def _end(self, reason: Literal["stop", "length"]) -> str:
        text = self._release(self._read(is_end=True), is_end=True)
        self.finish_reason = self.finish_reason or reason
        return text

    def _decode(self) -> str:
        return str(self._core.decode(self._ids, skip_special_tokens=False))

    def _read(self, is_end: bool) -> str:
        """Return the text of new tokens, up to the first character that is not complete."""
        text = self._decode()
        if not text.startswith(self._text):
            # The byte fallback's decoder rewrites characters if the bytes after them are none.
            del self._ids[: self._num_read]
            self._num_read = 0
            self._text = ""
            text = self._decode()
        complete = text if is_end else text.rstrip(INCOMPLETE)
        new_text = complete[len(self._text) :]
        if new_text:
            self._text = complete
        if new_text and complete == text:
            del self._ids[: self._num_read]
            self._num_read = len(self._ids)
            self._text = self._decode()
        return new_text

    def _release(self, new_text: str, is_end: bool) -> str:
        """Return the text up to a stop string, and hold back what may be the beginning of one."""
        text = self._held + new_text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            _, start = min(found)
            self.finish_reason = "stop"
            return text[:start]
        longest = max(map(len, self._stop), default=1)
        starts = range(max(0, len(text) - longest + 1), len(text))
        held = len(text)
        if not is_end:
            held = next((start for start in starts if self._may_stop_at(text, start)), len(text))
        self._held = text[held:]
        return text[:held]

    def _may_stop_at(self, text: str, start: int) -> bool:
        return any(stop.startswith(text[start:]) for stop in self._stop)
