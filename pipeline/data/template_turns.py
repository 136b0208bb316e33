"""Finds the text that a chat template writes for each turn of a conversation.

This module inserts marks into the template. Each iteration of a loop writes a mark before and after its body,
and the number of the turn if the loop variable is a turn. The text between the marks of a turn is the text of
that turn, whichever part of the template writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

from pipeline.data.chat_layouts import Spans

# Valid text has no single halves of surrogate pairs, so these marks never occur in a conversation.
LOOP_BEGIN = "\ud802"
LOOP_END = "\ud803"
TURN_BEGIN = "\ud804"
TURN_END = "\ud805"
_MARK = re.compile(f"{LOOP_BEGIN}|{LOOP_END}|{TURN_BEGIN}([0-9]+){TURN_END}")
_WRITE_MARK = "__write_turn_mark"  # name under which the template calls the function `mark` of `render`


@dataclass(frozen=True)
class RenderedTurns:
    """The text of a conversation, and the positions of its turns.

    Attributes:
        text: Text that the template writes, without marks.
        spans: For each turn, the spans of `text` that were written for it; empty if it is not written.
        tail: Text after the last loop over turns. It includes the generation prompt if that was added.
    """

    text: str
    spans: list[Spans]
    tail: str


class MarkedTemplate:
    """A chat template that marks the text of each turn.

    Args:
        text: Jinja text of the template.
        variables: Further variables that the template may read, such as `bos_token`.
        clean: Function that is applied to the written text before the marks are located.

    Raises:
        jinja2.TemplateSyntaxError: The text is not valid Jinja.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], clean: Callable[[str], str] = str) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(text).environment
        tree = _MarkInserter().visit(environment.parse(text))
        tree.set_environment(environment)
        self._template = Template.from_code(
            environment, environment.compile(tree), environment.make_globals({})
        )
        self._variables = dict(variables)
        self._clean = clean

    def render(
        self,
        turns: Sequence[dict[str, Any]],
        tools: Any = None,
        *,
        prompt: bool = False,
        max_characters: int | None = None,
    ) -> RenderedTurns:
        """Return the text of a conversation and the position of each turn in it.

        Args:
            turns: Messages as transformers passes them to a template.
            tools: Functions that the assistant may call; `None` if there are none.
            prompt: Whether to add the generation prompt.
            max_characters: Number of characters that the template may write, marks included; `None` for any
                number.

        Raises:
            ValueError: The template writes more than `max_characters`.
            jinja2.TemplateError: The template raises an error.
        """
        numbers = {id(turn): number for number, turn in enumerate(turns)}

        def mark(*values: Any) -> str:
            turn_numbers = (numbers[id(value)] for value in values if id(value) in numbers)
            return "".join(f"{TURN_BEGIN}{number}{TURN_END}" for number in turn_numbers)

        marked = self._template.render(
            messages=list(turns),
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **self._variables,
            **{_WRITE_MARK: mark},
        )
        if max_characters is not None and len(marked) > max_characters:
            raise ValueError(f"the template writes {len(marked):,} characters")
        return _extract_spans(self._clean(marked), len(turns))


class _MarkInserter(NodeTransformer):
    """Inserts marks into loops, and after assignments inside of loops, which may assign a turn."""

    _loop_depth = 0

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._loop_depth += 1
        self.generic_visit(node)
        self._loop_depth -= 1
        begin = [_make_text_node(LOOP_BEGIN), _make_mark_node(node.target)]
        node.body = [*begin, *node.body, _make_text_node(LOOP_END)]
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        if self._loop_depth and isinstance(node.target, nodes.Name):
            return [node, _make_mark_node(node.target)]
        return [node]

    def visit_Continue(self, node: nodes.Continue) -> list[nodes.Node]:
        return [_make_text_node(LOOP_END), node]

    def visit_Break(self, node: nodes.Break) -> list[nodes.Node]:
        return [_make_text_node(LOOP_END), node]


def _make_text_node(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)], lineno=1)


def _make_mark_node(target: nodes.Node) -> nodes.Output:
    """Return a node that writes a mark for each turn among the variables of `target`."""
    names = target.items if isinstance(target, nodes.Tuple) else [target]
    values = [nodes.Name(name.name, "load", lineno=1) for name in names if isinstance(name, nodes.Name)]
    call = nodes.Call(nodes.Name(_WRITE_MARK, "load", lineno=1), values, [], None, None, lineno=1)
    return nodes.Output([call], lineno=1)


def _extract_spans(marked: str, turns: int) -> RenderedTurns:
    """Remove the marks from a text, and return the spans of the turns.

    A loop inside of the loop of a turn belongs to that turn, unless its variable is another turn.

    Args:
        marked: Text with marks.
        turns: Number of turns.
    """
    spans: list[Spans] = [[] for _ in range(turns)]
    pieces: list[str] = []
    open_turns: list[int | None] = []  # turn of each loop that is open, from the outermost; None for no turn
    length = 0  # of the text without marks, up to here
    tail_start = 0
    mark_end = 0

    def write(piece: str) -> None:
        nonlocal length
        owner = open_turns[-1] if open_turns else None
        if piece and owner is not None:
            turn_spans = spans[owner]
            end = length + len(piece)
            if turn_spans and turn_spans[-1][1] == length:
                turn_spans[-1] = (turn_spans[-1][0], end)
            else:
                turn_spans.append((length, end))
        pieces.append(piece)
        length += len(piece)

    for mark in _MARK.finditer(marked):
        write(marked[mark_end : mark.start()])
        mark_end = mark.end()
        if mark[0] == LOOP_BEGIN:
            open_turns.append(open_turns[-1] if open_turns else None)
        elif mark[0] == LOOP_END:
            closed_turn = open_turns.pop()
            if closed_turn is not None and not open_turns:
                tail_start = length
        elif open_turns:
            open_turns[-1] = int(mark[1])
    write(marked[mark_end:])
    text = "".join(pieces)
    return RenderedTurns(text, spans, text[tail_start:])
