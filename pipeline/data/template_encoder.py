"""Encodes the text of chat templates as token ids; special tokens in a message's content are plain text.

Training and generation encode conversations here, so a model is asked in the tokens that it was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from pipeline.data.chat_layouts import Conversation
from pipeline.data.chat_template import DIVIDE, QUOTE_BEGIN, QUOTE_END

MARK_PATTERN = re.compile(f"[{QUOTE_BEGIN}{QUOTE_END}{DIVIDE}]")
QUOTED_OR_MARK = re.compile(f"{QUOTE_BEGIN}([^{QUOTE_BEGIN}{QUOTE_END}]*){QUOTE_END}|{MARK_PATTERN.pattern}")


def get_template_variables(tokenizer: Any) -> dict[str, Any]:
    """Return the variables that a chat template may read besides the conversation."""
    starts_with_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return {
        **tokenizer.special_tokens_map,
        "divide": DIVIDE,
        "text_start": tokenizer.bos_token if starts_with_bos else "",
    }


class TemplateEncoder:
    """Encodes text that a chat template wrote.

    Args:
        load_core: Function that returns a new `tokenizers.Tokenizer`.

    Attributes:
        special_tokens: Special tokens of the tokenizer, the longest first.
        special_pattern: Pattern that matches the tokenizer's special tokens in a text.
    """

    def __init__(self, load_core: Callable[[], Any]) -> None:
        self._load_core = load_core
        # Special tokens that the template writes are tokens, not text.
        self._core = self._load(special_as_text=False)
        added = self._core.get_added_tokens_decoder().values()
        special = (token.content for token in added if token.special)
        self.special_tokens = sorted(special, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")

    def escape(self, conversation: Conversation) -> Conversation:
        """Return the conversation with marks around special tokens in its content."""

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return self.special_pattern.sub(f"{QUOTE_BEGIN}\\g<0>{QUOTE_END}", value)
            if isinstance(value, dict):
                return {key: escape(each) for key, each in value.items()}
            if isinstance(value, list):
                return [escape(each) for each in value]
            return value

        escaped = replace(conversation, turns=escape(conversation.turns), tools=escape(conversation.tools))
        return conversation if escaped == conversation else escaped

    @cached_property
    def plain_tokenizer(self) -> Any:
        """Tokenizer (`tokenizers.Tokenizer`) that encodes special tokens as text."""
        return self._load(special_as_text=True)

    def _load(self, special_as_text: bool) -> Any:
        core = self._load_core()
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = special_as_text
        core.post_processor = None  # it would add tokens, and may cut spaces off the offsets
        return core

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text without its marks, and their offsets in the text with marks.

        Special tokens that marks enclose are encoded as plain text. Text after DIVIDE is encoded separately
        from the text before it.
        """
        pieces = []
        piece_start = 0
        for match in QUOTED_OR_MARK.finditer(text):
            pieces.append((self._core, piece_start, match.start()))
            if match.group(1):
                pieces.append((self.plain_tokenizer, *match.span(1)))
            piece_start = match.end()
        pieces.append((self._core, piece_start, len(text)))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for core, start, end in pieces:
            if start == end:
                continue
            # Some tokenizers put a space before the first word of a text, but not after a line break. So
            # encode a line break before a piece that is not the first, and skip its tokens.
            lead = "\n" if start and text[start - 1] != DIVIDE else ""
            encoding = core.encode(lead + text[start:end], add_special_tokens=False)
            skip = len(self._newline_ids) if lead else 0
            if encoding.ids[:skip] != self._newline_ids[:skip]:
                lead = ""
                skip = 0
                encoding = core.encode(text[start:end], add_special_tokens=False)
            base = start - len(lead)
            ids += encoding.ids[skip:]
            offsets += [(base + first, base + last) for first, last in encoding.offsets[skip:]]
        return ids, offsets

    @cached_property
    def _newline_ids(self) -> list[int]:
        ids: list[int] = self._core.encode("\n", add_special_tokens=False).ids
        return ids
