"""Reads conversations from rows of any layout. No tokenizer is involved.

Each turn of the assistant is an answer, even if the turn is part of a row's `prompt`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pipeline.data.documents.records import Record, get_json_type_name
from pipeline.errors import DataError

Turn = dict[str, Any]
Spans = list[tuple[int, int]]
"""Parts of a text: (first character, character after the last)."""

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
TOOL_CALL_ROLES = ("function_call", "tool_call")  # roles of ShareGPT turns whose text is a call in JSON
# Fields with an answer's weight (0 or 1) in the loss, as OpenAI, ms-swift, Mistral and Axolotl name them.
WEIGHT_FIELDS = ("weight", "loss", "loss_mask", "train")
# Axolotl's field for the characters of an answer that are in the loss, which is not supported.
TRAIN_DETAIL_FIELD = "train_detail"
NOT_IN_LOSS = "\0unlearned"  # key that marks a turn as not in the loss, until the Conversation is built
ROW_LAYOUT = "row"  # layout whose template reads the row itself
ROW_FIELD = "row"  # field of a turn with the row, in this layout
# Fields of a turn that a template may read besides role and content.
OPTIONAL_TURN_FIELDS = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Conversation:
    """Turns of a conversation, in order.

    Attributes:
        turns: Dicts with `role` (a value of ROLES), `content` (text) and those of OPTIONAL_TURN_FIELDS that
            the row has. Arguments of tool calls are objects.
        tools: Functions that the assistant may call, each wrapped in an object with its type; `None` if there
            are none.
        unlearned: Numbers (from 0) of the assistant's turns that are only context and not in the loss.
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
        """Return a conversation with the first `count` turns."""
        return replace(self, turns=self.turns[:count])


def read_conversation(where: str, record: Record, layout: str) -> Conversation:
    """Return the conversation of a row.

    Args:
        where: File and line, for messages.
        record: The row.
        layout: A key of CHAT_LAYOUTS; `auto` for the first layout whose fields the row has; or ROW_LAYOUT for
            one turn of the assistant with the row itself under ROW_FIELD.

    Raises:
        DataError: The row has no conversation in this layout, the conversation is empty, or a turn has no
            text or an unknown role.
    """
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: got a plain string, expected a conversation; for plain text use data.kind: text"
        )
    row: dict[str, Any] = remove_nulls(record)
    if layout == ROW_LAYOUT:
        return Conversation([{"role": ASSISTANT, "content": "", ROW_FIELD: row}])
    names = list(CHAT_LAYOUTS) if layout == "auto" else [layout]
    name = next((name for name in names if CHAT_LAYOUTS[name].fits(row)), None)
    if name is None:
        raise _make_no_conversation_error(where, row, names, layout)
    turns = CHAT_LAYOUTS[name].read(where, row)
    if not turns:
        raise DataError(f"{where}: the conversation is empty")
    unlearned = frozenset(number for number, turn in enumerate(turns) if turn.pop(NOT_IN_LOSS, False))
    conversation = Conversation(turns, read_tools(where, row), unlearned)
    try:
        _ = conversation.key
    # The text has half of a surrogate pair, which JSON allows and no tokenizer accepts.
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the conversation is not valid text: {error.reason}") from None
    return conversation


def _make_no_conversation_error(where: str, row: dict[str, Any], names: list[str], layout: str) -> DataError:
    row_fields = ", ".join(map(repr, row)) or "none"
    expected_layout = "any known layout" if layout == "auto" else f"data.layout {layout}"
    fields_of = {name: " and ".join(map(repr, CHAT_LAYOUTS[name].fields)) for name in names}
    expected = "; ".join(f"{name} has {fields}" for name, fields in fields_of.items())
    return DataError(
        f"{where}: no conversation in {expected_layout}; the row's fields: {row_fields}; expected: {expected}"
    )


def has_field(record: dict[str, Any], name: str) -> bool:
    """Return whether the row has a value in the field; tables store null for missing values."""
    return record.get(name) is not None


def read_tools(where: str, record: dict[str, Any]) -> list[Any] | None:
    """Return the functions in a row's `tools`, each wrapped; `None` if there are none.

    The field and each of its entries may be JSON text. Functions that are wrapped already are not changed.

    Raises:
        DataError: The field is not a list of objects, or is not valid JSON.
    """
    tools = _parse_json(where, "field 'tools'", record.get("tools") or None)
    if isinstance(tools, list):
        tools = [_parse_json(where, "an entry of field 'tools'", tool) for tool in tools]
    tools = remove_nulls(tools)  # the caller removed the row's nulls, but not those in JSON text
    is_list_of_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list_of_objects:
        raise DataError(
            f"{where}: field 'tools' is a {get_json_type_name(tools)}; expected a list of objects"
        )
    return [_wrap_function(tool) for tool in tools or []] or None


def _wrap_function(function: dict[str, Any]) -> dict[str, Any]:
    """Wrap a function, or a call of one, in an object of `type` and `function`, as templates expect it.

    Return an object unchanged if it is wrapped already, or has no name.
    """
    if isinstance(function.get("function"), dict) or "name" not in function:
        return function
    wrapper: dict[str, Any] = {key: function[key] for key in ("id", "type") if key in function}
    content = {key: value for key, value in function.items() if key not in wrapper}
    return {"type": "function", **wrapper, "function": content}


def _parse_json(where: str, what: str, value: Any) -> Any:
    """Return the value of a JSON string; return anything but a string unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: {what} is not valid JSON: {error}") from None


def read_calls(where: str, what: str, calls: Any) -> list[Any]:
    """Return tool calls in one form: wrapped, with arguments as an object.

    Args:
        where: File and line, for messages.
        what: Name of the turn in messages.
        calls: A list of calls, a single call, or one of these as JSON text.

    Raises:
        DataError: The calls are not a list of objects, or their arguments are neither an object nor its JSON.
    """
    calls = _parse_json(where, f"'tool_calls' of {what}", calls)
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(
            f"{where}: 'tool_calls' of {what} is a {get_json_type_name(calls)}; expected a list of objects"
        )
    wrapped_calls = []
    for call in map(_wrap_function, calls):
        function = call.get("function")
        if isinstance(function, dict) and function.get("arguments") is not None:
            field = f"'arguments' of a tool call of {what}"
            arguments = _parse_json(where, field, function["arguments"] or {})
            if not isinstance(arguments, dict):
                raise DataError(f"{where}: {field} is a {get_json_type_name(arguments)}; expected an object")
            wrapped_calls.append({**call, "function": {**function, "arguments": arguments}})
        else:
            wrapped_calls.append(call)
    return wrapped_calls


def _read_messages(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_turns(where, "messages", record["messages"])


def _read_sharegpt(where: str, record: dict[str, Any]) -> list[Turn]:
    return read_system(where, record) + read_turns(where, "conversations", record["conversations"])


def read_instruction(where: str, record: dict[str, Any]) -> str:
    """Return the instruction of an Alpaca row, followed by its input if it has one.

    Raises:
        DataError: One of the fields is not text.
    """
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
        if isinstance(value, str):
            turns.append({"role": role, "content": value})
        else:
            turns += read_turns(where, name, value)
    return turns


def read_system(where: str, record: dict[str, Any]) -> list[Turn]:
    """Return a list with the system turn of a row's `system` field; an empty list if the row has none.

    Raises:
        DataError: The field is not text.
    """
    if not record.get("system"):
        return []
    return [{"role": "system", "content": read_content(where, "field 'system'", record["system"])}]


def read_turns(where: str, name: str, value: Any) -> list[Turn]:
    """Return the turns of a row's field.

    Args:
        where: File and line, for messages.
        name: Name of the field, for messages.
        value: A list of objects with `role` and `content`, or with `from` and `value`; or its JSON text.

    Raises:
        DataError: The value is not a list of turns, or a turn has no text or an unknown role.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = remove_nulls(_parse_json(where, f"field {name!r}", value))
    if not isinstance(value, list):
        raise DataError(f"{where}: field {name!r} is a {get_json_type_name(value)}; expected a list of turns")
    return [
        _read_turn(where, f"turn {number} of {name!r}", turn) for number, turn in enumerate(value, start=1)
    ]


def _read_turn(where: str, what: str, turn: Any) -> Turn:
    """Return a turn with `role` and `content`, and with NOT_IN_LOSS if it is an answer of weight 0."""
    if not isinstance(turn, dict):
        raise DataError(
            f"{where}: {what} is a {get_json_type_name(turn)}; expected an object of role and content"
        )
    given_role = turn["role"] if "role" in turn else turn.get("from")
    role_name = given_role.lower() if isinstance(given_role, str) else ""
    role = ROLES.get(role_name)
    if role is None:
        raise DataError(f"{where}: {what} has the role {given_role!r}; expected one of {', '.join(ROLES)}")
    optional_fields = {name: turn[name] for name in OPTIONAL_TURN_FIELDS if turn.get(name) is not None}
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if role_name in TOOL_CALL_ROLES and not optional_fields.get("tool_calls"):
        optional_fields["tool_calls"] = content
        content = None
    if optional_fields.get("tool_calls"):
        optional_fields["tool_calls"] = read_calls(where, what, optional_fields["tool_calls"])
        content = content or ""  # a turn may have calls and no text
    result = {"role": role, "content": read_content(where, what, content), **optional_fields}
    if role == ASSISTANT and not _is_in_loss(where, what, turn):
        result[NOT_IN_LOSS] = True
    return result


def _is_in_loss(where: str, what: str, turn: Turn) -> bool:
    """Return whether the weight fields of an answer include it in the loss.

    Raises:
        DataError: A weight is neither 0 nor 1, or TRAIN_DETAIL_FIELD selects parts of the answer.
    """
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
            return False
    if turn.get(TRAIN_DETAIL_FIELD):
        raise DataError(
            f"{where}: {what} has {TRAIN_DETAIL_FIELD}, which selects parts of an answer; an answer is in "
            "the loss as a whole or, with weight 0, not at all: remove the field"
        )
    return True


def remove_nulls(value: Any) -> Any:
    """Return a value without fields that are null, at any depth; tables store null for missing fields."""
    if isinstance(value, dict):
        return {key: remove_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [remove_nulls(each) for each in value]
    return value


def read_content(where: str, what: str, content: Any) -> str:
    """Return the text of a string, or of a list of objects with a `text` each.

    Raises:
        DataError: The content is something else, or a piece of it is not text, such as an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: {what} has a {get_json_type_name(content)} in place of text")
    for piece in content:
        is_text = isinstance(piece, dict) and isinstance(piece.get("text"), str)
        if not is_text:
            kind = piece.get("type") if isinstance(piece, dict) else get_json_type_name(piece)
            raise DataError(f"{where}: {what} has content of type {kind!r}; expected text")
    return "".join(piece["text"] for piece in content)


def count_common_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the number of items (characters or turns) that both sequences have in common at their start."""
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)


class ChatLayout(NamedTuple):
    """A layout of rows.

    Attributes:
        fields: Fields that identify the layout; a row must have a value in each.
        read: Function that takes the location for messages and the row, and returns the turns.
    """

    fields: tuple[str, ...]
    read: Callable[[str, dict[str, Any]], list[Turn]]

    def fits(self, row: dict[str, Any]) -> bool:
        """Return whether the row has a value in each of the fields."""
        return all(has_field(row, field) for field in self.fields)


# The order matters: rows with conversations often have a `prompt` as well.
CHAT_LAYOUTS = {
    "messages": ChatLayout(("messages",), _read_messages),
    "sharegpt": ChatLayout(("conversations",), _read_sharegpt),
    "alpaca": ChatLayout(("instruction", "output"), _read_alpaca),
    "prompt_completion": ChatLayout(("prompt", "completion"), _read_prompt_completion),
}


# Fields whose value decides how the template writes other fields. The text need not contain the value itself.
TYPE_FIELDS = frozenset({"role", "from", "type"})


def find_unwritten_fields(record: Any, text: str) -> list[str]:
    """Return the fields of a row that a text does not contain in full.

    A string is written if the text has each of its lines, unchanged or escaped as in JSON. For a string of
    JSON, the strings in it must be written, or the names of its fields if it has no strings. Numbers in
    unknown fields of a turn count as not written.

    Args:
        record: The row as it was read.
        text: Text that was tokenised for the row.

    Returns:
        Names such as `messages[].tool_calls[].id`, each once, in the order of the row.
    """
    unwritten: dict[str, None] = {}  # an ordered set
    for name, value in _iter_strings(record, ""):
        if name not in unwritten and (value is None or not _is_written(value, text)):
            unwritten[name] = None
    return list(unwritten)


def _iter_strings(value: Any, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and string of each field; `None` for a number in an unknown field of a turn."""
    if isinstance(value, str):
        parsed = _parse_container(value)
        if parsed is None:
            yield name, value
        else:
            yield from list(_iter_strings(parsed, name)) or ((name, key) for key in parsed)
    elif isinstance(value, list):
        for each in value:
            yield from _iter_strings(each, f"{name}[]")
    elif isinstance(value, dict):
        is_turn = name.endswith("[]") and "." not in name and ("role" in value or "from" in value)
        for key, each in value.items():
            full_name = f"{name}.{key}" if name else str(key)
            if is_turn and isinstance(each, int | float) and key not in WEIGHT_FIELDS:
                yield full_name, None
            elif key not in TYPE_FIELDS or not isinstance(each, str):
                yield from _iter_strings(each, full_name)


def _parse_container(text: str) -> Any:
    """Return the list or object in a JSON text; `None` if the text is anything else."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_written(value: Any, text: str) -> bool:
    if not isinstance(value, str):
        return True
    return all(_contains_line(line.strip(), text) for line in value.splitlines())


def _contains_line(line: str, text: str) -> bool:
    """Return whether a text has a line, unchanged or escaped as in JSON."""
    if line in text:
        return True
    forms = []
    for is_ascii in (False, True):
        escaped = json.dumps(line, ensure_ascii=is_ascii)[1:-1]
        # Arguments of a call that are JSON text in a string are escaped twice.
        escaped_twice = json.dumps(escaped, ensure_ascii=is_ascii)[1:-1]
        forms += [escaped, escaped_twice]
    return any(form in text for form in forms)
