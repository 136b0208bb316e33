"""Jinja templates that write rows in another trainer's own text (`data.layout: row`), token by token.

A literal is written as a Jinja string, so that no block trims the white space around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from pipeline.foreign_configs.mapping import Draft

TEMPLATE = "template.jinja"
DIVIDE = "{{ divide }}"
PLACEHOLDER = re.compile(r"\{(\w*)\}")


def literal(text: str) -> str:
    """Return Jinja that writes a text as it is."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def column(name: str) -> str:
    """Return the Jinja expression of a field of the row."""
    return f"row[{json.dumps(name, ensure_ascii=False)}]"


def require(expression: str) -> str:
    """Return Jinja that refuses a row in which a field is missing, which would be written as nothing."""
    return choose(f"{expression} is not defined", refusal(f"the row has no {expression}"))


def filled(form: str, expressions: Mapping[str, str]) -> str:
    """Return Jinja for a text with `{name}` in it, each replaced by what its expression gives.

    Raises:
        KeyError: A name has no expression, or a brace is doubled.
    """
    if "{{" in form or "}}" in form:
        raise KeyError("{")
    pieces = PLACEHOLDER.split(form)
    return "".join(
        "{{ " + expressions[piece] + " }}" if at % 2 else literal(piece) for at, piece in enumerate(pieces)
    )


def choose(condition: str, yes: str, no: str = "") -> str:
    """Return Jinja that writes one or the other."""
    return f"{{% if {condition} %}}{yes}{f'{{% else %}}{no}' if no else ''}{{% endif %}}"


def refusal(why: str) -> str:
    """Return Jinja that refuses the row."""
    return f"{{{{ raise_exception({json.dumps(why)}) }}}}"


def learned(body: str) -> str:
    """Return Jinja whose text counts in the loss."""
    return f"{{% generation %}}{body}{{% endgeneration %}}"


def with_tokens(expression: str) -> str:
    """Return Jinja that writes what a row says, special tokens in it as tokens."""
    return f"{{{{ {expression}.replace('\\ud800', '').replace('\\ud801', '') }}}}"


def of_row(body: str) -> str:
    """Return the template of a row that is written at once."""
    return f"{{% for turn in messages %}}{{% set row = turn.row %}}{body}{{% endfor %}}"


def of_answers(prompt: str, answer: str) -> str:
    """Return the template of a prompt and a judged answer; `turn.content` is the answer's side."""
    return of_row(choose("turn.role == 'user'", prompt, learned(answer)))


def put_row_template(draft: Draft, template: str, told: str) -> None:
    """Write the template beside the recipe, and let it read the rows."""
    path = draft.folder.absolute() / TEMPLATE
    draft.files[path] = template + "\n"
    draft.put("data.layout", "row", told)
    draft.put("data.chat_template", str(path))
    draft.put("data.append_eos", False)
