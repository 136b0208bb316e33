"""Encodes conversations as tokens and a loss mask, which selects the assistant's answers up to their end.

An answer is kept whole or left out; what is left out is counted in the tally.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.chat_layouts import Conversation, Spans, Turn, find_unwritten_fields, read_conversation
from pipeline.data.chat_template import DIVIDE, QUOTE_BEGIN, QUOTE_END, REASONING_FIELDS, find_template
from pipeline.data.documents.records import Record, Tally
from pipeline.data.prepared.encoder import (
    EncoderSettings,
    Records,
    TokenizedDocument,
    load_plain_text_tokenizer,
)
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError

MARKS = re.compile(f"[{QUOTE_BEGIN}{QUOTE_END}{DIVIDE}]")
MARKED = re.compile(f"{QUOTE_BEGIN}([^{QUOTE_BEGIN}{QUOTE_END}]*){QUOTE_END}|{MARKS.pattern}")
MaskedTokens = tuple[
    NDArray[Any], NDArray[np.bool_] | None
]  # (n,) ids and loss mask; None if all are in the loss


CALLS_UNWRITTEN = "answers not learned: they are tool calls, which the chat template does not write"


@dataclass(frozen=True)
class WrittenConversation:
    """A conversation as text that the template wrote, and its tokens.

    Attributes:
        where: File and line, for messages.
        conversation: Conversation with marks around special tokens in its content.
        text: Text of the conversation, with the same marks.
        ids: (m,) token ids of the text, without an added end-of-document token.
        offsets: (m,) pairs of the first character (inclusive) and last (exclusive) of each token in `text`.
    """

    where: str
    conversation: Conversation
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    @property
    def plain_text(self) -> str:
        """Text of the conversation without marks."""
        return MARKS.sub("", self.text)

    @property
    def is_escaped(self) -> bool:
        """Return whether the conversation's content contains a special token."""
        return QUOTE_BEGIN in self.text


def _are_calls_written(calls: list[Any], text: str) -> bool:
    names = [call["function"].get("name") for call in calls if isinstance(call.get("function"), dict)]
    return all(name is None or str(name) in text for name in names)


class ConversationWriter:
    """Encodes conversations by the chat template, and adds the end-of-document token if it is missing.

    Args:
        settings: Settings for chat or preference data.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert settings.config.conversations is not None
        self._settings = settings
        self._config = settings.config.conversations
        self._learns_content = self._config.learn_from == "content"
        self._core = load_plain_text_tokenizer(settings.tokenizer)
        self._core.encode_special_tokens = (
            False  # special tokens that the template writes are tokens, not text
        )
        self._core.post_processor = None  # no tokens are to be added, and it may trim spaces off the offsets
        added = self._core.get_added_tokens_decoder().values()
        special = (token.content for token in added if token.special)
        self._special_tokens = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")

    @cached_property
    def template(self) -> TemplateProcess:
        """Process that runs the chat template.

        Raises:
            DataError: There is no chat template, or it is not valid Jinja.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self._settings.tokenizer), trust_remote_code=False)
        template = find_template(self._config, tokenizer.chat_template)
        starts_with_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        variables = {
            **tokenizer.special_tokens_map,
            "divide": DIVIDE,
            "text_start": tokenizer.bos_token if starts_with_bos else "",
        }
        return TemplateProcess(template, variables, self._special_tokens)

    def escape(self, conversation: Conversation) -> Conversation:
        """Return the conversation with marks around special tokens in its content."""

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return self.special.sub(f"{QUOTE_BEGIN}\\g<0>{QUOTE_END}", value)
            if isinstance(value, dict):
                return {key: escape(each) for key, each in value.items()}
            return [escape(each) for each in value] if isinstance(value, list) else value

        escaped = replace(conversation, turns=escape(conversation.turns), tools=escape(conversation.tools))
        return conversation if escaped == conversation else escaped

    @cached_property
    def plain(self) -> Any:
        """Tokenizer that encodes special tokens as text, for content that contains them."""
        core = load_plain_text_tokenizer(self._settings.tokenizer)
        core.post_processor = None
        return core

    def find_answers(self, written: Sequence[WrittenConversation], tally: Tally) -> list[list[Spans]]:
        """Return the positions of the answers that are in the loss, for each conversation.

        An answer of tool calls alone that the template does not write is left out of the loss, and counted.

        Returns:
            Spans of the text for each answer of a conversation; empty for an answer that is not in the loss.

        Raises:
            ConfigError: The answers cannot be located in the template's text.
        """
        found = self.template.find_answers([(each.where, each.conversation, each.text) for each in written])
        return [
            self._select_learned(each, answers, tally) for each, answers in zip(written, found, strict=True)
        ]

    def _select_learned(
        self, written: WrittenConversation, answers: list[Spans], tally: Tally
    ) -> list[Spans]:
        conversation = written.conversation
        learned: list[Spans] = []
        for number, spans in zip(conversation.answers, answers, strict=True):
            turn = conversation.turns[number]
            if number in conversation.unlearned:
                learned.append([])
                continue
            own = "".join(written.text[start:end] for start, end in spans)
            if (
                not turn["content"].strip()
                and turn.get("tool_calls")
                and not _are_calls_written(turn["tool_calls"], own)
            ):
                tally.note(CALLS_UNWRITTEN, written.where)
                learned.append([])
                continue
            learned.append(self._find_content(written, turn, spans) if self._learns_content else spans)
        return learned

    def _find_content(self, written: WrittenConversation, turn: Turn, spans: Spans) -> Spans:
        """Return the spans of a turn's reasoning and content, and of the end-of-document token after them."""
        if not spans:
            return []
        start = spans[0][0]
        end = spans[-1][1]
        content = next(
            (each for each in (turn["content"], turn["content"].strip()) if each in written.text), ""
        )
        place = written.text.find(content, start, end)
        reasoning = next((turn[name] for name in REASONING_FIELDS if turn.get(name)), None)
        if turn.get("tool_calls"):
            first = start
            last = start + len(written.text[start:end].removesuffix(self._eos).rstrip())
        elif not content.strip() or place < 0:
            return []
        else:
            thought = -1 if reasoning is None else written.text.find(reasoning.strip(), start, place)
            first = place if thought < 0 else thought
            last = place + len(content)
        behind = re.compile(rf"\s*({re.escape(self._eos)})").match(written.text, last)
        return [(first, last), *([behind.span(1)] if behind else [])]

    @cached_property
    def _eos(self) -> str:
        """Text of the end-of-document token."""
        return str(self._core.id_to_token(self._settings.end_of_document))

    def write(self, given: Sequence[tuple[str, Conversation]]) -> list[WrittenConversation]:
        """Render and tokenise conversations.

        Args:
            given: Location for messages, and conversation as `escape` returned it.

        Raises:
            DataError: The template raises an error for a conversation.
        """
        texts = self.template.write(given)
        clean = [text for text in texts if MARKS.search(text) is None]
        encodings = iter(self._core.encode_batch(clean, add_special_tokens=False))
        written = []
        for (where, conversation), text in zip(given, texts, strict=True):
            if MARKS.search(text) is not None:
                ids, offsets = self._encode_marked(text)
            else:
                encoding = next(encodings)
                ids = encoding.ids
                offsets = encoding.offsets
            written.append(WrittenConversation(where, conversation, text, ids, offsets))
        return written

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids and offsets of a text with marks, which are removed.

        Special tokens that marks enclose are encoded as plain text. Text after DIVIDE is encoded separately
        from the text before it.
        """
        pieces = []
        done = 0
        for found in MARKED.finditer(text):
            pieces.append((self._core, done, found.start()))
            if found.group(1):
                pieces.append((self.plain, *found.span(1)))
            done = found.end()
        pieces.append((self._core, done, len(text)))
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for core, start, end in pieces:
            if start < end:
                # Some tokenizers put a space before the first word of a text, but not after a line break.
                lead = "\n" if start and text[start - 1] != DIVIDE else ""
                encoding = core.encode(lead + text[start:end], add_special_tokens=False)
                skip = len(self._newline) if lead else 0
                if encoding.ids[:skip] != self._newline[:skip]:
                    lead = ""
                    skip = 0
                    encoding = core.encode(text[start:end], add_special_tokens=False)
                base = start - len(lead)
                ids += encoding.ids[skip:]
                offsets += [(base + first, base + last) for first, last in encoding.offsets[skip:]]
        return ids, offsets

    @cached_property
    def _newline(self) -> list[int]:
        ids: list[int] = self._core.encode("\n", add_special_tokens=False).ids
        return ids

    def is_ended(self, written: WrittenConversation) -> bool:
        """Return whether no end token is to be added.

        That is so if the text ends with an end token, apart from white space, or if `append_eos` is false.
        """
        if not self._config.append_eos:
            return True
        for token, (start, end) in zip(reversed(written.ids), reversed(written.offsets), strict=True):
            if token in (self._settings.end_of_document, self._end):
                return True
            if written.text[start:end].strip():
                return False
        return False

    @cached_property
    def _end(self) -> int:
        """Id of the token that ends a conversation: the template's turn stop, or the end of a document."""
        stop = self.template.turn_stop
        return self._settings.end_of_document if stop is None else int(self._core.token_to_id(stop))

    def _is_end(self, ids: NDArray[Any], written: WrittenConversation, first: int) -> bool:
        """Return whether the tokens from `first` on are only white space and end tokens."""
        ends = (self._settings.end_of_document, self._end)
        texts = [written.text[start:end] for start, end in written.offsets[first:]]
        others = [
            token for token, text in zip(ids, texts, strict=False) if token not in ends and text.strip()
        ]
        return not others

    def count_tokens(self, written: WrittenConversation) -> int:
        """Return the number of tokens, including an added end token."""
        return len(written.ids) + (not self.is_ended(written))

    def mask_tokens(self, written: WrittenConversation, spans: Spans | None) -> MaskedTokens:
        """Return the tokens, with a loss mask of those in `spans` of the text; `None` for all tokens.

        An end token after the last answer is in the loss, and so is white space before it. So a model learns
        to stop even if its turns have no end token.
        """
        is_ended = self.is_ended(written)
        ids = written.ids if is_ended else [*written.ids, self._end]
        row = np.array(ids, dtype=self._settings.dtype)
        if spans is None:
            return row, None
        starts, ends = np.array(written.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(row), dtype=np.bool_)
        behind = 0
        for start, end in spans:  # a token that is partly in an answer belongs to the answer
            first = int(ends.searchsorted(start, "right"))
            behind = int(starts.searchsorted(end, "left"))
            loss_mask[first:behind] = True
        if self._config.append_eos and self._is_end(row[behind:], written, behind):
            loss_mask[behind:] = True
        return row, loss_mask


SHORTENED = "conversations shortened"
TOO_LONG = "conversations dropped: longer than a sequence"
NO_ANSWER = "conversations dropped: no answer"
UNWRITTEN = "conversations with a field of which the tokens do not show all"
ESCAPED = "conversations with a special token read as text"


class ChatEncoder:
    """Encodes records with conversations as documents.

    A row without a conversation is a bad record, and so is one for which the template raises an error. The
    tally counts SHORTENED, TOO_LONG, NO_ANSWER, UNWRITTEN and ESCAPED.

    Args:
        settings: Settings for chat data.

    Raises:
        DataError: There is no chat template, or it is not valid Jinja.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert settings.config.chat is not None
        self._config = settings.config.chat
        self._writer = ConversationWriter(settings)
        _ = self._writer.template  # errors of the template are raised before a record is read

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        """Return a document for each conversation that is kept, in order.

        Raises:
            DataError: A record has no conversation, or the template raises an error for it.
            ConfigError: A conversation is too long and `data.too_long` is `error`, or the answers cannot be
                located in the template's text.
        """
        is_all = self._config.learn_from == "all"
        given: list[tuple[str, Conversation]] = []
        rows: list[tuple[bytes, Record]] = []
        for where, record in records:
            conversation = read_conversation(where, record, self._config.layout)
            if not conversation.learned_answers and not is_all:
                tally.note(NO_ANSWER, where)
            else:
                given.append((where, self._writer.escape(conversation)))
                rows.append((conversation.key, record))
        written = self._writer.write(given)
        for each, (_, record) in zip(written, rows, strict=True):
            for name in find_unwritten_fields(record, each.plain_text):
                tally.note(f"{UNWRITTEN}: {name}", each.where)
            if each.is_escaped:
                tally.note(ESCAPED, each.where)
        shorter = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        kept = [each if self._fits(each) else next(shorter) for each in written]
        found = [(each, key) for each, (key, _) in zip(kept, rows, strict=True) if each is not None]
        if is_all:
            return [TokenizedDocument(*self._writer.mask_tokens(each, None), key) for each, key in found]
        documents = []
        answers = self._writer.find_answers([each for each, _ in found], tally)
        for (each, key), own in zip(found, answers, strict=True):
            spans = [span for spans in own for span in spans]
            if spans:
                documents.append(TokenizedDocument(*self._writer.mask_tokens(each, spans), key))
            else:
                tally.note(NO_ANSWER, each.where)
        return documents

    def _fits(self, written: WrittenConversation) -> bool:
        """Return whether the conversation fits in a sequence and one more token, which is a label only."""
        return self._writer.count_tokens(written) <= self._config.sequence_length + 1

    def _shorten(self, written: list[WrittenConversation], tally: Tally) -> list[WrittenConversation | None]:
        """Return the first turns, up to an answer, of each conversation; `None` if it is dropped."""
        if written and self._config.too_long == "error":
            raise ConfigError(
                f"{written[0].where}: the conversation has {len(written[0].ids):,} tokens, a sequence "
                f"{self._config.sequence_length:,}; raise data.sequence_length, or set data.too_long: shorten"
            )
        shortened = []
        for long in written:
            first = self._first_turns(long) if self._config.too_long == "shorten" else None
            tally.note(TOO_LONG if first is None else SHORTENED, long.where)
            shortened.append(first)
        return shortened

    def _first_turns(self, long: WrittenConversation) -> WrittenConversation | None:
        """Return as many turns, up to an answer, as fit; `None` if the first answer does not fit."""

        @cache
        def first(end: int) -> WrittenConversation:
            (written,) = self._writer.write([(long.where, long.conversation.truncate(end))])
            return written

        turns = len(long.conversation.turns)
        ends = [number + 1 for number in long.conversation.answers if number + 1 < turns]
        fitting = bisect_left(ends, True, key=lambda end: not self._fits(first(end)))
        return first(ends[fitting - 1]) if fitting else None
