"""Reads a prompt and its judged answers from rows of preference data of any layout. No tokenizer is involved.

A row has a prompt in a field of PROMPT_READERS, and a pair of answers or one answer with a judgement. If the
answers of a pair are conversations or texts that begin with the prompt, the row needs no prompt field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, overload

from pipeline.data.chat_layouts import (
    ASSISTANT,
    NOT_IN_LOSS,
    ROW_FIELD,
    ROW_LAYOUT,
    Conversation,
    Turn,
    count_common_prefix,
    has_field,
    read_content,
    read_instruction,
    read_system,
    read_tools,
    read_turns,
    remove_nulls,
)
from pipeline.data.documents.records import Record
from pipeline.errors import DataError

# Kinds of segments (a prompt with an answer); 0 means no segment.
CHOSEN = 1
REJECTED = 2
MISMATCHED = 3  # another example's answer
KIND_NAMES = {CHOSEN: "chosen", REJECTED: "rejected", MISMATCHED: "mismatched"}
ANSWER_FIELDS = ("completion", "output", "response")  # fields of an unpaired answer
PAIR_FIELDS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
LABEL_FIELDS = ("label", "kto_tag")
LABEL_TEXTS = {"true": True, "1": True, "false": False, "0": False}
SCORE_FIELDS = (
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"),
)
MARGIN_FIELD = "margin"
TextOrTurns = str | list[Turn]


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer with its judgement.

    Attributes:
        kind: CHOSEN or REJECTED.
        content: Plain text if the prompt is plain text; otherwise turns.
    """

    kind: int
    content: TextOrTurns


@dataclass(frozen=True)
class PreferenceExample:
    """A prompt and its judged answers.

    Attributes:
        prompt: Plain text or turns.
        answers: A chosen and a rejected answer, or one answer of either kind.
        margin: Score of the chosen answer minus that of the rejected one; `None` if not known.
        tools: Functions that the assistant may call; `None` if there are none.
    """

    prompt: TextOrTurns
    answers: tuple[JudgedAnswer, ...]
    margin: float | None
    tools: list[Any] | None

    @property
    def key(self) -> bytes:
        """Bytes that identify the example, independent of layout, template and tokenizer."""
        answers = [[answer.kind, _remove_loss_marks(answer.content)] for answer in self.answers]
        content = [_remove_loss_marks(self.prompt), answers, self.margin]
        if self.tools is not None:
            content.append(self.tools)
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode()

    def texts(self) -> Iterator[str]:
        """Yield the texts of the prompt and of each answer."""
        for content in (self.prompt, *(answer.content for answer in self.answers)):
            if isinstance(content, str):
                yield content
            else:
                yield from (turn["content"] for turn in content)

    def build_conversation(self, answer: JudgedAnswer) -> Conversation:
        """Return the conversation of the prompt and an answer; both must be turns."""
        assert not isinstance(self.prompt, str)
        assert not isinstance(answer.content, str)
        turns = [*self.prompt, *answer.content]
        unlearned = frozenset(number for number, turn in enumerate(turns) if NOT_IN_LOSS in turn)
        return Conversation(_remove_loss_marks(turns), self.tools, unlearned)


def read_example(where: str, record: Record, layout: str, *, unpaired: bool) -> PreferenceExample:
    """Return the example of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of PREFERENCE_LAYOUTS; `auto` for the first field of PROMPT_READERS that the row has; or
            ROW_LAYOUT for turns with the row itself under ROW_FIELD.
        unpaired: Whether one answer with a judgement is an example; otherwise it is an error.

    Raises:
        DataError: The row has no example in this layout, an answer is missing or empty, both answers are the
            same, or they do not share the prompt.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: got a plain string, expected a row with a prompt and answers; for plain text use "
            "data.kind: text"
        )
    row: dict[str, Any] = remove_nulls(record)
    if layout == ROW_LAYOUT:
        return _read_whole_row(where, row, unpaired)
    field, is_plain = _find_prompt(where, row, layout)
    pair = next((pair for pair in PAIR_FIELDS if any(has_field(row, side) for side in pair)), None)
    if pair is None:
        example = _read_unpaired(where, row, field, is_plain, unpaired)
    else:
        example = _read_pair(where, row, field, pair, is_plain)
    for answer in example.answers:
        side = "judged" if pair is None else KIND_NAMES[answer.kind]
        _refuse_empty(where, side, answer.content)
    if not example.prompt:
        raise DataError(f"{where}: the prompt is empty; an answer's first token is predicted from it")
    if len(example.answers) == 2 and example.answers[0].content == example.answers[1].content:
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    try:
        _ = example.key
    # The text has half of a surrogate pair, which JSON allows and no tokenizer accepts.
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the row is not valid text: {error.reason}") from None
    return example


def _find_prompt(where: str, record: dict[str, Any], layout: str) -> tuple[str | None, bool]:
    """Return the field of the prompt, and whether its string is plain text; otherwise it is a user's turn.

    The field is `None` if the answers contain the prompt.

    Raises:
        DataError: The row has no prompt in this layout.
    """
    has_pair = any(has_field(record, side) for pair in PAIR_FIELDS for side in pair)
    fields = PROMPT_READERS if layout == "auto" else PREFERENCE_LAYOUTS[layout]
    field = next((field for field in fields if has_field(record, field)), None)
    if field is None and not (has_pair and layout in ("auto", "trl")):
        names = ", ".join(map(repr, record)) or "none"
        expected_layout = "any known layout" if layout == "auto" else f"data.layout {layout}"
        expected = " or ".join(map(repr, fields))
        raise DataError(
            f"{where}: no prompt in {expected_layout}; the row's fields: {names}; expected {expected} beside "
            "'chosen' and 'rejected'"
        )
    return field, field in (None, "prompt") and layout != "prompt_pairs"


def _read_pair(
    where: str, record: dict[str, Any], field: str | None, pair: tuple[str, str], is_plain: bool
) -> PreferenceExample:
    """Return the example of a row with a pair of answers.

    Args:
        where: File and line, for messages.
        record: The row.
        field: Field of the prompt; `None` if the answers contain the prompt.
        pair: Fields of the chosen and the rejected answer.
        is_plain: Whether a string is plain text, and not the content of a turn.

    Raises:
        DataError: An answer is missing, or the answers do not share the prompt.
    """
    missing = next((side for side in pair if not has_field(record, side)), None)
    if missing is not None:
        raise DataError(f"{where}: a pair with one side missing: there is no {missing!r}")
    chosen, rejected = [_read_text_or_turns(where, side, record[side]) for side in pair]
    prompt = None if field is None else PROMPT_READERS[field](where, record)
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        prompt, chosen, rejected = _split_text(where, pair, chosen, rejected)
    elif isinstance(chosen, str) and isinstance(rejected, str):
        stays_plain = is_plain and isinstance(prompt, str) and not record.get("system")
        if not stays_plain:
            chosen = _convert_to_answer(chosen)
            rejected = _convert_to_answer(rejected)
    else:
        chosen = _convert_to_answer(chosen)
        rejected = _convert_to_answer(rejected)
        has_prompt_turns = any(turns and turns[0]["role"] != ASSISTANT for turns in (chosen, rejected))
        if prompt is None or has_prompt_turns:
            shared, chosen, rejected = _split_turns(where, pair, chosen, rejected)
            _refuse_other_prompt(where, field, prompt, shared)
            prompt = shared
    assert prompt is not None
    if not isinstance(chosen, str):
        prompt = _prepend_system_turn(where, record, prompt)
    answers = (JudgedAnswer(CHOSEN, chosen), JudgedAnswer(REJECTED, rejected))
    return PreferenceExample(prompt, answers, _read_margin(where, record), read_tools(where, record))


def _read_unpaired(
    where: str, record: dict[str, Any], field: str | None, is_plain: bool, unpaired: bool
) -> PreferenceExample:
    """Return the example of a row with one answer and a judgement.

    Args:
        where: File and line, for messages.
        record: The row.
        field: Field of the prompt.
        is_plain: Whether a string is plain text, and not the content of a turn.
        unpaired: Whether the recipe expects such rows.

    Raises:
        DataError: There is no judgement or no answer, or the recipe expects pairs.
    """
    label = next((label for label in LABEL_FIELDS if _has_value(record, label)), None)
    if label is None:
        raise DataError(
            f"{where}: no answers; the row's fields: {', '.join(map(repr, record))}; expected 'chosen' and "
            "'rejected', or one answer and 'label' or 'kto_tag'"
        )
    if not unpaired:
        raise DataError(
            f"{where}: got one answer with a {label!r}, expected a pair (data.examples: pairs); to train on "
            "such rows with kto, set data.examples: unpaired"
        )
    kind = CHOSEN if _read_label(where, label, record[label]) else REJECTED
    assert field is not None  # only the prompt of a pair may have no field
    prompt = PROMPT_READERS[field](where, record)
    answer_field = next((name for name in ANSWER_FIELDS if has_field(record, name)), None)
    if answer_field is None:
        if isinstance(prompt, str) or not prompt or prompt[-1]["role"] != ASSISTANT:
            raise DataError(f"{where}: no answer beside the prompt; expected 'completion' or 'output'")
        answer: TextOrTurns = prompt[-1:]
        prompt = prompt[:-1]
    else:
        answer = _read_text_or_turns(where, answer_field, record[answer_field])
    is_all_text = isinstance(prompt, str) and isinstance(answer, str)
    stays_plain = is_all_text and is_plain and not record.get("system")
    if not stays_plain:
        prompt = _prepend_system_turn(where, record, prompt)
        answer = _convert_to_answer(answer)
    return PreferenceExample(prompt, (JudgedAnswer(kind, answer),), None, read_tools(where, record))


def _read_whole_row(where: str, row: dict[str, Any], unpaired: bool) -> PreferenceExample:
    """Return an example for a template that reads the row itself.

    Each turn has the row. The content of an answer is `chosen` or `rejected`, or `completion` for a row with
    one answer.
    """
    prompt = [{"role": "user", "content": "", ROW_FIELD: row}]
    label = next((label for label in LABEL_FIELDS if _has_value(row, label)), None) if unpaired else None
    if label is None:
        contents = {CHOSEN: KIND_NAMES[CHOSEN], REJECTED: KIND_NAMES[REJECTED]}
    else:
        kind = CHOSEN if _read_label(where, label, row[label]) else REJECTED
        contents = {kind: "completion"}
    answers = (
        JudgedAnswer(kind, [{"role": ASSISTANT, "content": content, ROW_FIELD: row}])
        for kind, content in contents.items()
    )
    return PreferenceExample(prompt, tuple(answers), margin=None, tools=None)


def _read_text_or_turns(where: str, field: str, value: Any) -> TextOrTurns:
    """Return a string unchanged; return a turn or a list of turns as turns."""
    if isinstance(value, str):
        return value
    return read_turns(where, field, [value] if isinstance(value, dict) else value)


@overload
def _remove_loss_marks(content: list[Turn]) -> list[Turn]: ...
@overload
def _remove_loss_marks(content: TextOrTurns) -> TextOrTurns: ...
def _remove_loss_marks(content: TextOrTurns) -> TextOrTurns:
    """Return text or turns without the mark NOT_IN_LOSS."""
    if isinstance(content, str):
        return content
    return [{key: value for key, value in turn.items() if key != NOT_IN_LOSS} for turn in content]


def _convert_to_answer(content: TextOrTurns) -> list[Turn]:
    """Return turns; convert text to a turn of the assistant."""
    return [{"role": ASSISTANT, "content": content}] if isinstance(content, str) else content


def _prepend_system_turn(where: str, record: dict[str, Any], prompt: TextOrTurns) -> list[Turn]:
    """Return the prompt as turns, after the row's `system` turn unless the prompt has one or is empty."""
    if not prompt:
        return []
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return turns if turns[0]["role"] == "system" else read_system(where, record) + turns


def _split_turns(
    where: str, pair: tuple[str, str], chosen: list[Turn], rejected: list[Turn]
) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Return the turns with which both conversations begin, and the remaining turns of each."""
    count = count_common_prefix(_remove_loss_marks(chosen), _remove_loss_marks(rejected))
    if count == len(chosen) == len(rejected):
        raise DataError(f"{where}: the chosen and the rejected answer are the same; nothing is preferred")
    next_turns = [turns[count] for turns in (chosen, rejected) if len(turns) > count]
    if count == 0 or any(turn["role"] != ASSISTANT for turn in next_turns):
        reason = (
            f"turn {count + 1} differs and is not an assistant's" if count else "their first turns differ"
        )
        raise DataError(f"{where}: {pair[0]!r} and {pair[1]!r} do not share a prompt: {reason}")
    return chosen[:count], chosen[count:], rejected[count:]


def _split_text(where: str, pair: tuple[str, str], chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return the text with which both answers begin, up to a space, and the remaining text of each."""
    count = count_common_prefix(chosen, rejected)
    if count and count < max(len(chosen), len(rejected)) and chosen[count - 1] == " ":
        count -= 1  # a word and the space before it are one token
    if count == 0:
        raise DataError(
            f"{where}: {pair[0]!r} and {pair[1]!r} do not share a prompt: their first characters differ"
        )
    return chosen[:count], chosen[count:], rejected[count:]


def _refuse_other_prompt(
    where: str, field: str | None, prompt: TextOrTurns | None, shared: list[Turn]
) -> None:
    """Raise DataError if the answers' `shared` turns do not begin with the row's prompt."""
    if isinstance(prompt, str):
        is_same = any(turn["content"].strip() == prompt.strip() for turn in shared)
    else:
        is_same = prompt is None or shared[: len(prompt)] == prompt
    if not is_same:
        raise DataError(
            f"{where}: the answers are whole conversations that do not begin with the prompt in {field!r}; "
            "make them equal, or remove the field"
        )


def _refuse_empty(where: str, side: str, content: TextOrTurns) -> None:
    if isinstance(content, str):
        is_empty = not content.strip()
    else:
        answers = [turn for turn in content if turn["role"] == ASSISTANT]
        is_empty = not any(turn["content"].strip() or turn.get("tool_calls") for turn in answers)
    if is_empty:
        raise DataError(f"{where}: the {side} answer is empty")


def _has_value(record: dict[str, Any], field: str) -> bool:
    """Return whether the row has a value in a field of labels or numbers; an empty CSV cell is no value."""
    value = record.get(field)
    return value is not None and value != ""


def _read_label(where: str, field: str, value: Any) -> bool:
    """Return whether an answer is judged good. The value is text in CSV files.

    Raises:
        DataError: The value is neither true nor false.
    """
    label = LABEL_TEXTS.get(value.lower()) if isinstance(value, str) else value
    if label not in (True, False):
        raise DataError(f"{where}: field {field!r} is {value!r}; expected true or false")
    return bool(label)


def _read_number(where: str, field: str, value: Any) -> float:
    """Return a finite number. The value is text in CSV files.

    Raises:
        DataError: The value is no finite number.
    """
    try:
        number = float(value) if isinstance(value, (str, int, float)) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise DataError(f"{where}: field {field!r} is {value!r}; expected a number")
    return number


def _read_margin(where: str, record: dict[str, Any]) -> float | None:
    """Return the row's margin, or the difference of its scores; `None` if it has neither."""
    if _has_value(record, MARGIN_FIELD):
        return _read_number(where, MARGIN_FIELD, record[MARGIN_FIELD])
    pair = next((pair for pair in SCORE_FIELDS if all(_has_value(record, side) for side in pair)), None)
    if pair is None:
        return None
    chosen, rejected = (_read_number(where, side, record[side]) for side in pair)
    return chosen - rejected


# Field of the prompt -> its reader. If a row has several of these fields, the first one is used.
PROMPT_READERS: dict[str, Callable[[str, dict[str, Any]], TextOrTurns]] = {
    "prompt": lambda where, record: _read_text_or_turns(where, "prompt", record["prompt"]),
    "conversations": lambda where, record: read_turns(where, "conversations", record["conversations"]),
    "instruction": read_instruction,
    "question": lambda where, record: read_content(where, "field 'question'", record["question"]),
    "input": lambda where, record: read_content(where, "field 'input'", record["input"]),
    "messages": lambda where, record: read_turns(where, "messages", record["messages"]),
}
# Layout -> fields of the prompt.
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
