"""The text in which Axolotl writes rows, by the `type` of a data set: its prompters and prompt_strategies.

Prompt and answer are tokenised apart. Text of preference data is what TRL's trainers then get as strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.foreign_configs.mapping import Section, text
from pipeline.foreign_configs.row_templates import (
    DIVIDE,
    choose,
    column,
    filled,
    learned,
    literal,
    of_answers,
    of_row,
    require,
    with_tokens,
)

START = "{{ text_start }}"
PAIRED = "Below is an instruction that describes a task, paired with an input that provides further context. "
ALONE = "Below is an instruction that describes a task. "
COMPLETES = "Write a response that appropriately completes the request."
TO_USER = "Below is an instruction from a USER that describes a task"
CONCISELY = (
    f"{TO_USER}, paired with an input that provides further context. The ASSISTANT writes a response that "
    "concisely and appropriately completes the request.\n\n"
)


@dataclass(frozen=True)
class Style:
    """Formats of a turn with an input, of one without, and of the system text."""

    turn: str
    alone: str
    system: str


INSTRUCT = Style(
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
    "### Instruction:\n{instruction}\n\n### Response:\n",
    "{system}\n\n",
)
CHAT = Style(
    "USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:", "SYSTEM: {system}\n"
)
CHATML = Style(
    "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{system}<|im_end|>\n",
)
PHI = Style(
    "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
    "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    "<|system|>\n{system}<|end|>\n",
)
STYLES = {"": INSTRUCT, "instruct": INSTRUCT, "chat": CHAT, "chatml": CHATML, "phi": PHI}
ORCA = Style(
    "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
    "### Human:\n{instruction}\n### Assistant:\n",
    "### System:\n{system}\n",
)
FIELDS = ("instruction", "input", "output")
QUESTION = ("question", "", "answer")
SYSTEMS = (PAIRED + COMPLETES, ALONE + COMPLETES)
CONCISE = (
    CONCISELY,
    f"{TO_USER}. The ASSISTANT writes a response that appropriately and concisely completes the request.\n\n",
)


# type -> style (None: the one behind the colon), system texts with and without input, fields of the row
FIXED: Mapping[str, tuple[Style | None, tuple[str, str], tuple[str, str, str]]] = {
    "alpaca": (None, SYSTEMS, FIELDS),
    "jeopardy": (None, SYSTEMS, ("question", "category", "answer")),
    "gpteacher": (None, SYSTEMS, ("instruction", "input", "response")),
    "oasst": (None, SYSTEMS, ("INSTRUCTION", "", "RESPONSE")),
    "alpaca_instruct": (INSTRUCT, SYSTEMS, FIELDS),
    "alpaca_instruct.load_no_prompt": (INSTRUCT, ("", ""), FIELDS),
    "alpaca_chat": (CHAT, SYSTEMS, FIELDS),
    "alpaca_chat.load_concise": (CHAT, CONCISE, FIELDS),
    "alpaca_chat.load_qa": (CHAT, CONCISE, QUESTION),
    "alpaca_chat.load_camel_ai": (CHAT, CONCISE, ("message_1", "", "message_2")),
    "alpaca_chat.load_no_prompt": (CHAT, ("", ""), FIELDS),
}
# type -> style, field of the system text, fields of the row
WITH_SYSTEM: Mapping[str, tuple[Style, str, tuple[str, str, str]]] = {
    "alpaca_w_system": (CHAT, "system", FIELDS),
    "alpaca_w_system.load_chat": (CHAT, "system", FIELDS),
    "alpaca_w_system.load_instruct": (INSTRUCT, "system", FIELDS),
    "alpaca_w_system.load_open_orca": (ORCA, "system_prompt", ("question", "", "response")),
    "alpaca_w_system.load_open_orca_chatml": (CHATML, "system_prompt", ("question", "", "response")),
}
USER_DEFINED = {
    "system_prompt": "",
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
    "system_format": "{system}",
}


def instruction_template(said: str) -> str | None:
    """Return the template of a type of instructions; None: the type is not in the tables."""
    base, _, style = said.partition(":")
    if said in WITH_SYSTEM:
        own, field, fields = WITH_SYSTEM[said]
        system = filled(own.system, {"system": column(field)})
        return _instructions(own, choose(column(field), system), "", fields)
    if base not in FIXED or style not in STYLES or (style and FIXED[base][0]):
        return None
    given, (paired, alone), fields = FIXED[base]
    own = given or STYLES[style]
    starts = [literal(own.system.format(system=each)) if each else "" for each in (paired, alone)]
    with_input = column(fields[1]) if fields[1] else ""
    start = choose(with_input, *starts) if with_input else starts[1]
    return _instructions(own, start, "what is " if base == "jeopardy" else "", fields)


def own_template(type_: Section) -> str:
    """Return the template of a `type` that a user defined, as a mapping of formats and fields."""
    given = {key: type_.given(key, text) or default for key, default in USER_DEFINED.items()}
    own = Style(given["format"], given["no_input_format"], given["system_format"])
    field = column(given["field_system"])
    system = f"({field} if {field} is defined else {_string(given['system_prompt'])})"
    fields = (given["field_instruction"], given["field_input"], given["field_output"])
    return _instructions(own, choose(system, filled(own.system, {"system": system})), "", fields)


def _string(value: str) -> str:
    return literal(value).removeprefix("{{ ").removesuffix(" }}") or "''"


def _instructions(style: Style, start: str, before_answer: str, fields: tuple[str, str, str]) -> str:
    expressions = {"instruction": column(fields[0]), "input": column(fields[1]) if fields[1] else "''"}
    turn = filled(style.alone, expressions)
    if fields[1]:
        turn = choose(column(fields[1]), filled(style.turn, expressions), turn)
    answer = literal(before_answer) + "{{ " + column(fields[2]) + " }}" + DIVIDE + "{{ eos_token }}"
    needed = require(expressions["instruction"]) + require(column(fields[2]))
    return of_row(needed + START + start + turn + DIVIDE + learned(answer))


SEGMENTS = of_row(
    "{% for each in row.segments %}"
    + choose("each.label", learned(with_tokens("each.text") + DIVIDE), with_tokens("each.text") + DIVIDE)
    + "{% endfor %}"
)
"""`input_output`: every segment is tokenised apart, with no token of its own."""


@dataclass(frozen=True)
class Chat:
    """How a family of types writes a system text, a question and an answer."""

    system: str
    user: str
    end: str


CHATS = {
    "chatml": Chat(
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
    ),
    "llama3": Chat(
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}
SIDE = "row[turn.content]"


def _first_of(*fields: str) -> str:
    """Return the expression of the first field that a row has."""
    *first, last = fields
    return "".join(f"row.{name} if row.{name} is defined else " for name in first) + f"row.{last}"


# transform -> expressions of the question and of the answer
PAIRS: Mapping[str, tuple[str, str]] = {
    "default": (
        _first_of("prompt", "input", "question", "instruction"),
        f"({SIDE} or row[turn.content + '_response'])",
    ),
    "argilla_chat": ("row.chosen[0].content", f"{SIDE}[1].content"),
    "icr": ("row.input", SIDE),
    "intel": ("row.question", SIDE),
    "prompt_pairs": ("row.prompt", SIDE),
    "ultra": ("row.prompt", f"{SIDE}[1].content"),
}
JUDGED: Mapping[str, tuple[str, str]] = {
    "argilla": ("row.instruction", "row.completion"),
    "argilla_chat": ("row.completion[0].content", "row.completion[1].content"),
    "intel": ("row.question", "row.completion"),
    "prompt_pairs": ("row.prompt", "row.completion"),
    "ultra": ("row.prompt", "row.completion"),
}


def judged_template(said: str, unpaired: bool) -> str | None:
    """Return the template of a type of preference data, as `llama3.ultra`; None: it is not in the tables."""
    family, _, transform = said.partition(".")
    table = JUDGED if unpaired else PAIRS
    if family not in CHATS or (transform or "default") not in table:
        return None
    chat, (question, answer) = CHATS[family], table[transform or "default"]
    system = "" if transform == "argilla_chat" else choose("row.system", _around(chat.system, "row.system"))
    ended = literal(chat.end) + _ended(chat.end)
    prompt = require(question) + START + system + _around(chat.user, question)
    return of_answers(prompt, f"{require(answer)}{{{{ {answer} }}}}{ended}")


def _ended(tail: str) -> str:
    """Return Jinja that writes the tokenizer's end, where the text does not end with it."""
    return f"{{{{ '' if {_string(tail)}.endswith(eos_token) else eos_token }}}}"


def _around(form: str, expression: str) -> str:
    before, _, after = form.partition("{}")
    return f"{literal(before)}{{{{ {expression} }}}}{literal(after)}"


OWN_PAIRS = {
    "field_prompt": "prompt",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
}


def own_judged_template(type_: Section, unpaired: bool) -> str:
    """Return the template of preference data whose `type` is a mapping of formats and fields."""
    given = {key: type_.given(key, text) or default for key, default in OWN_PAIRS.items()}
    sides = ("completion",) if unpaired else ("chosen", "rejected")
    formats = {name: type_.given(f"{name}_format", text) or f"{{{name}}}" for name in ("prompt", *sides)}
    columns = {name: column(given[f"field_{name}"]) for name in ("prompt", "system")}
    columns["system"] = f"({columns['system']} or '')"
    answers = []
    for side in sides:
        field = type_.given("field_completion", text) or side if unpaired else given[f"field_{side}"]
        tail = formats[side].rpartition("}")[2]
        answers.append(require(column(field)) + filled(formats[side], {side: column(field)}) + _ended(tail))
    answer = choose("turn.content == 'rejected'", answers[-1], answers[0]) if len(answers) > 1 else answers[0]
    return of_answers(require(columns["prompt"]) + START + filled(formats["prompt"], columns), answer)
