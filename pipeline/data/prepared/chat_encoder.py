"""Encodes conversations as tokens and a loss mask, which selects the assistant's answers up to their end.

No answer is cut: a conversation that is too long loses its last turns, or is dropped. The tally counts these.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.chat_layouts import Conversation, Spans, Turn, find_unwritten_fields, read_conversation
from pipeline.data.chat_template import QUOTE_BEGIN, REASONING_FIELDS, find_template
from pipeline.data.documents.records import Record, Tally
from pipeline.data.prepared.encoder import (
    EncoderSettings,
    Records,
    TokenizedDocument,
    load_plain_text_tokenizer,
)
from pipeline.data.template_encoder import MARK_PATTERN, TemplateEncoder, get_template_variables
from pipeline.data.template_process import TemplateProcess
from pipeline.errors import ConfigError

MaskedTokens = tuple[NDArray[Any], NDArray[np.bool_] | None]
"""Token ids (n,) and loss mask (n,); `None` if all tokens are in the loss."""

# Names under which the tally counts conversations and answers.
CALLS_UNWRITTEN = "answers not learned: they are tool calls, which the chat template does not write"
SHORTENED = "conversations shortened"
TOO_LONG = "conversations dropped: longer than a sequence"
NO_ANSWER = "conversations dropped: no answer"
UNWRITTEN = "conversations with a field that the tokens do not contain in full"
ESCAPED = "conversations with a special token read as text"


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
        return MARK_PATTERN.sub("", self.text)

    @property
    def is_escaped(self) -> bool:
        """Return whether the conversation's content contains a special token."""
        return QUOTE_BEGIN in self.text


def _are_calls_written(calls: list[Any], text: str) -> bool:
    """Return whether a text has the names of all called functions."""
    names = [call["function"].get("name") for call in calls if isinstance(call.get("function"), dict)]
    return all(name is None or str(name) in text for name in names)


class ConversationWriter(TemplateEncoder):
    """Encodes conversations with the chat template, and adds an end token if it is missing.

    Args:
        settings: Settings for chat or preference data.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__(partial(load_plain_text_tokenizer, settings.tokenizer))
        assert settings.config.conversations is not None
        self._settings = settings
        self._config = settings.config.conversations
        self._learns_content = self._config.learn_from == "content"

    @cached_property
    def template(self) -> TemplateProcess:
        """Process that runs the chat template.

        Raises:
            DataError: There is no chat template, or it is not valid Jinja.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self._settings.tokenizer), trust_remote_code=False)
        template = find_template(self._config, tokenizer.chat_template)
        return TemplateProcess(template, get_template_variables(tokenizer), self.special_tokens)

    def find_answers(self, written: Sequence[WrittenConversation], tally: Tally) -> list[list[Spans]]:
        """Return the positions of the answers that are in the loss, for each conversation.

        An answer that is only tool calls is not in the loss if the template does not write the calls. The
        tally counts such answers as CALLS_UNWRITTEN.

        Returns:
            For each conversation and each of its answers, the spans of `text` that are in the loss; empty for
            an answer that is not in the loss.

        Raises:
            ConfigError: The answers cannot be located in the template's text.
        """
        answers = self.template.find_answers([(each.where, each.conversation, each.text) for each in written])
        return [
            self._select_learned(each, spans, tally) for each, spans in zip(written, answers, strict=True)
        ]

    def _select_learned(
        self, written: WrittenConversation, answers: list[Spans], tally: Tally
    ) -> list[Spans]:
        """Return the spans of each answer that are in the loss."""
        conversation = written.conversation
        learned: list[Spans] = []
        for number, spans in zip(conversation.answers, answers, strict=True):
            turn = conversation.turns[number]
            if number in conversation.unlearned:
                learned.append([])
                continue
            answer_text = "".join(written.text[start:end] for start, end in spans)
            calls = turn.get("tool_calls") or []
            is_only_calls = bool(calls) and not turn["content"].strip()
            if is_only_calls and not _are_calls_written(calls, answer_text):
                tally.note(CALLS_UNWRITTEN, written.where)
                learned.append([])
            elif self._learns_content:
                learned.append(self._find_content(written, turn, spans))
            else:
                learned.append(spans)
        return learned

    def _find_content(self, written: WrittenConversation, turn: Turn, spans: Spans) -> Spans:
        """Return the spans of a turn's reasoning and content, and of the end-of-document token after them.

        For a turn with tool calls, the whole turn is the content. There are no spans if the template does not
        write the content, or if it is empty.
        """
        if not spans:
            return []
        text = written.text
        turn_start = spans[0][0]
        turn_end = spans[-1][1]
        if turn.get("tool_calls"):
            start = turn_start
            end = turn_start + len(text[turn_start:turn_end].removesuffix(self._eos_text).rstrip())
        else:
            forms = (turn["content"], turn["content"].strip())  # a template may strip the content
            content = next((form for form in forms if form in text), "")
            content_start = text.find(content, turn_start, turn_end)
            if not content.strip() or content_start < 0:
                return []
            reasoning = next((turn[name] for name in REASONING_FIELDS if turn.get(name)), None)
            start = content_start
            if reasoning is not None:
                reasoning_start = text.find(reasoning.strip(), turn_start, content_start)
                start = content_start if reasoning_start < 0 else reasoning_start
            end = content_start + len(content)
        eos_after = re.compile(rf"\s*({re.escape(self._eos_text)})").match(text, end)
        if eos_after is None:
            return [(start, end)]
        return [(start, end), eos_after.span(1)]

    @cached_property
    def _eos_text(self) -> str:
        """Text of the end-of-document token."""
        return str(self._core.id_to_token(self._settings.end_of_document))

    def write(self, conversations: Sequence[tuple[str, Conversation]]) -> list[WrittenConversation]:
        """Render and tokenise conversations.

        Args:
            conversations: For each conversation, its location for messages, and the result of `escape`.

        Raises:
            DataError: The template raises an error for a conversation.
            ConfigError: The template does not end in time, takes too much memory, or writes too much text.
        """
        texts = self.template.write(conversations)
        without_marks = [text for text in texts if MARK_PATTERN.search(text) is None]
        encodings = iter(self._core.encode_batch(without_marks, add_special_tokens=False))
        written = []
        for (where, conversation), text in zip(conversations, texts, strict=True):
            if MARK_PATTERN.search(text) is not None:
                ids, offsets = self.encode_marked(text)
            else:
                encoding = next(encodings)
                ids = encoding.ids
                offsets = encoding.offsets
            written.append(WrittenConversation(where, conversation, text, ids, offsets))
        return written

    def needs_end_token(self, written: WrittenConversation) -> bool:
        """Return whether an end token is to be added.

        No token is added if the text ends with an end token, apart from white space, or if `append_eos` is
        false.
        """
        if not self._config.append_eos:
            return False
        for token, (start, end) in zip(reversed(written.ids), reversed(written.offsets), strict=True):
            if token in (self._settings.end_of_document, self._end_id):
                return False
            if written.text[start:end].strip():
                return True
        return True

    @cached_property
    def _end_id(self) -> int:
        """Id of the token that ends a conversation: the template's turn stop, or the end of a document."""
        stop = self.template.turn_stop
        return self._settings.end_of_document if stop is None else int(self._core.token_to_id(stop))

    def _are_end_tokens(self, ids: NDArray[Any], written: WrittenConversation, first: int) -> bool:
        """Return whether `ids`, the tokens from number `first` on, are only white space and end tokens."""
        end_ids = (self._settings.end_of_document, self._end_id)
        texts = [written.text[start:end] for start, end in written.offsets[first:]]
        # `ids` may have an added end token more than `texts`.
        return all(token in end_ids or not text.strip() for token, text in zip(ids, texts, strict=False))

    def count_tokens(self, written: WrittenConversation) -> int:
        """Return the number of tokens, including an added end token."""
        return len(written.ids) + self.needs_end_token(written)

    def mask_tokens(self, written: WrittenConversation, spans: Spans | None) -> MaskedTokens:
        """Return the tokens of a conversation, and a loss mask of the tokens in `spans`.

        With `append_eos`, an end token after the last answer is in the loss, and so is white space before it.
        So a model learns to stop even if its turns have no end token.

        Args:
            written: Conversation.
            spans: Spans of its text that are in the loss; `None` for all of the text.
        """
        ids = [*written.ids, self._end_id] if self.needs_end_token(written) else written.ids
        row = np.array(ids, dtype=self._settings.dtype)
        if spans is None:
            return row, None
        starts, ends = np.array(written.offsets, dtype=np.int64).reshape(-1, 2).T
        loss_mask = np.zeros(len(row), dtype=np.bool_)
        after_answer = 0
        for start, end in spans:  # a token that is partly in an answer belongs to the answer
            first = int(ends.searchsorted(start, "right"))
            after_answer = int(starts.searchsorted(end, "left"))
            loss_mask[first:after_answer] = True
        if self._config.append_eos and self._are_end_tokens(row[after_answer:], written, after_answer):
            loss_mask[after_answer:] = True
        return row, loss_mask


class ChatEncoder:
    """Encodes records with conversations as documents.

    A row without a conversation is a bad record, and so is one for which the template raises an error. The
    tally counts SHORTENED, TOO_LONG, NO_ANSWER, UNWRITTEN, ESCAPED and CALLS_UNWRITTEN.

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
        """Return a document for each conversation that is not dropped, in order.

        Raises:
            DataError: A record has no conversation, or the template raises an error for it.
            ConfigError: A conversation is too long and `data.too_long` is `error`, or the answers cannot be
                located in the template's text.
        """
        learns_all = self._config.learn_from == "all"
        conversations: list[tuple[str, Conversation]] = []
        rows: list[tuple[bytes, Record]] = []
        for where, record in records:
            conversation = read_conversation(where, record, self._config.layout)
            if not conversation.learned_answers and not learns_all:
                tally.note(NO_ANSWER, where)
            else:
                conversations.append((where, self._writer.escape(conversation)))
                rows.append((conversation.key, record))
        written = self._writer.write(conversations)
        for each, (_, record) in zip(written, rows, strict=True):
            for name in find_unwritten_fields(record, each.plain_text):
                tally.note(f"{UNWRITTEN}: {name}", each.where)
            if each.is_escaped:
                tally.note(ESCAPED, each.where)
        shortened = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        fitting = [each if self._fits(each) else next(shortened) for each in written]
        with_keys = [(each, key) for each, (key, _) in zip(fitting, rows, strict=True) if each is not None]
        if learns_all:
            return [TokenizedDocument(*self._writer.mask_tokens(each, None), key) for each, key in with_keys]
        documents = []
        answers = self._writer.find_answers([each for each, _ in with_keys], tally)
        for (each, key), spans_by_answer in zip(with_keys, answers, strict=True):
            spans = [span for answer_spans in spans_by_answer for span in answer_spans]
            if spans:
                documents.append(TokenizedDocument(*self._writer.mask_tokens(each, spans), key))
            else:
                tally.note(NO_ANSWER, each.where)
        return documents

    def _fits(self, written: WrittenConversation) -> bool:
        """Return whether the conversation has at most `sequence_length` tokens and one more as a label."""
        return self._writer.count_tokens(written) <= self._config.sequence_length + 1

    def _shorten(self, written: list[WrittenConversation], tally: Tally) -> list[WrittenConversation | None]:
        """Return the first turns of each conversation, up to an answer; `None` if it is dropped.

        The tally counts SHORTENED and TOO_LONG.

        Raises:
            ConfigError: There is a conversation, and `data.too_long` is `error`.
        """
        if written and self._config.too_long == "error":
            raise ConfigError(
                f"{written[0].where}: the conversation has {len(written[0].ids):,} tokens, a sequence "
                f"{self._config.sequence_length:,}; raise data.sequence_length, or set data.too_long: shorten"
            )
        results = []
        for each in written:
            shortened = self._truncate_to_fit(each) if self._config.too_long == "shorten" else None
            tally.note(TOO_LONG if shortened is None else SHORTENED, each.where)
            results.append(shortened)
        return results

    def _truncate_to_fit(self, written: WrittenConversation) -> WrittenConversation | None:
        """Return as many turns, up to an answer, as fit; `None` if the first answer does not fit."""

        @cache
        def write_turns(count: int) -> WrittenConversation:
            (shorter,) = self._writer.write([(written.where, written.conversation.truncate(count))])
            return shorter

        num_turns = len(written.conversation.turns)
        counts = [number + 1 for number in written.conversation.answers if number + 1 < num_turns]
        num_fitting = bisect_left(counts, True, key=lambda count: not self._fits(write_turns(count)))
        return write_turns(counts[num_fitting - 1]) if num_fitting else None
