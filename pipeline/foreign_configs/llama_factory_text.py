"""The text in which LLaMA-Factory writes conversations, by its `template`: slots of its data/template.py.

A slot is tokenised apart from the next one. `{}` is what somebody says; BOS and EOS are the tokenizer's.
Templates that put the end of a turn into the next one (`efficient_eos`) are not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.foreign_configs.row_templates import (
    DIVIDE,
    choose,
    column,
    learned,
    literal,
    of_row,
    refusal,
    require,
)

BOS, EOS = "<bos>", "<eos>"
THOUGHT, OPENING, CLOSING = "<think>\n\n</think>\n\n", "<think>", "</think>"
THOUGHTS = "thoughts, which LLaMA-Factory takes out of this answer"
TOOLS = "tool calls: LLaMA-Factory writes them by tool_format, which the import does not take"


@dataclass(frozen=True)
class Slots:
    """What a template writes around what is said."""

    user: tuple[str, ...]
    assistant: tuple[str, ...] = ("{}", EOS)
    system: tuple[str, ...] = ("{}",)
    prefix: tuple[str, ...] = ()
    default_system: str = ""
    is_fused: bool = False
    """Whether the system message stands within the first user's turn."""
    thinks: bool = False
    """Whether an answer without thoughts gets empty ones."""


CHATML = Slots(
    ("<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",),
    ("{}<|im_end|>\n",),
    ("<|im_start|>system\n{}<|im_end|>\n",),
)
LLAMA3 = Slots(
    (
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("{}<|eot_id|>",),
    ("<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",),
    (BOS,),
)
DEEPSEEK3 = Slots(("<｜User｜>{}<｜Assistant｜>",), prefix=(BOS,))
GEMMA = Slots(
    ("<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",),
    ("{}<end_of_turn>\n",),
    ("{}\n\n",),
    (BOS,),
    is_fused=True,
)
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SLOTS: Mapping[str, Slots] = {
    "alpaca": Slots(
        ("### Instruction:\n{}\n\n### Response:\n",),
        ("{}", EOS, "\n\n"),
        default_system="Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
    ),
    "chatml": CHATML,
    "deepseek3": DEEPSEEK3,
    "deepseekr1": replace(DEEPSEEK3, thinks=True),
    "default": Slots(("Human: {}", EOS, "\nAssistant:"), ("{}", EOS, "\n"), ("System: {}", EOS, "\n")),
    "empty": Slots(("{}",), ("{}",)),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "llama2": Slots((BOS, "[INST] {} [/INST]"), system=("<<SYS>>\n{}\n<</SYS>>\n\n",), is_fused=True),
    "llama3": LLAMA3,
    "mistral": Slots(("[INST] {}[/INST]",), (" {}", EOS), ("{}\n\n",), (BOS,), is_fused=True),
    "phi": Slots(("<|user|>\n{}<|end|>\n<|assistant|>\n",), ("{}<|end|>\n",), ("<|system|>\n{}<|end|>\n",)),
    "phi4": Slots(
        ("<|im_start|>user<|im_sep|>{}<|im_end|><|im_start|>assistant<|im_sep|>",),
        ("{}<|im_end|>",),
        ("<|im_start|>system<|im_sep|>{}<|im_end|>",),
    ),
    "qwen": replace(CHATML, default_system=QWEN),
    "qwen3": replace(CHATML, thinks=True),
    "qwen3_nothink": CHATML,
    "vicuna": Slots(
        ("USER: {} ASSISTANT:",),
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "yi": CHATML,
    "zephyr": Slots(
        ("<|user|>\n{}", EOS, "<|assistant|>\n"),
        system=("<|system|>\n{}", EOS),
        default_system="You are Zephyr, a helpful assistant.",
    ),
}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


@dataclass(frozen=True)
class Rows:
    """How the rows of a data set are laid out, as its entry in dataset_info.json says."""

    is_sharegpt: bool
    columns: Mapping[str, str]
    tags: Mapping[str, str]

    def column(self, name: str) -> str:
        """Return the Jinja expression of a column, or of nothing."""
        given = self.columns.get(name)
        return column(given) if given else "''"


def _written(slots: tuple[str, ...], said: str) -> str:
    """Return Jinja for slots, each tokenised apart from what stands around it."""
    pieces = []
    for slot in slots:
        before, _, after = slot.partition("{}")
        if slot in (BOS, EOS):
            pieces.append("{{ " + ("bos_token" if slot == BOS else "eos_token") + " }}")
        elif "{}" in slot:
            pieces.append(f"{literal(before)}{{{{ {said} }}}}{literal(after)}{DIVIDE}")
        else:
            pieces.append(f"{literal(slot)}{DIVIDE}")
    return "".join(pieces)


def row_template(slots: Slots, rows: Rows, kind: str, *, masks_history: bool, thinks: Any) -> str:
    """Return the Jinja template that writes a row as LLaMA-Factory does.

    Args:
        slots: Of its template.
        rows: How the rows are laid out.
        kind: The recipe's data.kind.
        masks_history: Whether the last answer alone counts.
        thinks: `enable_thinking`, for templates that think.
    """
    is_chat = kind == "chat"
    answer = "said.content"
    user = _written(slots.user, "(ns.system + said.content)" if slots.is_fused else answer)
    system = _written(slots.system, "ns.system")
    if slots.is_fused:
        before, _, after = slots.system[0].partition("{}")
        head = choose(
            "ns.system", f"{{% set ns.system = {json.dumps(before)} + ns.system + {json.dumps(after)} %}}"
        )
        user += "{% set ns.system = '' %}"
    else:
        head = choose("ns.system", system)
    last = earlier = _written(slots.assistant, answer)
    stripped = _written(slots.assistant, r"said.content.lstrip('\n')")  # as where thoughts are taken out
    before = ""
    if slots.thinks:
        unthought = f"'{OPENING}' not in said.content and '{CLOSING}' not in said.content"
        thought = choose(unthought, literal(THOUGHT) + DIVIDE)
        without = choose(f"'{OPENING}' in said.content", refusal(THOUGHTS))
        before = "" if thinks else thought
        last = thought + last if thinks else without + stripped if thinks is False else last
        earlier = without + stripped
    counts = before + learned(last)
    if masks_history or not is_chat:
        counts = choose("loop.last", counts, earlier)
    turns = "{% for said in ns.said %}" + choose("said.role == 'user'", user, counts) + "{% endfor %}"
    start = "{% set ns = namespace(said=[], system='') %}"
    fallback = choose("not ns.system", f"{{% set ns.system = {json.dumps(slots.default_system)} %}}")
    body = start + _read(rows, kind) + fallback + _written(slots.prefix, "''") + head + turns
    return of_row(body) if is_chat else of_row(choose("turn.role == 'assistant'", body))


def _read(rows: Rows, kind: str) -> str:
    """Return Jinja that puts the turns of a row into `ns.said`, and its system message into `ns.system`."""
    refuse = refusal(TOOLS)
    read = f"{{% set ns.system = {rows.column('system')} or '' %}}"
    read += choose(f"{rows.column('tools')}", refuse)
    return read + (_sharegpt(rows, kind, refuse) if rows.is_sharegpt else _alpaca(rows, kind))


def _add(role: str, content: str) -> str:
    return f"{{% set ns.said = ns.said + [{{'role': '{role}', 'content': {content}}}] %}}"


def _alpaca(rows: Rows, kind: str) -> str:
    pair = _add("user", "pair[0]") + _add("assistant", "pair[1]")
    read = f"{{% for pair in {rows.column('history')} or [] %}}{pair}{{% endfor %}}"
    question = f"[{rows.column('prompt')} or '', {rows.column('query')} or ''] | select | join('\\n')"
    said = rows.column("response")
    if kind == "preference":
        said = f"({rows.column('chosen')} if turn.content == 'chosen' else {rows.column('rejected')} "
        said += f"if turn.content == 'rejected' else {rows.column('response')})"
    needed = [] if kind == "preference" else [rows.column("prompt"), said]
    return "".join(map(require, needed)) + read + _add("user", question) + _add("assistant", said)


def _sharegpt(rows: Rows, kind: str, refuse: str) -> str:
    tags = {name: json.dumps(tag, ensure_ascii=False) for name, tag in rows.tags.items()}
    role, content = f"each[{tags['role_tag']}]", f"each[{tags['content_tag']}]"
    roles = [("user_tag", _add("user", content)), ("assistant_tag", _add("assistant", content))]
    wrong = refusal("user and assistant do not take turns; LLaMA-Factory leaves such a row out")
    order = choose(
        "ns.said and ns.said[-1].role == (ns.said[-2].role if ns.said | length > 1 else 'assistant')", wrong
    )
    branches = wrong
    for name, yes in reversed(roles):
        branches = choose(f"{role} == {tags[name]}", yes, branches)
    for name in ("function_tag", "observation_tag"):
        if name in tags:
            branches = choose(f"{role} == {tags[name]}", refuse, branches)
    if "system_tag" in tags:
        first = f"loop.first and {role} == {tags['system_tag']}"
        branches = choose(first, f"{{% set ns.system = {content} or '' %}}", branches)
    calls = choose("each.tool_calls", refuse)
    read = f"{{% for each in {rows.column('messages')} %}}{calls}{branches}{order}{{% endfor %}}"
    if kind == "chat" or not rows.columns.get("chosen"):
        read += choose("ns.said[-1].role == 'user'", wrong)
    if kind != "preference" or not rows.columns.get("chosen"):
        return read
    sides = (
        "{'chosen': " + rows.column("chosen") + ", 'rejected': " + rows.column("rejected") + "}[turn.content]"
    )
    return read + _add("assistant", f"{sides}[{tags['content_tag']}]")
