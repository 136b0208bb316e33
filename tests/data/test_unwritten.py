"""Every string of a row is in its tokens, or its field is named in the tally with the first row's place."""

from __future__ import annotations

import pytest

from pipeline.data.chat_layouts import unwritten_fields


@pytest.mark.parametrize(
    ("row", "text", "expected"),
    [
        ({"a": "one\ntwo", "b": "two\nthree"}, "one, two", ["b"]),
        ({"a": 'say "one"', "b": "é"}, r'{"x": "say \"one\"", "y": "\u00e9"}', []),
        ({"a": 'say "one"'}, r'{"x": "{\"y\": \"say \\\"one\\\"\"}"}', []),
        ({"a": '{"b": "one", "c": ["two"]}'}, '{"b":"one"}', ["a.c[]"]),
        ({"a": '{"city": 1}', "b": '{"hour": 1}'}, "city", ["b"]),
        ({"a": "{}", "b": "", "c": 5, "d": None, "e": True}, "", []),
        ({"type": "x", "a": {"type": ["y"]}, "b": [{"role": "z"}]}, "", ["a.type[]"]),
        ({"a": [{"b": "one"}, {"b": "two"}, {"b": "three"}]}, "one", ["a[].b"]),
        ({"a": "[one", "b": "{"}, "one {", ["a"]),
    ],
)
def test_what_counts_as_written(row, text, expected):
    assert unwritten_fields(row, text) == expected


def test_a_number_in_an_unknown_field_of_a_turn_is_named():
    call = {"name": "add", "arguments": {"role": "sum", "value": 0}}
    turn = {"role": "assistant", "content": "0", "weight": 0, "wieght": 0, "train": False, "masked": True}
    row = {"messages": [turn, turn | {"tool_calls": [call]}], "tools": [{"type": "function", "strict": True}]}
    assert unwritten_fields(row, "assistant 0 add sum") == ["messages[].wieght", "messages[].masked"]
