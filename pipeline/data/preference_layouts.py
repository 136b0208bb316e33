"""Rows of preference data -> a prompt and its judged answers: one form, whatever the row looks like.

Knows no tokenizer. A row has a prompt, under one of PROMPTS, and a pair of answers, or one that was judged.
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
    common_prefix_length,
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

CHOSEN, REJECTED, MISMATCHED = 1, 2, 3  # kinds of a segment; 0: there is none
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
    """What was judged.

    Attributes:
        kind: CHOSEN or REJECTED.
        said: Plain text, or turns, as the prompt is.
    """

    kind: int
    said: TextOrTurns


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt and its answers.

    Attributes:
        prompt: Plain text, or turns.
        answers: A chosen and a rejected one, or one of either kind.
        margin: By how much the chosen one is better, where that is known.
        tools: What the assistant may call, for the template.
    """

    prompt: TextOrTurns
    answers: tuple[JudgedAnswer, ...]
    margin: float | None
    tools: list[Any] | None

    @property
    def key(self) -> bytes:
        """Equal for equal examples, whatever the row, the template and the tokenizer look like."""
        answers = [[answer.kind, _without_weights(answer.said)] for answer in self.answers]
        content = [_without_weights(self.prompt), answers, self.margin]
        if self.tools is not None:
            content.append(self.tools)
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode()

    def texts(self) -> Iterator[str]:
        """Return all that is said in it, the prompt once."""
        for said in (self.prompt, *(answer.said for answer in self.answers)):
            yield from [said] if isinstance(said, str) else (turn["content"] for turn in said)

    def conversation(self, answer: JudgedAnswer) -> Conversation:
        """Return prompt and answer, where they are turns."""
        assert not isinstance(self.prompt, str)
        assert not isinstance(answer.said, str)
        turns = [*self.prompt, *answer.said]
        unlearned = frozenset(number for number, turn in enumerate(turns) if UNLEARNED in turn)
        return Conversation(_without_weights(turns), self.tools, unlearned)


def read_example(where: str, record: Record, layout: str, *, unpaired: bool) -> PreferenceExample:
    """Return the example of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of LAYOUTS, or `auto`: the first prompt of PROMPTS that the row has, plain or not.
        unpaired: One answer with a judgement is an example too.

    Raises:
        DataError: the row has none, or none in this layout; an answer is missing or empty; both are the same;
            the prompt is not that of both.
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
        _refuse_empty(where, KIND_NAMES[answer.kind] if pair is not None else "judged", answer.said)
    if not example.prompt:
        raise DataError(f"{where}: the prompt is empty; an answer's first token is predicted from it")
    if len(example.answers) == 2 and example.answers[0].said == example.answers[1].said:
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    try:
        _ = example.key
    except UnicodeEncodeError as error:  # half of a pair, as JSON can write it: no tokenizer takes it
        raise DataError(f"{where}: the row holds no valid text: {error.reason}") from None
    return example


def _find_prompt(where: str, record: dict[str, Any], layout: str) -> tuple[str | None, bool]:
    """Return the prompt's field (None: answers are whole conversations), and whether strings are plain."""
    has_pair = any(has_field(record, side) for pair in PAIRS for side in pair)
    fields = PROMPTS if layout == "auto" else LAYOUTS[layout]
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
            chosen, rejected = _as_answer(chosen), _as_answer(rejected)
    else:
        chosen, rejected = _as_answer(chosen), _as_answer(rejected)
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
            f"{where}: one answer with a {label!r}, and data.examples is pairs; kto learns from such: set "
            "data.examples: unpaired"
        )
    kind = CHOSEN if _read_label(where, label, record[label]) else REJECTED
    assert field is not None  # without a pair there is a prompt
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
        prompt, said = _with_system(where, record, prompt), _as_answer(said)
    return PreferenceExample(prompt, (JudgedAnswer(kind, said),), None, read_tools(where, record))


def _read_row(where: str, row: dict[str, Any], unpaired: bool) -> PreferenceExample:
    """Return an example whose template reads the row. Each turn has it; an answer's content is its side."""
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
    """Return a string, a turn or several."""
    if isinstance(value, str):
        return value
    return read_turns(where, field, [value] if isinstance(value, dict) else value)


@overload
def _without_weights(said: list[Turn]) -> list[Turn]: ...
@overload
def _without_weights(said: TextOrTurns) -> TextOrTurns: ...
def _without_weights(said: TextOrTurns) -> TextOrTurns:
    """Return turns without the note that they are not learned."""
    if isinstance(said, str):
        return said
    return [{key: value for key, value in turn.items() if key != UNLEARNED} for turn in said]


def _as_answer(said: TextOrTurns) -> list[Turn]:
    return [{"role": ASSISTANT, "content": said}] if isinstance(said, str) else said


def _with_system(where: str, record: dict[str, Any], prompt: TextOrTurns) -> list[Turn]:
    """Return the prompt as turns, behind the row's own `system` where it does not begin with another."""
    if not prompt:
        return []
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return turns if turns[0]["role"] == "system" else read_system(where, record) + turns


def _split_turns(
    where: str, pair: tuple[str, str], chosen: list[Turn], rejected: list[Turn]
) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return the turns that both begin with, and what each goes on with."""
    count = common_prefix_length(_without_weights(chosen), _without_weights(rejected))
    if count == len(chosen) == len(rejected):
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    if count == 0 or any(said[count:] and said[count]["role"] != ASSISTANT for said in (chosen, rejected)):
        raise DataError(
            f"{where}: {pair[0]!r} and {pair[1]!r} do not share a prompt: turn {count + 1} is no answer and "
            "differs"
        )
    return chosen[:count], chosen[count:], rejected[count:]


def _split_text(where: str, pair: tuple[str, str], chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the text that both begin with, up to a space, and what each goes on with."""
    count = common_prefix_length(chosen, rejected)
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
    """Raise DataError where the row's prompt is not what both conversations begin with."""
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
    """Return whether a row has something in a field that holds no text; an empty cell of CSV is nothing."""
    return record.get(field) not in (None, "")


def _read_label(where: str, field: str, value: Any) -> bool:
    """Return a judgement; of CSV it is text."""
    label = LABEL_TEXTS.get(value.lower()) if isinstance(value, str) else value
    if label not in (True, False):
        raise DataError(f"{where}: field {field!r} is {value!r}; expected true or false")
    return bool(label)


def _read_number(where: str, field: str, value: Any) -> float:
    """Return a number; of CSV it is text."""
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


# Fields that hold a prompt, in the order in which they are looked for: rows often have several.
PROMPTS: dict[str, Callable[[str, dict[str, Any]], TextOrTurns]] = {
    "prompt": lambda where, record: _read_said(where, "prompt", record["prompt"]),
    "conversations": lambda where, record: read_turns(where, "conversations", record["conversations"]),
    "instruction": read_instruction,
    "question": lambda where, record: read_content(where, "field 'question'", record["question"]),
    "input": lambda where, record: read_content(where, "field 'input'", record["input"]),
    "messages": lambda where, record: read_turns(where, "messages", record["messages"]),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "trl": ("prompt",),
    "sharegpt": ("conversations",),
    "messages": ("messages",),
    "alpaca": ("instruction",),
    "argilla": ("instruction",),
    "intel": ("question",),
    "icr": ("input",),
    "prompt_pairs": ("prompt",),
}
