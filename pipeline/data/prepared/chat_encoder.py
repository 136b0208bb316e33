"""Conversations -> tokens and their loss mask: what the assistant says counts, up to the end of its turn.

The ids are those of the tokenizer's own chat template. A special token that somebody wrote in a conversation
is text, as a user could else open a turn of the assistant. An answer is kept whole or left out, and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.config.data_schema import ChatDataConfig
from pipeline.data.chat_layouts import Conversation, read_conversation
from pipeline.data.chat_template import BEGIN, END, Spans, find_template
from pipeline.data.prepared.encoder import Document, EncoderSettings, Records, plain_text_tokenizer
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError

SHORTENED = "conversations shortened"
TOO_LONG = "conversations dropped: longer than a sequence"
NO_ANSWER = "conversations dropped: no answer"
ESCAPED = "conversations with a special token read as text"
MARKED = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}|[{BEGIN}{END}]")


@dataclass(frozen=True)
class _Written:
    """A conversation as its template writes it, and the tokens of that.

    Attributes:
        conversation: With special tokens in it marked.
        key: Of the whole conversation as it was read.
        text: n characters.
        ids: (m,) of the text alone.
        offsets: (m,) pairs: which of its characters each token stands for.
    """

    where: str
    conversation: Conversation
    key: bytes
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]


class ChatEncoder:
    """Records with a conversation each -> documents.

    A document is the text of the template, and the end-of-document token where that is not its end already.
    The end counts in the loss with the last answer it follows, and so does white space between the two: a
    model whose turns have no end of their own learns to stop.

    A conversation that the template refuses is a bad record, as is a row without one. Counted in the tally:
    SHORTENED, TOO_LONG, NO_ANSWER and ESCAPED.

    Args:
        settings: Of chat data.

    Raises:
        DataError: there is no chat template, or it is no Jinja.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        from transformers import AutoTokenizer

        assert isinstance(settings.config, ChatDataConfig)
        self._settings = settings
        self._config = settings.config
        self._core = plain_text_tokenizer(settings.tokenizer)
        self._core.encode_special_tokens = False  # unlike plain text, a template writes them as tokens
        self._core.post_processor = None  # it adds no special tokens here, but may cut spaces off the offsets
        added = self._core.get_added_tokens_decoder().values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        tokenizer = AutoTokenizer.from_pretrained(str(settings.tokenizer), trust_remote_code=False)
        template = find_template(settings.config, tokenizer.chat_template)
        self._template = TemplateProcess(template, dict(tokenizer.special_tokens_map), special)

    @cached_property
    def _plain(self) -> Any:
        """Knows no special tokens; most data needs none."""
        core = plain_text_tokenizer(self._settings.tokenizer)
        core.post_processor = None
        return core

    def __call__(self, records: Records, tally: Counter[str]) -> list[Document]:
        """A document for each conversation that is kept, in order.

        Raises:
            DataError: a record holds no conversation, or one the template refuses.
            ConfigError: a conversation is too long, which the recipe forbids; the template does not show what
                the assistant says.
        """
        given: list[tuple[str, Conversation, bytes]] = []
        for where, record in records:
            conversation = read_conversation(where, record, self._config.layout)
            if not conversation.answers and self._config.learn_from == "assistant":
                tally[NO_ANSWER] += 1
            else:
                given.append((where, self._escape(conversation), conversation.key))
        written = self._write(given)
        shorter = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        kept = [each if self._fits(each) else next(shorter) for each in written]
        documents = [each for each in kept if each is not None]
        answers = self._find_answers(documents)
        tally.update(ESCAPED for each in documents if BEGIN in each.text)
        return [self._document(*each) for each in zip(documents, answers, strict=True)]

    def _find_answers(self, written: list[_Written]) -> Sequence[Spans | None]:
        """Where the assistant speaks in each; None: all of it counts in the loss."""
        if self._config.learn_from == "all":
            return [None] * len(written)
        return self._template.find_answers([(each.where, each.conversation, each.text) for each in written])

    def _escape(self, conversation: Conversation) -> Conversation:
        """With marks around the special tokens that somebody wrote."""

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.sub(f"{BEGIN}\\g<0>{END}", value)
            if isinstance(value, dict):
                return {key: escape(each) for key, each in value.items()}
            return [escape(each) for each in value] if isinstance(value, list) else value

        escaped = Conversation(escape(conversation.turns), escape(conversation.tools))
        return conversation if escaped == conversation else escaped

    def _write(self, given: list[tuple[str, Conversation, bytes]]) -> list[_Written]:
        texts = self._template.write([(where, conversation) for where, conversation, _ in given])
        clean = [text for text in texts if BEGIN not in text and END not in text]
        encodings = iter(self._core.encode_batch(clean, add_special_tokens=False))
        written = []
        for (where, conversation, key), text in zip(given, texts, strict=True):
            if BEGIN in text or END in text:
                ids, offsets = self._encode_marked(text)
            else:
                encoding = next(encodings)
                ids, offsets = encoding.ids, encoding.offsets
            written.append(_Written(where, conversation, key, text, ids, offsets))
        return written

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a text with marks: what is marked as plain text, the marks not at all."""
        pieces = []
        done = 0
        for found in MARKED.finditer(text):
            pieces.append((self._core, done, found.start()))
            if found.group(1):
                pieces.append((self._plain, *found.span(1)))
            done = found.end()
        pieces.append((self._core, done, len(text)))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for core, start, end in pieces:
            if start < end:
                lead = "\n" if start else ""  # some tokenizers put a space before the first word of a text
                encoding = core.encode(lead + text[start:end], add_special_tokens=False)
                skip = len(self._newline) if lead else 0
                if encoding.ids[:skip] != self._newline[:skip]:
                    lead, skip = "", 0
                    encoding = core.encode(text[start:end], add_special_tokens=False)
                base = start - len(lead)
                ids += encoding.ids[skip:]
                offsets += [(base + first, base + last) for first, last in encoding.offsets[skip:]]
        return ids, offsets

    @cached_property
    def _newline(self) -> list[int]:
        ids: list[int] = self._core.encode("\n", add_special_tokens=False).ids
        return ids

    def _is_ended(self, written: _Written) -> bool:
        """Whether the end-of-document token stands behind all but white space."""
        for token, (start, end) in zip(reversed(written.ids), reversed(written.offsets), strict=True):
            if token == self._settings.end_of_document:
                return True
            if written.text[start:end].strip():
                return False
        return False

    def _fits(self, written: _Written) -> bool:
        """In a sequence and the token behind it, which is only predicted."""
        length = len(written.ids) + (not self._is_ended(written))
        return length <= self._config.sequence_length + 1

    def _shorten(self, written: list[_Written], tally: Counter[str]) -> list[_Written | None]:
        """What each becomes that is too long: its first turns up to an answer, or None.

        As many turns as fit, found by halving: with so many conversations at once, in a few rounds.
        """
        if not written:
            return []
        if self._config.too_long == "error":
            raise ConfigError(
                f"{written[0].where}: the conversation has {len(written[0].ids):,} tokens, a sequence "
                f"{self._config.sequence_length:,}; raise data.sequence_length, or set data.too_long: shorten"
            )
        best: list[_Written | None] = [None] * len(written)
        if self._config.too_long == "drop":
            tally[TOO_LONG] += len(written)
            return best
        ends = [
            [number + 1 for number in each.conversation.answers if number + 1 < len(each.conversation.turns)]
            for each in written
        ]
        low, high = [0] * len(written), [len(each) for each in ends]
        while open_ := [number for number in range(len(written)) if low[number] < high[number]]:
            middle = [(low[number] + high[number]) // 2 for number in open_]
            tried = self._write(
                [
                    (written[n].where, written[n].conversation.first(ends[n][m]), written[n].key)
                    for n, m in zip(open_, middle, strict=True)
                ]
            )
            for number, at, each in zip(open_, middle, tried, strict=True):
                if self._fits(each):
                    low[number], best[number] = at + 1, each
                else:
                    high[number] = at
        tally.update(TOO_LONG if each is None else SHORTENED for each in best)
        return best

    def _document(self, written: _Written, spans: Spans | None) -> Document:
        is_ended = self._is_ended(written)
        ids = written.ids if is_ended else [*written.ids, self._settings.end_of_document]
        row = np.array(ids, dtype=self._settings.dtype)
        if spans is None:
            return Document(row, None, written.key)
        starts, ends = np.array(written.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(row), dtype=np.bool_)
        behind = 0
        for start, end in spans:  # a token that is partly in the answer is the answer's
            first, behind = int(ends.searchsorted(start, "right")), int(starts.searchsorted(end, "left"))
            loss_mask[first:behind] = True
        if not is_ended and not written.text[spans[-1][1] :].strip():
            loss_mask[behind:] = True
        return Document(row, loss_mask, written.key)
