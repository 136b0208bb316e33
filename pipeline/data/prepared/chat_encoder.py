"""Conversations -> tokens and their loss mask: what the assistant says counts, up to the end of its turn.

An answer is kept whole or left out, and counted.
"""

from __future__ import annotations

from pipeline.data.chat_layouts import Conversation, read_conversation
from pipeline.config.data_schema import ChatDataConfig
from pipeline.data.chat_layouts import Conversation, read_conversation, unwritten_fields
from pipeline.data.documents.records import Record, Tally
from pipeline.data.prepared.chat_writer import ConversationWriter, Written
from pipeline.data.prepared.encoder import Document, EncoderSettings, Records
from pipeline.errors import ConfigError

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

    def __call__(self, records: Records, tally: Tally) -> list[Document]:
        """A document for each conversation that is kept, in order.

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
            for name in unwritten_fields(record, each.said):
                tally.note(f"{UNWRITTEN}: {name}", each.where)
            if each.is_escaped:
                tally.note(ESCAPED, each.where)
        shorter = iter(self._shorten([each for each in written if not self._fits(each)], tally))
        kept = [each if self._fits(each) else next(shorter) for each in written]
        found = [(each, key) for each, (key, _) in zip(kept, rows, strict=True) if each is not None]
        if is_all:
            return [Document(*self._writer.tokens(each, None), key) for each, key in found]
        documents = []
        answers = self._writer.find_answers([each for each, _ in found], tally)
        for (each, key), own in zip(found, answers, strict=True):
            spans = [span for spans in own for span in spans]
            if spans:
                documents.append(Document(*self._writer.tokens(each, spans), key))
            else:
                tally.note(NO_ANSWER, each.where)
        return documents

    def _fits(self, written: Written) -> bool:
        """In a sequence and the token behind it, which is only predicted."""
        return self._writer.length(written) <= self._config.sequence_length + 1

    def _shorten(self, written: list[Written], tally: Tally) -> list[Written | None]:
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
            for long in written:
                tally.note(TOO_LONG, long.where)
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
        for long, shortened in zip(written, best, strict=True):
            tally.note(TOO_LONG if shortened is None else SHORTENED, long.where)
        return best
