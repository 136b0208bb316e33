"""Finds the text that a chat template writes for each turn of a conversation.

The template runs with marks in it: every loop writes one before and one behind its body, and another where it
takes up a turn. Between the marks of a turn stands what the template writes for it, however it does that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes
from jinja2.visitor import NodeTransformer

from pipeline.data.chat_layouts import Spans

# Halves of a surrogate pair cannot stand in valid text, so no conversation holds these.
OPEN, CLOSE, TURN, TURN_END = "\ud802", "\ud803", "\ud804", "\ud805"
_MARK = re.compile(f"{OPEN}|{CLOSE}|{TURN}([0-9]+){TURN_END}")
_WRITE_MARK = "__write_turn_mark"  # the name of a function in the template


@dataclass(frozen=True)
class RenderedTurns:
    """The text of a conversation, and where its turns are.

    Attributes:
        text: What the template writes, without marks.
        spans: For each turn (start, end) of each stretch of `text` that was written for it; none where the
            template writes nothing for a turn.
        tail: What stands behind the last loop over turns: the generation prompt, where it is asked for.
    """

    text: str
    spans: list[Spans]
    tail: str


class MarkedTemplate:
    """A chat template that marks the text of each turn.

    Args:
        text: Jinja.
        variables: Further variables that it may read, `bos_token` and the like.
        clean: Called with what the template writes, before the marks are read.

    Raises:
        jinja2.TemplateSyntaxError: The text is no Jinja.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], clean: Callable[[str], str] = str) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        environment = _compile_jinja_template(text).environment
        tree = _Marking().visit(environment.parse(text))
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
        """Return the text of a conversation and the place of each turn in it.

        Args:
            turns: Messages as transformers gives them to a template.
            tools: What the assistant may call.
            prompt: Whether to end with the generation prompt.
            longest: Number of characters that the template may write; None: any.

        Raises:
            ValueError: The template writes more.
            jinja2.TemplateError: The template refuses the conversation.
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


class _Marking(NodeTransformer):
    """Adds marks to loops, and behind what assigns a turn inside of one."""

    _depth = 0

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        node.body = [_constant(OPEN), _mark(node.target), *node.body, _constant(CLOSE)]
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        is_name = isinstance(node.target, nodes.Name)
        return [node, _mark(node.target)] if self._depth and is_name else [node]

    def visit_Continue(self, node: nodes.Continue) -> list[nodes.Node]:
        return [_constant(CLOSE), node]

    def visit_Break(self, node: nodes.Break) -> list[nodes.Node]:
        return [_constant(CLOSE), node]


def _constant(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)], lineno=1)


def _mark(target: nodes.Node) -> nodes.Output:
    names = target.items if isinstance(target, nodes.Tuple) else [target]
    values = [nodes.Name(name.name, "load", lineno=1) for name in names if isinstance(name, nodes.Name)]
    call = nodes.Call(nodes.Name(_WRITE_MARK, "load", lineno=1), values, [], None, None, lineno=1)
    return nodes.Output([call], lineno=1)


def _read_marks(marked: str, turns: int) -> RenderedTurns:
    """Take the marks out of a text. A loop inside of a turn's is the turn's, unless it takes up another."""
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
