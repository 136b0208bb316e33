"""Encodes judged answers as tokens. Each answer follows a copy of the prompt, which is not in the loss.

The answers of a row are kept together and whole, or left out; what is left out is counted in the tally.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.data.chat_layouts import find_unwritten_fields
from pipeline.data.documents.records import Tally
from pipeline.data.preference_layouts import (
    KIND_NAMES,
    LABELS,
    MARGIN,
    SCORES,
    JudgedAnswer,
    PreferenceExample,
    read_example,
)
from pipeline.data.prepared.chat_encoder import ConversationWriter, MaskedTokens
from pipeline.data.prepared.encoder import EncoderSettings, Records, TokenizedDocument
from pipeline.errors import ConfigError, DataError

TOO_LONG = "examples dropped: longer than data.sequence_length together, or than data.answer_length alone"
UNWRITTEN = "examples with a field of which the tokens do not show all"
ESCAPED = "examples with a special token read as text"
# Fields that are read as a judgement or a number, even if they are text, as in CSV files.
VALUES = frozenset({*LABELS, *(name for pair in SCORES for name in pair), MARGIN})


@dataclass(frozen=True)
class _Judged:
    """An answer with its example and location."""

    where: str
    example: PreferenceExample
    answer: JudgedAnswer

    @property
    def is_plain(self) -> bool:
        """Return whether prompt and answer are plain text."""
        return isinstance(self.example.prompt, str)


class PreferenceEncoder:
    """Encodes records with judged answers as documents with a segment for each answer.

    A segment is the prompt and an answer. Conversations are written by the chat template, and the assistant's
    turns after the prompt are in the loss. Plain text is encoded as the tokenizer's opening tokens, the
    prompt, the answer and the end-of-document token. A token that is partly in the answer belongs to the
    answer.

    A row without an example is a bad record. The tally counts TOO_LONG, UNWRITTEN and ESCAPED.

    Args:
        settings: Settings for preference data.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        assert settings.config.preferences is not None
        self._settings = settings
        self._config = settings.config.preferences
        self._writer = ConversationWriter(settings)

    def __call__(self, records: Records, tally: Tally) -> list[TokenizedDocument]:
        """Return a document for each example that is kept, in order.

        Raises:
            DataError: A record has no example, or the answers of an example have the same tokens.
            ConfigError: An example is too long and `data.too_long` is `error`, there is no chat template, or
                the answers cannot be located in its text.
        """
        layout = self._config.layout
        unpaired = self._config.is_unpaired
        examples = [
            (where, read_example(where, record, layout, unpaired=unpaired)) for where, record in records
        ]
        judged = [
            _Judged(where, example, answer) for where, example in examples for answer in example.answers
        ]
        plain = self._write_plain([each for each in judged if each.is_plain])
        turns = self._write_turns([each for each in judged if not each.is_plain], tally)
        found = iter([next(plain if each.is_plain else turns) for each in judged])
        documents = []
        for (where, example), (_, record) in zip(examples, records, strict=True):
            segments = [next(found) for _ in example.answers]
            document = self._make_document(where, example, [tokens for tokens, _ in segments])
            if document is None:
                tally.note(TOO_LONG, where)
                continue
            documents.append(document)
            assert isinstance(record, dict)  # since it has an example
            texts = {name: value for name, value in record.items() if name not in VALUES}
            for name in find_unwritten_fields(texts, "\n".join(text for _, text in segments)):
                tally.note(f"{UNWRITTEN}: {name}", where)
            if any(map(self._writer.special.search, example.texts())):
                tally.note(ESCAPED, where)
        return documents

    def _write_plain(self, judged: list[_Judged]) -> Iterator[tuple[MaskedTokens, str]]:
        """Yield the tokens and the text of each plain prompt with its answer."""
        texts = []
        answers_begin = []
        for each in judged:
            prompt = each.example.prompt
            said = each.answer.content
            assert isinstance(prompt, str)
            assert isinstance(said, str)
            texts.append(prompt + said.removesuffix(self._end_text))
            answers_begin.append(len(prompt))
        encodings = self._writer.plain.encode_batch(texts, add_special_tokens=False)
        for text, encoding, begin in zip(texts, encodings, answers_begin, strict=True):
            ids = [*self._opening, *encoding.ids, self._settings.end_of_document]
            ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            loss_mask = np.zeros(len(ids), dtype=np.bool_)
            loss_mask[len(self._opening) + int(ends.searchsorted(begin, "right")) :] = True
            yield (np.array(ids, dtype=self._settings.dtype), loss_mask), text + self._end_text

    @cached_property
    def _opening(self) -> list[int]:
        """Tokens that the tokenizer puts before every text, such as Llama's begin-of-text token."""
        ids: list[int] = self._tokenizer("")["input_ids"]
        return ids[: ids[:1] == [self._tokenizer.bos_token_id]]

    @cached_property
    def _end_text(self) -> str:
        """Text of the end-of-document token, which rows may have after an answer."""
        return str(self._tokenizer.eos_token)

    @cached_property
    def _tokenizer(self):  # type: ignore[no-untyped-def]
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._settings.tokenizer), trust_remote_code=False)

    def _write_turns(self, judged: list[_Judged], tally: Tally) -> Iterator[tuple[MaskedTokens, str]]:
        """Yield the tokens and the text of each conversation."""
        if not judged:
            return
        try:
            _ = self._writer.template
        except DataError as error:  # a ConfigError, since no record is to blame and none may be skipped
            raise ConfigError(f"{judged[0].where}: a row with turns needs a chat template: {error}") from None
        conversations = [each.example.build_conversation(each.answer) for each in judged]
        written = self._writer.write(
            [
                (each.where, self._writer.escape(conversation))
                for each, conversation in zip(judged, conversations, strict=True)
            ]
        )
        answers = self._writer.find_answers(written, tally)
        for each, conversation, text, found in zip(judged, conversations, written, answers, strict=True):
            prompt = len(each.example.prompt)
            own = [spans for n, spans in zip(conversation.answers, found, strict=True) if n >= prompt]
            ids, mask = self._writer.mask_tokens(text, [span for spans in own for span in spans])
            if self._config.learn_from == "content" and mask is not None and mask.any():
                end = int(np.flatnonzero(mask)[-1]) + 1  # no token is learned after this one
                ids = ids[:end]
                mask = mask[:end]
            yield (ids, mask), text.plain_text

    def _make_document(
        self, where: str, example: PreferenceExample, segments: list[MaskedTokens]
    ) -> TokenizedDocument | None:
        """Return the document of an example; `None` if it is too long and dropped."""
        masks = []
        for answer, (_, mask) in zip(example.answers, segments, strict=True):
            assert mask is not None  # since the prompt is not in the loss
            if not mask.any() or mask[0]:
                side = KIND_NAMES[answer.kind]
                missing = (
                    "answer has no token"
                    if not mask.any()
                    else "answer's first token has no prompt before it"
                )
                raise DataError(f"{where}: the {side} {missing}, as the chat template writes it")
            masks.append(mask)
        if len(segments) == 2 and np.array_equal(segments[0][0], segments[1][0]):
            raise DataError(f"{where}: the chosen and the rejected answer have the same tokens")
        sizes = [len(ids) for ids, _ in segments]
        config = self._config
        needed = sum(sizes)
        if config.is_unpaired:  # each prompt is repeated, with at least one token of another example's answer
            needed += sum(int(mask.argmax()) + 1 for mask in masks)
        limits = [("answer_length", config.answer_length, max(sizes))]
        limits.append(("sequence_length", config.sequence_length, needed))
        for key, room, least in limits:
            if room is None or least <= room:
                continue
            if config.too_long == "drop":
                return None
            raise ConfigError(
                f"{where}: the answers, each with its prompt, have {' + '.join(map(str, sizes))} tokens, and "
                f"data.{key} is {room:,}; set data.{key}={least}, or data.too_long=drop, which leaves the "
                "example out"
            )
        table = [
            (answer.kind, int(mask.argmax()), size)
            for answer, mask, size in zip(example.answers, masks, sizes, strict=True)
        ]
        return TokenizedDocument(
            np.concatenate([ids for ids, _ in segments]),
            np.concatenate(masks),
            example.key,
            np.array(table, dtype=np.int32),
            example.margin,
        )
