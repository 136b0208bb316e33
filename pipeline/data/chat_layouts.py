"""Reads conversations from rows of any layout. No tokenizer is involved.

Every turn of the assistant is an answer, including the turns of a `prompt` that has several.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.documents.records import Record, get_json_type_name
from pipeline.errors import DataError

Turn = dict[str, Any]
Spans = list[tuple[int, int]]  # parts of a text: (start, end) in characters

ASSISTANT = "assistant"
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    ASSISTANT: ASSISTANT,
    "gpt": ASSISTANT,
    "bot": ASSISTANT,
    "function_call": ASSISTANT,
    "tool_call": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLING_ROLES = ("function_call", "tool_call")  # roles of ShareGPT turns whose text is a call in JSON
# Fields that say whether an answer is in the loss, as OpenAI, ms-swift, Mistral and Axolotl name them.
WEIGHT_FIELDS = ("weight", "loss", "loss_mask", "train")
UNLEARNED = "\0unlearned"  # marks a turn that is not in the loss, until the Conversation is built
ROW = "row"  # the layout whose template reads the row itself, and the field of a turn that holds the row
DETAIL = "train_detail"  # Axolotl's field for the characters of an answer that are in the loss; an error here
# Fields of a turn that a template may read besides role and content.
FURTHER_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation, in order.

    Attributes:
        turns: Dicts with `role` (a value of ROLES), `content` (text) and the FURTHER_FIELDS that the row has.
            Arguments of tool calls are objects.
        tools: Functions that the assistant may call, each wrapped in an object with its type; `None` if there
            are none.
        unlearned: Numbers (from 0) of the assistant's turns that are context only and not in the loss.
    """

    turns: list[Turn]
    tools: list[Any] | None = None
    unlearned: frozenset[int] = frozenset()

    @property
    def answers(self) -> list[int]:
        """Numbers of the assistant's turns, from 0."""
        return [number for number, turn in enumerate(self.turns) if turn["role"] == ASSISTANT]

    @property
    def learned_answers(self) -> list[int]:
        """Numbers of the assistant's turns that are in the loss."""
        return [number for number in self.answers if number not in self.unlearned]

    @property
    def key(self) -> bytes:
        """Bytes that identify the conversation, independent of layout, template and tokenizer."""
        content: Any = self.turns if self.tools is None else [self.turns, self.tools]
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return text.encode()

    def texts(self) -> Iterator[str]:
        """Yield the text of each turn."""
        return (turn["content"] for turn in self.turns)

    def truncate(self, count: int) -> Conversation:
        """Return a conversation of the first `count` turns."""
        return replace(self, turns=self.turns[:count])


def read_conversation(where: str, record: Record, layout: str) -> Conversation:
    """Return the conversation of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of CHAT_LAYOUTS; `auto` for the first layout whose fields the row has; or ROW for one
            turn of the assistant with the row itself under `row`.

    Raises:
        DataError: The row has no conversation in this layout, the conversation is empty, or a turn has no
            text or an unknown role.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: got a plain string, expected a conversation; for plain text use data.kind: text"
        )
    row: dict[str, Any] = without_nulls(record)
    if layout == ROW:
        return Conversation([{"role": ASSISTANT, "content": "", "row": row}])
    names = list(CHAT_LAYOUTS) if layout == "auto" else [layout]
    name = next((name for name in names if all(has_field(row, each) for each in CHAT_LAYOUTS[name][0])), None)
    if name is None:
        fields = ", ".join(map(repr, row)) or "none"
        expected = "; ".join(f"{name} has {' and '.join(map(repr, CHAT_LAYOUTS[name][0]))}" for name in names)
        asked = "any known layout" if layout == "auto" else f"data.layout {layout}"
        raise DataError(f"{where}: no conversation in {asked}; its fields: {fields}; expected: {expected}")
    turns = CHAT_LAYOUTS[name][1](where, row)
    if not turns:
        raise DataError(f"{where}: the conversation is empty")
    unlearned = frozenset(number for number, turn in enumerate(turns) if turn.pop(UNLEARNED, False))
    conversation = Conversation(turns, read_tools(where, row), unlearned)
    try:
        _ = conversation.key
    except (
        UnicodeEncodeError
    ) as error:  # half of a surrogate pair, which JSON allows and no tokenizer accepts
        raise DataError(f"{where}: the conversation holds no valid text: {error.reason}") from None
    return conversation


def has_field(record: dict[str, Any], name: str) -> bool:
    """Return whether the row has a value in the field."""
    return record.get(name) is not None  # tables store null where a row has no value


def read_tools(where: str, record: dict[str, Any]) -> list[Any] | None:
    """Return the functions in a row's `tools`, each wrapped; `None` if there are none.

    The field is a list or a list in JSON. Its functions may have a wrapper already.
    """
    tools = _parse_json(where, "field 'tools'", record.get("tools") or None)
    if isinstance(tools, list):
        tools = [_parse_json(where, "an entry of field 'tools'", tool) for tool in tools]
    tools = without_nulls(tools)  # the row's own nulls are gone, those inside of JSON are not
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(
            f"{where}: field 'tools' is a {get_json_type_name(tools)}; expected a list of objects"
        )
    return [_wrap_function(tool) for tool in tools or []] or None


def _wrap_function(function: dict[str, Any]) -> dict[str, Any]:
    """Wrap a function, or a call of one, in `type` and `function`, as templates expect it."""
    if isinstance(function.get("function"), dict) or "name" not in function:
        return function
    outside: dict[str, Any] = {key: function[key] for key in ("id", "type") if key in function}
    inside = {key: value for key, value in function.items() if key not in outside}
    return {"type": "function", **outside, "function": inside}


def _parse_json(where: str, what: str, value: Any) -> Any:
    """Return the value of a JSON string; return anything but a string unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {what} is no JSON: {error}") from None


def read_calls(where: str, what: str, calls: Any) -> list[Any]:
    """Return tool calls in one form: wrapped, with arguments as an object.

    Raises:
        DataError: The calls are not a list of objects, or their arguments are neither an object nor its JSON.
    """
    calls = _parse_json(where, f"'tool_calls' of {what}", calls)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(
            f"{where}: 'tool_calls' of {what} is a {get_json_type_name(calls)}; expected a list of objects"
        )
    read = []
    for call in map(_wrap_function, calls):
        function = call.get("function")
        if isinstance(function, dict) and function.get("arguments") is not None:
            of_what = f"'arguments' of a tool call of {what}"
            arguments = _parse_json(where, of_what, function["arguments"] or {})
            if not isinstance(arguments, dict):
                raise DataError(
                    f"{where}: {of_what} is a {get_json_type_name(arguments)}; expected an object"
                )
            read.append({**call, "function": {**function, "arguments": arguments}})
        else:
            read.append(call)
    return read


def _read_messages(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_turns(where, "messages", record["messages"])


def _read_sharegpt(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_system(where, record) + read_turns(where, "conversations", record["conversations"])


def read_instruction(where: str, record: dict[str, Any]) -> str:
    """Return the instruction of an Alpaca row, followed by its input if it has one."""
    question = read_content(where, "field 'instruction'", record["instruction"])
    if record.get("input"):
        question += "\n\n" + read_content(where, "field 'input'", record["input"])
    return question


def _read_alpaca(where: str, record: dict[str, Any]) -> list[Turn]:
    question = read_instruction(where, record)
    answer = read_content(where, "field 'output'", record["output"])
    return [
        *read_system(where, record),
        {"role": "user", "content": question},
        {"role": ASSISTANT, "content": answer},
    ]


def _read_prompt_completion(where: str, record: dict[str, Any]) -> list[Turn]:
    turns = []
    for name, role in (("prompt", "user"), ("completion", ASSISTANT)):
        value = record[name]
        is_text = isinstance(value, str)
        turns += [{"role": role, "content": value}] if is_text else read_turns(where, name, value)
    return turns


def read_system(where: str, record: dict[str, Any]) -> list[Turn]:
    """Return the system turn from a row's `system` field in a list; an empty list if it has none."""
    if not record.get("system"):
        return []
    return [{"role": "system", "content": read_content(where, "field 'system'", record["system"])}]


def read_turns(where: str, name: str, value: Any) -> list[Turn]:
    """Return the turns in a list of objects; the list may be JSON.

    The objects have `role` and `content`, or `from` and `value`.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = without_nulls(_parse_json(where, f"field {name!r}", value))
    if not isinstance(value, list):
        raise DataError(f"{where}: field {name!r} is a {get_json_type_name(value)}; expected a list of turns")
    return [
        _read_turn(where, f"turn {number} of {name!r}", turn) for number, turn in enumerate(value, start=1)
    ]


def _read_turn(where: str, what: str, turn: Any) -> Turn:
    """Return the turn in an object of role and content, or of from and value."""
    if not isinstance(turn, dict):
        raise DataError(
            f"{where}: {what} is a {get_json_type_name(turn)}; expected an object of role and content"
        )
    given = turn["role"] if "role" in turn else turn.get("from")
    said_by = given.lower() if isinstance(given, str) else ""
    role = ROLES.get(said_by)
    if role is None:
        raise DataError(f"{where}: {what} has the role {given!r}; expected one of {', '.join(ROLES)}")
    found = {name: turn[name] for name in FURTHER_FIELDS if turn.get(name) is not None}
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if said_by in CALLING_ROLES and not found.get("tool_calls"):
        found["tool_calls"] = content
        content = None
    if found.get("tool_calls"):
        found["tool_calls"] = read_calls(where, what, found["tool_calls"])
        content = content or ""  # a turn may have calls and no text
    read = {"role": role, "content": read_content(where, what, content), **found}
    if role == ASSISTANT:
        _read_weight(where, what, turn, read)
    return read


def _read_weight(where: str, what: str, turn: Turn, read: Turn) -> None:
    """Mark the turn `read` with UNLEARNED if the fields of `turn` exclude it from the loss."""
    for name in WEIGHT_FIELDS:
        weight = turn.get(name)
        if weight is None:
            continue
        if weight not in (0, 1):
            raise DataError(
                f"{where}: {what} has {name} {weight!r}; expected 0 or 1 (false or true): an answer is "
                "either in the loss or not"
            )
        if not weight:
            read[UNLEARNED] = True
            return
    if turn.get(DETAIL):
        raise DataError(
            f"{where}: {what} has {DETAIL}, which selects parts of an answer; an answer is in the loss as a "
            "whole or, with weight 0, not at all: remove the field"
        )


def without_nulls(value: Any) -> Any:
    """Return a value without fields that are null, at any depth; tables store null for missing fields."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_content(where: str, what: str, content: Any) -> str:
    """Return text, from a string or a list of text pieces."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: {what} holds a {get_json_type_name(content)} in place of text")
    for piece in content:
        if not isinstance(piece, dict) or not isinstance(piece.get("text"), str):
            kind = piece.get("type") if isinstance(piece, dict) else get_json_type_name(piece)
            raise DataError(f"{where}: {what} holds {kind!r}; only pieces of text can be learned from")
    return "".join(piece["text"] for piece in content)


def count_common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of items (characters or turns) with which both sequences begin."""
    shortest = min(len(one), len(other))
    return next((place for place in range(shortest) if one[place] != other[place]), shortest)


# Layout -> fields that identify it, and its reader. Rows with conversations often have a `prompt` as well, so
# the order matters.
CHAT_LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, Any]], list[Turn]]]] = {
    "messages": (("messages",), _read_messages),
    "sharegpt": (("conversations",), _read_sharegpt),
    "alpaca": (("instruction", "output"), _read_alpaca),
    "prompt_completion": (("prompt", "completion"), _read_prompt_completion),
}


# Fields whose value is a type. It decides how the template writes the rest, and is not written itself.
STRUCTURE = frozenset({"role", "from", "type"})


def find_unwritten_fields(record: Any, text: str) -> list[str]:
    """Return the fields of a row whose content is missing in a text, at least in part.

    A string is written if the text has each of its lines, as it is or escaped as in JSON. For a string that
    holds JSON, the strings in it must be written, or the names of its fields if it has no strings. Numbers in
    unknown fields of a turn are never written.

    Args:
        record: The row as it was read.
        text: Decoded tokens of the row.

    Returns:
        Names such as `messages[].tool_calls[].id`, each once, in the order of the row.
    """
    found: dict[str, None] = {}
    for name, value in _iter_strings(record, ""):
        if name not in found and (value is None or not _is_written(value, text)):
            found[name] = None
    return list(found)


def _iter_strings(value: Any, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and string of each field; `None` for a number in an unknown field of a turn."""
    if isinstance(value, str):
        try:
            inside = json.loads(value) if value.lstrip()[:1] in ("[", "{") else None
        except (ValueError, RecursionError):
            inside = None
        if inside is None:
            yield name, value
        else:
            yield from list(_iter_strings(inside, name)) or ((name, key) for key in inside)
    elif isinstance(value, list):
        for each in value:
            yield from _iter_strings(each, f"{name}[]")
    elif isinstance(value, dict):
        is_turn = name.endswith("[]") and "." not in name and ("role" in value or "from" in value)
        for key, each in value.items():
            place = f"{name}.{key}" if name else str(key)
            if is_turn and isinstance(each, int | float) and key not in WEIGHT_FIELDS:
                yield place, None
            elif key not in STRUCTURE or not isinstance(each, str):
                yield from _iter_strings(each, place)


def _is_written(value: Any, text: str) -> bool:
    return not isinstance(value, str) or all(
        _contains_line(line.strip(), text) for line in value.splitlines()
    )


def _contains_line(line: str, text: str) -> bool:
    if line in text:
        return True
    forms = []
    for is_ascii in (False, True):
        once = json.dumps(line, ensure_ascii=is_ascii)[1:-1]
        # Escaped twice: arguments of a call that are JSON in a string.
        forms += [once, json.dumps(once, ensure_ascii=is_ascii)[1:-1]]
    return any(form in text for form in forms)
