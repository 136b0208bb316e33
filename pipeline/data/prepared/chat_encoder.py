"""Conversations -> tokens and their loss mask: what the assistant says counts, up to the end of its turn.

An answer is kept whole or left out, and counted.
"""

from __future__ import annotations

from collections import Counter

from pipeline.config.data_schema import ChatDataConfig
from pipeline.data.chat_layouts import Conversation, read_conversation
from pipeline.data.prepared.chat_writer import ConversationWriter, Written
from pipeline.data.prepared.encoder import Document, EncoderSettings, Records
from pipeline.errors import ConfigError

SHORTENED = "conversations shortened"
TOO_LONG = "conversations dropped: longer than a sequence"
NO_ANSWER = "conversations dropped: no answer"
ESCAPED = "conversations with a special token read as text"


class ChatEncoder:
    """Records with a conversation each -> documents.

    A conversation that the template refuses is a bad record, as is a row without one. Counted in the tally:
    SHORTENED, TOO_LONG, NO_ANSWER and ESCAPED.

    Args:
        settings: Of chat data.

    Raises:
        DataError: there is no chat template, or it is no Jinja.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert isinstance(settings.config, ChatDataConfig)
        self._config = settings.config
        self._writer = ConversationWriter(settings)
        _ = self._writer.template  # what is wrong with it shows before a record is read

    def __call__(self, records: Records, tally: Counter[str]) -> list[Document]:
        """A document for each conversation that is kept, in order.

        Raises:
            DataError: a record holds no conversation, or one the template refuses.
            ConfigError: a conversation is too long, which the recipe forbids; the template does not show what
                the assistant says.
        """
        given: list[tuple[str, Conversation]] = []
        keys: list[bytes] = []
        for where, record in records:
            conversation = read_conversation(where, record, self._config.layout)
            if not conversation.answers and self._config.learn_from == "assistant":
                tally[NO_ANSWER] += 1
            else:
                given.append((where, self._writer.escape(conversation)))
                keys.append(conversation.key)
        written = self._writer.write(given)
        shorter = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        kept = [each if self._fits(each) else next(shorter) for each in written]
        found = [(each, key) for each, key in zip(kept, keys, strict=True) if each is not None]
        tally.update(ESCAPED for each, _ in found if each.is_escaped)
        if self._config.learn_from == "all":
            return [Document(*self._writer.tokens(each, None), key) for each, key in found]
        answers = self._writer.find_answers([each for each, _ in found])
        return [
            Document(*self._writer.tokens(each, spans), key)
            for (each, key), spans in zip(found, answers, strict=True)
        ]

    def _fits(self, written: Written) -> bool:
        """In a sequence and the token behind it, which is only predicted."""
        return self._writer.length(written) <= self._config.sequence_length + 1

    def _shorten(self, written: list[Written], tally: Counter[str]) -> list[Written | None]:
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
        best: list[Written | None] = [None] * len(written)
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
            tried = self._writer.write(
                [
                    (written[n].where, written[n].conversation.first(ends[n][m]))
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
