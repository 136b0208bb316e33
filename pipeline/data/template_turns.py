"""Finds the text that a chat template writes for each turn of a conversation.

Marks are inserted into the template: every loop writes one before and one after its body, and another one
when its variable is a turn. The text between the marks of a turn belongs to that turn, whatever code wrote
it.
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
OPEN = "\ud802"
CLOSE = "\ud803"
TURN = "\ud804"
TURN_END = "\ud805"
_MARK = re.compile(f"{OPEN}|{CLOSE}|{TURN}([0-9]+){TURN_END}")
_WRITE_MARK = "__write_turn_mark"  # the name of a function in the template


@dataclass(frozen=True)
class RenderedTurns:
    """The text of a conversation, and the positions of its turns.

    Attributes:
        text: Text that the template writes, without marks.
        spans: Spans of `text` that were written for each turn; empty if the template writes nothing for it.
        tail: Text after the last loop over turns, which is the generation prompt if it was asked for.
    """

    text: str
    spans: list[Spans]
    tail: str


class MarkedTemplate:
    """A chat template that marks the text of each turn.

    Args:
        text: Jinja text of the template.
        variables: Further variables that the template may read, such as `bos_token`.
        clean: Function that is applied to the written text before the marks are read.

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
        longest: int | None = None,
    ) -> RenderedTurns:
        """Return the text of a conversation and the position of each turn in it.

        Args:
            turns: Messages as transformers passes them to a template.
            tools: Functions that the assistant may call.
            prompt: Whether to add the generation prompt.
            longest: Maximum number of characters that the template may write; `None` for any.

        Raises:
            ValueError: The template writes more than `longest` characters.
            jinja2.TemplateError: The template raises an error.
        """
        numbers = {id(turn): number for number, turn in enumerate(turns)}

        def mark(*values: Any) -> str:
            found = (numbers[id(value)] for value in values if id(value) in numbers)
            return "".join(f"{TURN}{number}{TURN_END}" for number in found)

        marked = self._template.render(
            messages=list(turns),
            tools=tools,
            documents=None,
            add_generation_prompt=prompt,
            **self._variables,
            **{_WRITE_MARK: mark},
        )
        if longest is not None and len(marked) > longest:
            raise ValueError(f"the template writes {len(marked):,} characters")
        return _read_marks(self._clean(marked), len(turns))


class _MarkInserter(NodeTransformer):
    """Inserts marks into loops, and after assignments inside of loops, which may assign a turn."""

    _depth = 0

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        node.body = [_make_text_node(OPEN), _make_mark_node(node.target), *node.body, _make_text_node(CLOSE)]
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        is_name = isinstance(node.target, nodes.Name)
        return [node, _make_mark_node(node.target)] if self._depth and is_name else [node]

    def visit_Continue(self, node: nodes.Continue) -> list[nodes.Node]:
        return [_make_text_node(CLOSE), node]

    def visit_Break(self, node: nodes.Break) -> list[nodes.Node]:
        return [_make_text_node(CLOSE), node]


def _make_text_node(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)], lineno=1)


def _make_mark_node(target: nodes.Node) -> nodes.Output:
    names = target.items if isinstance(target, nodes.Tuple) else [target]
    values = [nodes.Name(name.name, "load", lineno=1) for name in names if isinstance(name, nodes.Name)]
    call = nodes.Call(nodes.Name(_WRITE_MARK, "load", lineno=1), values, [], None, None, lineno=1)
    return nodes.Output([call], lineno=1)


def _read_marks(marked: str, turns: int) -> RenderedTurns:
    """Remove the marks from a text, and return the spans of the turns.

    A loop inside of the loop of a turn belongs to that turn, unless its variable is another turn.
    """
    spans: list[Spans] = [[] for _ in range(turns)]
    pieces: list[str] = []
    open_turns: list[int | None] = []
    length = tail = done = 0

    def write(piece: str) -> None:
        nonlocal length
        owner = open_turns[-1] if open_turns else None
        if piece and owner is not None:
            own = spans[owner]
            if own and own[-1][1] == length:
                own[-1] = (own[-1][0], length + len(piece))
            else:
                own.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)

    for mark in _MARK.finditer(marked):
        write(marked[done : mark.start()])
        done = mark.end()
        if mark[0] == OPEN:
            open_turns.append(open_turns[-1] if open_turns else None)
        elif mark[0] == CLOSE:
            if open_turns.pop() is not None and not open_turns:
                tail = length
        elif open_turns:
            open_turns[-1] = int(mark[1])
    write(marked[done:])
    text = "".join(pieces)
    return RenderedTurns(text, spans, text[tail:])
