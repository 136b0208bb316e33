"""Rows of chat data -> conversations: one form, whatever the layout of the row. Knows no tokenizer.

Every assistant's turn counts as an answer, also one that stands in a `prompt` of several turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.data.documents.records import Record, type_name
from pipeline.errors import DataError

Turn = dict[str, Any]

ASSISTANT = "assistant"
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    ASSISTANT: ASSISTANT,
    "gpt": ASSISTANT,
    "bot": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
# What a template may read of a turn besides its role and content; the rest (ids, dates) says nothing.
FURTHER_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Turns in their order.

    Attributes:
        turns: Each with its `role`, one of ROLES' values, and its text as `content`, and what there is of
            FURTHER_FIELDS.
        tools: What the assistant may call, for the template; None: nothing.
    """

    turns: list[Turn]
    tools: list[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """The numbers of the assistant's turns, from 0."""
        return [number for number, turn in enumerate(self.turns) if turn["role"] == ASSISTANT]

    @property
    def key(self) -> bytes:
        """Equal for equal conversations, whatever the row, the template and the tokenizer look like."""
        content: Any = self.turns if self.tools is None else [self.turns, self.tools]
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode()

    def texts(self) -> Iterator[str]:
        """What is said, turn by turn."""
        return (turn["content"] for turn in self.turns)

    def first(self, count: int) -> Conversation:
        """Its first turns alone."""
        return Conversation(self.turns[:count], self.tools)


def read_conversation(where: str, record: Record, layout: str) -> Conversation:
    """The conversation of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of LAYOUTS, or `auto`: the first of them whose fields the row has.

    Raises:
        DataError: the row has none, or none in this layout; it is empty; a turn has no text, or an unknown
            role.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: is text; expected a row with a conversation (kind: text reads text)")
    names = list(LAYOUTS) if layout == "auto" else [layout]
    name = next((name for name in names if all(has_field(record, field) for field in LAYOUTS[name][0])), None)
    if name is None:
        fields = ", ".join(map(repr, record)) or "none"
        expected = "; ".join(f"{name} has {' and '.join(map(repr, LAYOUTS[name][0]))}" for name in names)
        asked = "any known layout" if layout == "auto" else f"data.layout {layout}"
        raise DataError(f"{where}: no conversation in {asked}; its fields: {fields}; expected: {expected}")
    turns = LAYOUTS[name][1](where, record)
    if not turns:
        raise DataError(f"{where}: the conversation is empty")
    conversation = Conversation(turns, read_tools(where, record))
    try:
        _ = conversation.key
    except UnicodeEncodeError as error:  # half of a pair, as JSON can write it: no tokenizer takes it
        raise DataError(f"{where}: the conversation holds no valid text: {error.reason}") from None
    return conversation


def has_field(record: dict[str, Any], field: str) -> bool:
    """Whether the row has something there."""
    return record.get(field) is not None  # tables fill what a row lacks with null


def read_tools(where: str, record: dict[str, Any]) -> list[Any] | None:
    """What a row's `tools` hold, as a list or as JSON."""
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise DataError(f"{where}: field 'tools' is no JSON: {error}") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: field 'tools' is a {type_name(tools)}; expected a list of objects")
    return tools or None


def _messages(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_turns(where, "messages", record["messages"])


def _sharegpt(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_system(where, record) + read_turns(where, "conversations", record["conversations"])


def read_instruction(where: str, record: dict[str, Any]) -> str:
    """Alpaca's instruction, and its input where there is one."""
    question = read_text(where, "field 'instruction'", record["instruction"])
    if record.get("input"):
        question += "\n\n" + read_text(where, "field 'input'", record["input"])
    return question


def _alpaca(where: str, record: dict[str, Any]) -> list[Turn]:
    question = read_instruction(where, record)
    answer = read_text(where, "field 'output'", record["output"])
    return [
        *read_system(where, record),
        {"role": "user", "content": question},
        {"role": ASSISTANT, "content": answer},
    ]


def _prompt_completion(where: str, record: dict[str, Any]) -> list[Turn]:
    turns = []
    for field, role in (("prompt", "user"), ("completion", ASSISTANT)):
        value = record[field]
        text = isinstance(value, str)
        turns += [{"role": role, "content": value}] if text else read_turns(where, field, value)
    return turns


def read_system(where: str, record: dict[str, Any]) -> list[Turn]:
    """The turn of a row's own `system` field."""
    if not record.get("system"):
        return []
    return [{"role": "system", "content": read_text(where, "field 'system'", record["system"])}]


def read_turns(where: str, field: str, value: Any) -> list[Turn]:
    """The turns of a list of role and content, or of from and value."""
    if not isinstance(value, list):
        raise DataError(f"{where}: field {field!r} is a {type_name(value)}; expected a list of turns")
    return [_turn(where, f"turn {number} of {field!r}", turn) for number, turn in enumerate(value, start=1)]


def _turn(where: str, what: str, turn: Any) -> Turn:
    """A turn of role and content, or of from and value."""
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {what} is a {type_name(turn)}; expected an object of role and content")
    given = turn["role"] if "role" in turn else turn.get("from")
    role = ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise DataError(f"{where}: {what} has the role {given!r}; expected one of {', '.join(ROLES)}")
    found = {field: turn[field] for field in FURTHER_FIELDS if turn.get(field) is not None}
    content = turn["content"] if "content" in turn else turn.get("value")
    if content is None and found.get("tool_calls"):
        content = ""  # the calls are all it says
    return {"role": role, "content": read_text(where, what, content), **found}


def read_text(where: str, what: str, content: Any) -> str:
    """A string, or a list of pieces of text, put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: {what} holds a {type_name(content)} in place of text")
    for piece in content:
        if not isinstance(piece, dict) or not isinstance(piece.get("text"), str):
            kind = piece.get("type") if isinstance(piece, dict) else type_name(piece)
            raise DataError(f"{where}: {what} holds {kind!r}; only pieces of text can be learned from")
    return "".join(piece["text"] for piece in content)


# Fields by which a layout is known, and its reader. Rows of conversations often have a `prompt` too.
LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, Any]], list[Turn]]]] = {
    "messages": (("messages",), _messages),
    "sharegpt": (("conversations",), _sharegpt),
    "alpaca": (("instruction", "output"), _alpaca),
    "prompt_completion": (("prompt", "completion"), _prompt_completion),
}
