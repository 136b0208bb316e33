"""Reads a prompt and its judged answers from rows of preference data of any layout. No tokenizer is involved.

A row has a prompt in one of the fields PROMPTS, and either a pair of answers or one answer with a judgement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, overload

from pipeline.data.chat_layouts import (
    ASSISTANT,
    ROW,
    UNLEARNED,
    Conversation,
    Turn,
    count_common_prefix,
    has_field,
    read_content,
    read_instruction,
    read_system,
    read_tools,
    read_turns,
    without_nulls,
)
from pipeline.data.documents.records import Record
from pipeline.errors import DataError

# Kinds of segments; 0 means no segment.
CHOSEN = 1
REJECTED = 2
MISMATCHED = 3
KIND_NAMES = {CHOSEN: "chosen", REJECTED: "rejected", MISMATCHED: "mismatched"}
PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
LABELS = ("label", "kto_tag")
LABEL_TEXTS = {"true": True, "1": True, "false": False, "0": False}
SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
MARGIN = "margin"
TextOrTurns = str | list[Turn]  # plain text, or turns


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer with its judgement.

    Attributes:
        kind: Judgement, CHOSEN or REJECTED.
        content: Plain text or turns, the same as the prompt.
    """

    kind: int
    content: TextOrTurns


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt and its judged answers.

    Attributes:
        prompt: Plain text or turns.
        answers: A chosen and a rejected answer, or one answer of either kind.
        margin: Difference between the scores of the chosen and the rejected answer; `None` if not known.
        tools: Functions that the assistant may call, for the template; `None` if there are none.
    """

    prompt: TextOrTurns
    answers: tuple[JudgedAnswer, ...]
    margin: float | None
    tools: list[Any] | None

    @property
    def key(self) -> bytes:
        """Bytes that identify the example, independent of layout, template and tokenizer."""
        answers = [[answer.kind, _without_weights(answer.content)] for answer in self.answers]
        content = [_without_weights(self.prompt), answers, self.margin]
        if self.tools is not None:
            content.append(self.tools)
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode()

    def texts(self) -> Iterator[str]:
        """Yield the texts of the prompt and of each answer."""
        for said in (self.prompt, *(answer.content for answer in self.answers)):
            yield from [said] if isinstance(said, str) else (turn["content"] for turn in said)

    def build_conversation(self, answer: JudgedAnswer) -> Conversation:
        """Return the conversation of prompt and answer, which must be turns."""
        assert not isinstance(self.prompt, str)
        assert not isinstance(answer.content, str)
        turns = [*self.prompt, *answer.content]
        unlearned = frozenset(number for number, turn in enumerate(turns) if UNLEARNED in turn)
        return Conversation(_without_weights(turns), self.tools, unlearned)


def read_example(where: str, record: Record, layout: str, *, unpaired: bool) -> PreferenceExample:
    """Return the example of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of PREFERENCE_LAYOUTS; or `auto`, the first field of PROMPTS that the row has.
        unpaired: Whether one answer with a judgement is an example.

    Raises:
        DataError: The row has no example in this layout, an answer is missing or empty, both answers are the
            same, or they do not share the prompt.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: got a plain string, expected a row with a prompt and answers; for plain text use "
            "data.kind: text"
        )
    row: dict[str, Any] = without_nulls(record)
    if layout == ROW:
        return _read_row(where, row, unpaired)
    field, is_plain = _find_prompt(where, row, layout)
    pair = next((pair for pair in PAIRS if any(has_field(row, side) for side in pair)), None)
    if pair is None:
        example = _read_unpaired(where, row, field, is_plain, unpaired)
    else:
        example = _read_pair(where, row, field, pair, is_plain)
    for answer in example.answers:
        _refuse_empty(where, KIND_NAMES[answer.kind] if pair is not None else "judged", answer.content)
    if not example.prompt:
        raise DataError(f"{where}: the prompt is empty; an answer's first token is predicted from it")
    if len(example.answers) == 2 and example.answers[0].content == example.answers[1].content:
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    try:
        _ = example.key
    except (
        UnicodeEncodeError
    ) as error:  # half of a surrogate pair, which JSON allows and no tokenizer accepts
        raise DataError(f"{where}: the row holds no valid text: {error.reason}") from None
    return example


def _find_prompt(where: str, record: dict[str, Any], layout: str) -> tuple[str | None, bool]:
    """Return the field of the prompt, and whether strings are plain text rather than a user's turn.

    The field is `None` if the answers are whole conversations.
    """
    has_pair = any(has_field(record, side) for pair in PAIRS for side in pair)
    fields = PROMPTS if layout == "auto" else PREFERENCE_LAYOUTS[layout]
    field = next((field for field in fields if has_field(record, field)), None)
    if field is None and not (has_pair and layout in ("auto", "trl")):
        names = ", ".join(map(repr, record)) or "none"
        asked = "any known layout" if layout == "auto" else f"data.layout {layout}"
        expected = " or ".join(map(repr, fields))
        raise DataError(
            f"{where}: no prompt in {asked}; its fields: {names}; expected {expected} beside 'chosen' and "
            "'rejected'"
        )
    return field, field in (None, "prompt") and layout != "prompt_pairs"


def _read_pair(
    where: str, record: dict[str, Any], field: str | None, pair: tuple[str, str], is_plain: bool
) -> PreferenceExample:
    missing = next((side for side in pair if not has_field(record, side)), None)
    if missing is not None:
        raise DataError(f"{where}: a pair with one side missing: there is no {missing!r}")
    chosen, rejected = [_read_said(where, side, record[side]) for side in pair]
    prompt = None if field is None else PROMPTS[field](where, record)
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        prompt, chosen, rejected = _split_text(where, pair, chosen, rejected)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        if not (is_plain and isinstance(prompt, str) and not record.get("system")):
            chosen = _as_answer(chosen)
            rejected = _as_answer(rejected)
    else:
        chosen = _as_answer(chosen)
        rejected = _as_answer(rejected)
        if prompt is None or any(said and said[0]["role"] != ASSISTANT for said in (chosen, rejected)):
            shared, chosen, rejected = _split_turns(where, pair, chosen, rejected)
            _refuse_other_prompt(where, field, prompt, shared)
            prompt = shared
    assert prompt is not None
    if not isinstance(chosen, str):
        prompt = _with_system(where, record, prompt)
    answers = JudgedAnswer(CHOSEN, chosen), JudgedAnswer(REJECTED, rejected)
    return PreferenceExample(prompt, answers, _read_margin(where, record), read_tools(where, record))


def _read_unpaired(
    where: str, record: dict[str, Any], field: str | None, is_plain: bool, unpaired: bool
) -> PreferenceExample:
    label = next((label for label in LABELS if _has_value(record, label)), None)
    if label is None:
        raise DataError(
            f"{where}: no answers: its fields: {', '.join(map(repr, record))}; expected 'chosen' and "
            "'rejected', or one answer and 'label' or 'kto_tag'"
        )
    if not unpaired:
        raise DataError(
            f"{where}: one answer with a {label!r}, and data.examples is pairs; to train on such rows "
            "with kto, set data.examples: unpaired"
        )
    kind = CHOSEN if _read_label(where, label, record[label]) else REJECTED
    assert field is not None  # only a pair of whole conversations has no prompt field
    prompt = PROMPTS[field](where, record)
    given = next((name for name in ("completion", "output", "response") if has_field(record, name)), None)
    if given is None:
        if isinstance(prompt, str) or not prompt or prompt[-1]["role"] != ASSISTANT:
            raise DataError(f"{where}: no answer beside the prompt; expected 'completion' or 'output'")
        said: TextOrTurns = prompt[-1:]
        prompt = prompt[:-1]
    else:
        said = _read_said(where, given, record[given])
    if not (isinstance(prompt, str) and isinstance(said, str) and is_plain and not record.get("system")):
        prompt = _with_system(where, record, prompt)
        said = _as_answer(said)
    return PreferenceExample(prompt, (JudgedAnswer(kind, said),), None, read_tools(where, record))


def _read_row(where: str, row: dict[str, Any], unpaired: bool) -> PreferenceExample:
    """Return an example for a template that reads the row itself.

    Each turn has the row. The content of an answer is the name of its side.
    """
    prompt = [{"role": "user", "content": "", ROW: row}]
    label = next((label for label in LABELS if _has_value(row, label)), None) if unpaired else None
    if label is None:
        kinds = [CHOSEN, REJECTED]
    else:
        kinds = [CHOSEN if _read_label(where, label, row[label]) else REJECTED]
    said = ["completion" if label else KIND_NAMES[kind] for kind in kinds]
    answers = (
        JudgedAnswer(kind, [{"role": ASSISTANT, "content": side, ROW: row}])
        for kind, side in zip(kinds, said, strict=True)
    )
    return PreferenceExample(prompt, tuple(answers), None, None)


def _read_said(where: str, field: str, value: Any) -> TextOrTurns:
    """Return a string unchanged; return a turn or a list of turns as turns."""
    if isinstance(value, str):
        return value
    return read_turns(where, field, [value] if isinstance(value, dict) else value)


@overload
def _without_weights(said: list[Turn]) -> list[Turn]: ...
@overload
def _without_weights(said: TextOrTurns) -> TextOrTurns: ...
def _without_weights(said: TextOrTurns) -> TextOrTurns:
    """Return text or turns without the mark UNLEARNED."""
    if isinstance(said, str):
        return said
    return [{key: value for key, value in turn.items() if key != UNLEARNED} for turn in said]


def _as_answer(said: TextOrTurns) -> list[Turn]:
    return [{"role": ASSISTANT, "content": said}] if isinstance(said, str) else said


def _with_system(where: str, record: dict[str, Any], prompt: TextOrTurns) -> list[Turn]:
    """Return the prompt as turns, after the row's `system` turn unless the prompt begins with one."""
    if not prompt:
        return []
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return turns if turns[0]["role"] == "system" else read_system(where, record) + turns


def _split_turns(
    where: str, pair: tuple[str, str], chosen: list[Turn], rejected: list[Turn]
) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return the turns with which both conversations begin, and the remaining turns of each."""
    count = count_common_prefix(_without_weights(chosen), _without_weights(rejected))
    if count == len(chosen) == len(rejected):
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    if count == 0 or any(said[count:] and said[count]["role"] != ASSISTANT for said in (chosen, rejected)):
        raise DataError(
            f"{where}: {pair[0]!r} and {pair[1]!r} do not share a prompt: turn {count + 1} is no answer and "
            "differs"
        )
    return chosen[:count], chosen[count:], rejected[count:]


def _split_text(where: str, pair: tuple[str, str], chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the text with which both answers begin, up to a space, and the remaining text of each."""
    count = count_common_prefix(chosen, rejected)
    if count and count < max(len(chosen), len(rejected)) and chosen[count - 1] == " ":
        count -= 1  # a word and the space before it are one token
    if count == 0:
        raise DataError(
            f"{where}: {pair[0]!r} and {pair[1]!r} do not share a prompt: their texts differ at once"
        )
    return chosen[:count], chosen[count:], rejected[count:]


def _refuse_other_prompt(
    where: str, field: str | None, prompt: TextOrTurns | None, shared: list[Turn]
) -> None:
    """Raise DataError if the conversations do not begin with the row's prompt."""
    if isinstance(prompt, str):
        is_same = any(turn["content"].strip() == prompt.strip() for turn in shared)
    else:
        is_same = prompt is None or shared[: len(prompt)] == prompt
    if not is_same:
        raise DataError(f"{where}: the answers are whole conversations that do not begin with {field!r}")


def _refuse_empty(where: str, side: str, said: TextOrTurns) -> None:
    if isinstance(said, str):
        is_empty = not said.strip()
    else:
        answers = [turn for turn in said if turn["role"] == ASSISTANT]
        is_empty = not any(turn["content"].strip() or turn.get("tool_calls") for turn in answers)
    if is_empty:
        raise DataError(f"{where}: the {side} answer is empty")


def _has_value(record: dict[str, Any], field: str) -> bool:
    """Return whether the row has a value in a field of labels or numbers; an empty CSV cell is no value."""
    return record.get(field) not in (None, "")


def _read_label(where: str, field: str, value: Any) -> bool:
    """Return a judgement, which is text in CSV files."""
    label = LABEL_TEXTS.get(value.lower()) if isinstance(value, str) else value
    if label not in (True, False):
        raise DataError(f"{where}: field {field!r} is {value!r}; expected true or false")
    return bool(label)


def _read_number(where: str, field: str, value: Any) -> float:
    """Return a number, which is text in CSV files."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise DataError(f"{where}: field {field!r} is {value!r}; expected a number")
    return number


def _read_margin(where: str, record: dict[str, Any]) -> float | None:
    if _has_value(record, MARGIN):
        return _read_number(where, MARGIN, record[MARGIN])
    pair = next((pair for pair in SCORES if all(_has_value(record, side) for side in pair)), None)
    if pair is None:
        return None
    chosen, rejected = (_read_number(where, side, record[side]) for side in pair)
    return chosen - rejected


# Fields of the prompt and their readers. Rows often have several; the first of them is used.
PROMPTS: dict[str, Callable[[str, dict[str, Any]], TextOrTurns]] = {
    "prompt": lambda where, record: _read_said(where, "prompt", record["prompt"]),
    "conversations": lambda where, record: read_turns(where, "conversations", record["conversations"]),
    "instruction": read_instruction,
    "question": lambda where, record: read_content(where, "field 'question'", record["question"]),
    "input": lambda where, record: read_content(where, "field 'input'", record["input"]),
    "messages": lambda where, record: read_turns(where, "messages", record["messages"]),
}
PREFERENCE_LAYOUTS: dict[str, tuple[str, ...]] = {
    "trl": ("prompt",),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction",),
    "argilla": ("instruction",),
    "intel": ("question",),
    "icr": ("input",),
    "prompt_pairs": ("prompt",),
}
