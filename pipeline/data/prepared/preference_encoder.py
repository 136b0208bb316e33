"""Encodes judged answers as tokens. Each answer follows a copy of the prompt, which is not in the loss.

The answers of a row are in one document, without cuts, or the row is dropped. The tally counts dropped rows.
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
    LABEL_FIELDS,
    MARGIN_FIELD,
    SCORE_FIELDS,
    JudgedAnswer,
    PreferenceExample,
    read_example,
)
from pipeline.data.prepared.chat_encoder import ConversationWriter, MaskedTokens
from pipeline.data.prepared.encoder import EncoderSettings, Records, TokenizedDocument
from pipeline.errors import ConfigError, DataError

TOO_LONG = "examples dropped: longer than data.sequence_length together, or than data.answer_length alone"
UNWRITTEN = "examples with a field that the tokens do not contain in full"
ESCAPED = "examples with a special token read as text"
# Fields with a judgement or a number, which are text in CSV files. The tokens do not contain them.
JUDGEMENT_FIELDS = frozenset({*LABEL_FIELDS, *(name for pair in SCORE_FIELDS for name in pair), MARGIN_FIELD})


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
        """Return a document for each example that is not dropped, in order.

        Raises:
            DataError: A record has no example, or the answers of an example have the same tokens.
            ConfigError: An example is too long and `data.too_long` is `error`; or an example has turns, and
                there is no chat template or the answers cannot be located in the template's text.
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
        encoded = iter([next(plain if each.is_plain else turns) for each in judged])
        documents = []
        for (where, example), (_, record) in zip(examples, records, strict=True):
            segments = [next(encoded) for _ in example.answers]
            document = self._make_document(where, example, [tokens for tokens, _ in segments])
            if document is None:
                tally.note(TOO_LONG, where)
                continue
            documents.append(document)
            assert isinstance(record, dict)  # since it has an example
            text_fields = {name: value for name, value in record.items() if name not in JUDGEMENT_FIELDS}
            for name in find_unwritten_fields(text_fields, "\n".join(text for _, text in segments)):
                tally.note(f"{UNWRITTEN}: {name}", where)
            if any(map(self._writer.special_pattern.search, example.texts())):
                tally.note(ESCAPED, where)
        return documents

    def _write_plain(self, judged: list[_Judged]) -> Iterator[tuple[MaskedTokens, str]]:
        """Yield the tokens and the text of each plain prompt with its answer."""
        texts = []
        prompt_lengths = []  # in characters
        for each in judged:
            prompt = each.example.prompt
            answer = each.answer.content
            assert isinstance(prompt, str)
            assert isinstance(answer, str)
            texts.append(prompt + answer.removesuffix(self._end_text))
            prompt_lengths.append(len(prompt))
        encodings = self._writer.plain_tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding, prompt_length in zip(texts, encodings, prompt_lengths, strict=True):
            ids = [*self._opening_ids, *encoding.ids, self._settings.end_of_document]
            ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
            first = len(self._opening_ids) + int(ends.searchsorted(prompt_length, "right"))
            loss_mask = np.zeros(len(ids), dtype=np.bool_)
            loss_mask[first:] = True
            yield (np.array(ids, dtype=self._settings.dtype), loss_mask), text + self._end_text

    @cached_property
    def _opening_ids(self) -> list[int]:
        """The begin-of-text token, in a list, if the tokenizer puts it before every text; otherwise empty."""
        ids: list[int] = self._tokenizer("")["input_ids"]
        has_bos = ids[:1] == [self._tokenizer.bos_token_id]
        return ids[:1] if has_bos else []

    @cached_property
    def _end_text(self) -> str:
        """Text of the end-of-document token, which rows may have after an answer."""
        return str(self._tokenizer.eos_token)

    @cached_property
    def _tokenizer(self):  # type: ignore[no-untyped-def]
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._settings.tokenizer), trust_remote_code=False)

    def _write_turns(self, judged: list[_Judged], tally: Tally) -> Iterator[tuple[MaskedTokens, str]]:
        """Yield the tokens and the text of each conversation.

        Raises:
            ConfigError: There is a conversation, and no chat template or no valid one.
        """
        if not judged:
            return
        try:
            _ = self._writer.template
        except DataError as error:  # convert it, because rows with a DataError may be skipped
            raise ConfigError(f"{judged[0].where}: a row with turns needs a chat template: {error}") from None
        conversations = [each.example.build_conversation(each.answer) for each in judged]
        written = self._writer.write(
            [
                (each.where, self._writer.escape(conversation))
                for each, conversation in zip(judged, conversations, strict=True)
            ]
        )
        answers = self._writer.find_answers(written, tally)
        learns_content = self._config.learn_from == "content"
        for each, conversation, text, spans_by_answer in zip(
            judged, conversations, written, answers, strict=True
        ):
            num_prompt_turns = len(each.example.prompt)
            judged_spans = [
                span
                for number, spans in zip(conversation.answers, spans_by_answer, strict=True)
                if number >= num_prompt_turns
                for span in spans
            ]
            ids, mask = self._writer.mask_tokens(text, judged_spans)
            if learns_content and mask is not None and mask.any():
                end = int(np.flatnonzero(mask)[-1]) + 1  # no token after this one is in the loss
                ids = ids[:end]
                mask = mask[:end]
            yield (ids, mask), text.plain_text

    def _make_document(
        self, where: str, example: PreferenceExample, segments: list[MaskedTokens]
    ) -> TokenizedDocument | None:
        """Return the document of an example; `None` if it is too long and dropped.

        Raises:
            DataError: No token of an answer is in the loss, there is no prompt before it, or both answers
                have the same tokens.
            ConfigError: The example is too long, and `data.too_long` is `error`.
        """
        masks = []
        for answer, (_, mask) in zip(example.answers, segments, strict=True):
            assert mask is not None  # since the prompt is not in the loss
            side = KIND_NAMES[answer.kind]
            if not mask.any():
                raise DataError(
                    f"{where}: no token of the {side} answer is in the loss: the chat template does not "
                    "write the answer, or the row gives it the weight 0"
                )
            if mask[0]:
                raise DataError(
                    f"{where}: the chat template writes no prompt before the {side} answer; its first token "
                    "cannot be predicted"
                )
            masks.append(mask)
        if len(segments) == 2 and np.array_equal(segments[0][0], segments[1][0]):
            raise DataError(f"{where}: the chosen and the rejected answer have the same tokens")
        lengths = [len(ids) for ids, _ in segments]
        config = self._config
        needed = sum(lengths)
        if config.is_unpaired:  # each prompt is repeated, with at least one token of another example's answer
            needed += sum(int(mask.argmax()) + 1 for mask in masks)
        limits = [
            ("answer_length", config.answer_length, max(lengths)),
            ("sequence_length", config.sequence_length, needed),
        ]
        for key, limit, minimum in limits:
            if limit is None or minimum <= limit:
                continue
            if config.too_long == "drop":
                return None
            sizes = " + ".join(map(str, lengths))
            raise ConfigError(
                f"{where}: the answers, each with its prompt, have {sizes} tokens, and data.{key} is "
                f"{limit:,}; set data.{key}={minimum}, or data.too_long=drop to drop the example"
            )
        table = [
            (answer.kind, int(mask.argmax()), length)
            for answer, mask, length in zip(example.answers, masks, lengths, strict=True)
        ]
        return TokenizedDocument(
            ids=np.concatenate([ids for ids, _ in segments]),
            loss_mask=np.concatenate(masks),
            key=example.key,
            segments=np.array(table, dtype=np.int32),
            margin=example.margin,
        )
