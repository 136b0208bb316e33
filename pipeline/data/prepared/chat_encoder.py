"""Conversations -> tokens and their loss mask: what the assistant says counts, up to the end of its turn.

An answer is kept whole or left out, and counted.
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
from pipeline.data.chat_template import BEGIN, DIVIDE, END, REASONING_FIELDS, find_template
from pipeline.data.documents.records import Record, Tally
from pipeline.data.prepared.encoder import EncoderSettings, Records, TokenizedDocument, plain_text_tokenizer
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError

MARKS = re.compile(f"[{BEGIN}{END}{DIVIDE}]")
MARKED = re.compile(f"{BEGIN}([^{BEGIN}{END}]*){END}|{MARKS.pattern}")
MaskedTokens = tuple[NDArray[Any], NDArray[np.bool_] | None]  # (n,) ids, and which of them count; None: all


CALLS_UNWRITTEN = "answers not learned: they are tool calls, which the chat template does not write"


@dataclass(frozen=True)
class WrittenConversation:
    """A conversation as its template writes it, and the tokens of that.

    Attributes:
        conversation: With special tokens in it marked.
        text: n characters.
        ids: (m,) of the text alone.
        offsets: (m,) pairs: which of its characters each token stands for.
    """

    where: str
    conversation: Conversation
    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    @property
    def said(self) -> str:
        """The text without marks."""
        return MARKS.sub("", self.text)

    @property
    def is_escaped(self) -> bool:
        """Whether somebody wrote a special token."""
        return BEGIN in self.text


def _are_written(calls: list[Any], text: str) -> bool:
    names = [call["function"].get("name") for call in calls if isinstance(call.get("function"), dict)]
    return all(name is None or str(name) in text for name in names)


class ConversationWriter:
    """Writes conversations as tokens: the template's, and the end-of-document token where they do not end so.

    Args:
        settings: Of data with conversations.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert settings.config.conversations is not None
        self._settings = settings
        self._config = settings.config.conversations
        self._learns_content = self._config.learn_from == "content"
        self._core = plain_text_tokenizer(settings.tokenizer)
        self._core.encode_special_tokens = False  # unlike plain text, a template writes them as tokens
        self._core.post_processor = None  # it adds no special tokens here, but may cut spaces off the offsets
        added = self._core.get_added_tokens_decoder().values()
        special = (token.content for token in added if token.special)
        self._special_tokens = sorted(special, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")

    @cached_property
    def template(self) -> TemplateProcess:
        """Raises DataError where there is no chat template, or it is no Jinja."""
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
        """Return a conversation with marks around the special tokens that somebody wrote."""

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return self.special.sub(f"{BEGIN}\\g<0>{END}", value)
            if isinstance(value, dict):
                return {key: escape(each) for key, each in value.items()}
            return [escape(each) for each in value] if isinstance(value, list) else value

        turns, tools = escape(conversation.turns), escape(conversation.tools)
        escaped = replace(conversation, turns=turns, tools=tools)
        return conversation if escaped == conversation else escaped

    @cached_property
    def plain(self) -> Any:
        """The tokenizer that knows no special tokens; most conversations need none."""
        core = plain_text_tokenizer(self._settings.tokenizer)
        core.post_processor = None
        return core

    def find_answers(self, written: Sequence[WrittenConversation], tally: Tally) -> list[list[Spans]]:
        """Return for each of the conversations where in its text the answers are that are learned.

        An answer of tool calls alone, which the template does not write, is not learned, and counted.

        Returns:
            For each of the conversation's answers its stretches of the text; none where it is context.

        Raises:
            ConfigError: The template does not show it.
        """
        found = self.template.find_answers([(each.where, each.conversation, each.text) for each in written])
        return [self._learned(each, answers, tally) for each, answers in zip(written, found, strict=True)]

    def _learned(self, written: WrittenConversation, answers: list[Spans], tally: Tally) -> list[Spans]:
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
                and not _are_written(turn["tool_calls"], own)
            ):
                tally.note(CALLS_UNWRITTEN, written.where)
                learned.append([])
                continue
            learned.append(self._content(written, turn, spans) if self._learns_content else spans)
        return learned

    def _content(self, written: WrittenConversation, turn: Turn, spans: Spans) -> Spans:
        """Return where a turn's reasoning and content are, and the end-of-document token behind them."""
        if not spans:
            return []
        start, end = spans[0][0], spans[-1][1]
        content = next(
            (each for each in (turn["content"], turn["content"].strip()) if each in written.text), ""
        )
        place = written.text.find(content, start, end)
        reasoning = next((turn[name] for name in REASONING_FIELDS if turn.get(name)), None)
        if turn.get("tool_calls"):
            first, last = start, start + len(written.text[start:end].removesuffix(self._eos).rstrip())
        elif not content.strip() or place < 0:
            return []
        else:
            thought = -1 if reasoning is None else written.text.find(reasoning.strip(), start, place)
            first, last = (place if thought < 0 else thought), place + len(content)
        behind = re.compile(rf"\s*({re.escape(self._eos)})").match(written.text, last)
        return [(first, last), *([behind.span(1)] if behind else [])]

    @cached_property
    def _eos(self) -> str:
        """The end-of-document token as it is written."""
        return str(self._core.id_to_token(self._settings.end_of_document))

    def write(self, given: Sequence[tuple[str, Conversation]]) -> list[WrittenConversation]:
        """Return each (where, conversation that `escape` gave) as the template writes it.

        Raises:
            DataError: the template refuses one.
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
                ids, offsets = encoding.ids, encoding.offsets
            written.append(WrittenConversation(where, conversation, text, ids, offsets))
        return written

    def _encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and offsets of a text with marks: what they enclose as plain text, the marks not at all.

        A piece behind DIVIDE is tokenised as if nothing stood before it.
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
                lead = (
                    "\n" if start and text[start - 1] != DIVIDE else ""
                )  # some tokenizers put a space before the first word of a text
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

    def is_ended(self, written: WrittenConversation) -> bool:
        """Whether nothing is added: the end of a document stands behind all but white space, or never is."""
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
        """Id of the token that ends a conversation: the document's end, or the one that ends its turns."""
        stop = self.template.turn_stop
        return self._settings.end_of_document if stop is None else int(self._core.token_to_id(stop))

    def _is_end(self, ids: NDArray[Any], written: WrittenConversation, first: int) -> bool:
        """Whether tokens from `first` on are white space and ends of the document, and nothing else."""
        ends = (self._settings.end_of_document, self._end)
        texts = [written.text[start:end] for start, end in written.offsets[first:]]
        others = [
            token for token, text in zip(ids, texts, strict=False) if token not in ends and text.strip()
        ]
        return not others

    def length(self, written: WrittenConversation) -> int:
        """Return the number of tokens, the end-of-document token included."""
        return len(written.ids) + (not self.is_ended(written))

    def tokens(self, written: WrittenConversation, spans: Spans | None) -> MaskedTokens:
        """Return the tokens; those in `spans` of the text count. `None`: all count.

        The end counts with the last answer it follows, and so does white space between the two: a model whose
        turns have no end of their own learns to stop.
        """
        is_ended = self.is_ended(written)
        ids = written.ids if is_ended else [*written.ids, self._end]
        row = np.array(ids, dtype=self._settings.dtype)
        if spans is None:
            return row, None
        starts, ends = np.array(written.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(row), dtype=np.bool_)
        behind = 0
        for start, end in spans:  # a token that is partly in the answer is the answer's
            first, behind = int(ends.searchsorted(start, "right")), int(starts.searchsorted(end, "left"))
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
    """Records with a conversation each -> documents.

    A conversation that the template refuses is a bad record, as is a row without one. Counted in the tally:
    SHORTENED, TOO_LONG, NO_ANSWER, UNWRITTEN and ESCAPED.

    Args:
        settings: Of chat data.

    Raises:
        DataError: there is no chat template, or it is no Jinja.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert settings.config.chat is not None
        self._config = settings.config.chat
        self._writer = ConversationWriter(settings)
        _ = self._writer.template  # what is wrong with it shows before a record is read

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        """Return a document for each conversation that is kept, in order.

        Raises:
            DataError: a record holds no conversation, or one the template refuses.
            ConfigError: a conversation is too long, which the recipe forbids; the template does not show what
                the assistant says.
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
            for name in find_unwritten_fields(record, each.said):
                tally.note(f"{UNWRITTEN}: {name}", each.where)
            if each.is_escaped:
                tally.note(ESCAPED, each.where)
        shorter = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        kept = [each if self._fits(each) else next(shorter) for each in written]
        found = [(each, key) for each, (key, _) in zip(kept, rows, strict=True) if each is not None]
        if is_all:
            return [TokenizedDocument(*self._writer.tokens(each, None), key) for each, key in found]
        documents = []
        answers = self._writer.find_answers([each for each, _ in found], tally)
        for (each, key), own in zip(found, answers, strict=True):
            spans = [span for spans in own for span in spans]
            if spans:
                documents.append(TokenizedDocument(*self._writer.tokens(each, spans), key))
            else:
                tally.note(NO_ANSWER, each.where)
        return documents

    def _fits(self, written: WrittenConversation) -> bool:
        """Return whether it fits in a sequence and the token behind it, which is only predicted."""
        return self._writer.length(written) <= self._config.sequence_length + 1

    def _shorten(self, written: list[WrittenConversation], tally: Tally) -> list[WrittenConversation | None]:
        """Return the first turns, up to an answer, of each that is too long, or None."""
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
        """Return as many turns, up to an answer, as fit; `None`: the first answer does not."""

        @cache
        def first(end: int) -> WrittenConversation:
            (written,) = self._writer.write([(long.where, long.conversation.truncate(end))])
            return written

        turns = len(long.conversation.turns)
        ends = [number + 1 for number in long.conversation.answers if number + 1 < turns]
        fitting = bisect_left(ends, True, key=lambda end: not self._fits(first(end)))
        return first(ends[fitting - 1]) if fitting else None
