"""Turns a conversation into the tokens of a prompt, and the tokens of an answer into text as they come."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pipeline.data.chat_layouts import ASSISTANT, Conversation, read_conversation
from pipeline.data.chat_template import REASONING_TAGS
from pipeline.data.template_encoder import TemplateEncoder, get_template_variables
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import DataError

INCOMPLETE = "\ufffd"  # a decoder writes it for bytes that are not, or not yet, a character
MESSAGES = "messages"  # location of a conversation in error messages
REASONING_OPENED = re.compile(rf"(?:{REASONING_TAGS.pattern})\s*\Z")


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

        if not tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, so the model continues text and answers no messages"
            )
        self._encoder = TemplateEncoder(partial(Tokenizer.from_str, tokenizer.backend_tokenizer.to_str()))
        variables = get_template_variables(tokenizer)
        template = tokenizer.get_chat_template()
        self._template = TemplateProcess(template, variables, self._encoder.special_tokens)

    def render(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
        """Return the ids of a conversation up to the start of the next answer.

        Args:
            messages: Messages with `role` (system, user, assistant or tool) and `content` (text).
            tools: Functions that the assistant may call; `None` if there are none.

        Raises:
            DataError: A message has an unknown role or no text, or the template refuses the conversation or
                leaves out a system message.
            ConfigError: The template does not end in time, takes too much memory, or writes too much text.
        """
        row = {"messages": list(messages), "tools": tools}
        conversation = self._encoder.escape(read_conversation(MESSAGES, row, "messages"))
        texts = self._template.write([(MESSAGES, conversation, True)])
        other_turns = [turn for turn in conversation.turns if turn["role"] != "system"]
        if len(other_turns) < len(conversation.turns):
            with suppress(DataError):  # the template may refuse the other turns alone
                texts += self._template.write([(MESSAGES, replace(conversation, turns=other_turns), True)])
            if len(texts) == 2 and texts[0] == texts[1]:
                raise DataError("the chat template does not write a system message; leave it out")
        return self._encoder.encode_marked(texts[0])[0]

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the special tokens that end an answer; empty if the template writes none after an answer."""
        turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}]
        text = self._template.write([(MESSAGES, Conversation(turns))])[0]
        end = self._encoder.special_pattern.search(text[text.rfind("!") :])
        tokens = [self._template.turn_stop, end[0] if end else None]
        return frozenset(i for token in tokens if token for i in self._encoder.encode_marked(token)[0])


def find_opened_reasoning(prompt: str) -> str:
    """Return the tag, such as `<think>`, by which a prompt begins the answer's reasoning; empty for none."""
    match = REASONING_OPENED.search(prompt)
    return match[0] if match else ""


class TextStream:
    """Turns the tokens of one answer into text, and returns each part of the text once it is certain.

    A part is certain if its characters are complete and no stop string can begin in it. Together, the parts
    are the decoded answer up to its first stop string. The text has no end tokens, no stop strings, and no
    special tokens other than tags of reasoning. Bytes that are no character are written as U+FFFD;
    DecodeStream of the tokenizers library would raise an exception.

    Args:
        tokenizer: Tokenizer of transformers.
        end_ids: Tokens that end the answer.
        stop: Strings that end the answer before their first character.
        prompt_ids: Ids of the prompt if the answer continues its text; then the answer's first space stays.

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
        self._end_ids = end_ids
        self._stop = stop
        self._ids = [i for i in prompt_ids if i not in self._hidden_ids]
        self._num_read = len(self._ids)  # number of ids, from the first on, whose text has been read
        self._read_text = self._decode()
        self._pending = ""  # text that has been read, and may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Return the further text that is certain after this token, and set `finish_reason` at the end."""
        if self.finish_reason is not None:
            return ""
        if token_id in self._end_ids:
            return self.finish("stop")
        if token_id in self._hidden_ids:
            return ""
        self._ids.append(token_id)
        return self._release(self._read(is_end=False), is_end=False)

    def finish(self, reason: Literal["stop", "length"] = "length") -> str:
        """Return the remaining text, and set `finish_reason`: to "stop" if the text has a stop string."""
        if self.finish_reason is not None:
            return ""
        text = self._release(self._read(is_end=True), is_end=True)
        self.finish_reason = self.finish_reason or reason
        return text

    def _decode(self) -> str:
        return str(self._core.decode(self._ids, skip_special_tokens=False))

    def _read(self, is_end: bool) -> str:
        """Return the text of new ids once their last character is complete."""
        # A word's text depends on the ids before it: the first word of a text may lose its space.
        text = self._decode()
        if not text.startswith(self._read_text):  # a byte fallback rewrites characters before invalid bytes
            del self._ids[: self._num_read]
            self._num_read = 0
            self._read_text = ""
            text = self._decode()
        if text.endswith(INCOMPLETE) and not is_end:
            return ""
        new_text = text[len(self._read_text) :]
        if new_text:
            del self._ids[: self._num_read]
            self._num_read = len(self._ids)
            self._read_text = self._decode()
        return new_text

    def _release(self, new_text: str, is_end: bool) -> str:
        """Return the text up to a stop string, and hold back what may be the beginning of one."""
        text = self._pending + new_text
        starts = [(text.find(stop), len(stop)) for stop in self._stop]
        limits = [(start + length, start) for start, length in starts if start >= 0]
        if limits:
            _, start = min(limits)  # of the stop string that ends first
            self.finish_reason = "stop"
            return text[:start]
        tails = () if is_end else range(len(text))
        begins_stop = (start for start in tails if any(stop.startswith(text[start:]) for stop in self._stop))
        end = next(begins_stop, len(text))
        self._pending = text[end:]
        return text[:end]
