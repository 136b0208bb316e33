"""The data sets of an Axolotl configuration -> the recipe's data section."""

from __future__ import annotations

from typing import Any

from pipeline.foreign_configs.axolotl_text import (
    SEGMENTS,
    instruction_template,
    judged_template,
    own_judged_template,
    own_template,
)
from pipeline.foreign_configs.mapping import FILL_IN, Draft, Section, flag, text, whole
from pipeline.foreign_configs.row_templates import put_row_template
from pipeline.foreign_configs.sources import (
    Source,
    find_source,
    put_eval_sets,
    put_preferences,
    put_sources,
    tell_of_long_rows,
)


def put_data(draft: Draft, rl: str | None) -> None:
    """Put the data sets, and how their rows are written and packed."""
    streams = draft.top.sections("pretraining_dataset")
    entries = draft.top.sections("datasets") + streams
    said = {str(entry.given("type") or ("pretrain" if entry in streams else None)) for entry in entries}
    if len(said) > 1:
        raise draft.top.refused(
            "datasets",
            f"types {', '.join(sorted(said))} in one run: a run here writes all rows by one template",
        )
    kind = "preference" if rl else "text" if said and said <= {"completion", "pretrain"} else "chat"
    put_sources(draft, kind, [_source(draft, entry, kind) for entry in entries])
    tests = draft.top.sections("test_datasets")
    for test in tests:
        if str(test.given("type")) not in said:
            raise test.refused(
                "type", f"{test.given('type')}: an evaluation's rows are written as the training's"
            )
    put_eval_sets(draft, {str(test.given("path")): _source(draft, test, kind) for test in tests})
    length, packs = draft.given("sequence_len", whole), bool(draft.given("sample_packing", flag))
    if kind == "text":
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "concatenate" if streams else "best_fit" if packs else "none")
        draft.not_taken["the token before each text"] = (
            "a tokenizer that begins texts with one does so there alone"
        )
        if streams:
            draft.not_taken["pieces of longer texts"] = "they overlap by up to 256 tokens there, and not here"
        return
    too_long = draft.given("excess_length_strategy", text) or "drop"
    if rl:
        put_preferences(draft, length)
        draft.put("data.too_long", "error" if too_long == "raise" else "drop")
        tell_of_long_rows(draft, "sequence_len")
    else:
        draft.put("data.sequence_length", length)
        draft.put("data.packing", "best_fit" if packs else "none")
        draft.put("data.too_long", "error" if too_long == "raise" else "drop")
        if too_long not in ("drop", "raise"):
            draft.drop("excess_length_strategy", f"{too_long}: a longer row is left out here")
    draft.put("data.append_eos", False)
    if entries:
        _template(draft, entries + tests, rl)


def _template(draft: Draft, entries: list[Section], rl: str | None) -> None:
    """Put what writes the rows. One template is for all: entries that need two are refused."""
    made = [_text_of(draft, entry, rl) for entry in entries]
    if any(each != made[0] for each in made):
        raise draft.top.refused("datasets", "entries whose rows need different templates; a run here has one")
    template, told = made[0]
    if template is not None:
        put_row_template(draft, template, told)
    if rl is None and template is not None:
        draft.put("data.learn_from", "all" if draft.given("train_on_inputs", flag) else "assistant")
    elif draft.given("train_on_inputs", flag):
        draft.drop("train_on_inputs", "the content of every turn counts there; here of the assistant's alone")


def _text_of(draft: Draft, entry: Section, rl: str | None) -> tuple[str | None, str]:
    """Return the template of an entry's rows, None if it is the model's or a file's, and the entry's type."""
    given, unpaired = entry.given("type"), rl == "kto"
    if isinstance(given, dict):
        [own] = entry.sections("type")
        try:
            return (own_judged_template(own, unpaired) if rl else own_template(own)), "type"
        except KeyError as error:
            raise entry.refused("type", f"{error} in a format; its fields alone are known") from None
    said = text(given) if isinstance(given, str) else ""
    if said in CHAT_TYPES.get(rl or "sft", ()):
        _chat(draft, entry, rl)
        return None, said
    if rl:
        template = judged_template(said, unpaired) if rl in ("dpo", "ipo", "kto") else None
    elif said == "input_output":
        template = SEGMENTS
    else:
        template = instruction_template(said)
    if template is None:
        raise entry.refused("type", f"{given}: its text is not in the import's tables (docs/coming-from.md)")
    return template, said


CHAT_FIELDS = {
    "roles_to_train": (["assistant"], ["gpt"], ["assistant", "gpt"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "message_field_training": ("train", "weight"),
    "message_field_training_detail": ("train_detail",),
    "template_thinking_key": ("reasoning_content",),
    "message_property_mappings": (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
}
"""Values of an entry that mean here what they mean there."""
ROLES = {"user": ["user", "human"], "assistant": ["assistant", "gpt"], "system": ["system"], "tool": ["tool"]}
FIELDS = ("messages", "tools", "system", "chosen", "rejected")
"""Fields of the rows that an entry's `field_...` names otherwise."""


CHAT_TYPES = {
    "sft": ("chat_template", "chat_template.load"),
    "dpo": ("chat_template", "chat_template.default"),
    "ipo": ("chat_template", "chat_template.default"),
    "reward": ("bradley_terry.chat_template",),
}


def _chat(draft: Draft, entry: Section, rl: str | None) -> None:
    """Put conversations that a chat template writes, whose fields are those that are known here."""
    for key, known in CHAT_FIELDS.items():
        if (value := entry.given(key)) is not None and value not in known:
            raise entry.refused(key, f"{value!r}: the run reads {' or '.join(map(str, known))}")
    roles = entry.given("roles") or {}
    if roles and not (isinstance(roles, dict) and all(_is_known(*each) for each in roles.items())):
        raise entry.refused("roles", f"{roles}: the run reads {ROLES}")
    for key in ("split_thinking", "drop_system_message"):
        if entry.given(key):
            raise entry.refused(key, "the run reads rows as they are; write them anew without it")
    if rl == "reward":
        draft.put("data.layout", "icr")
    elif rl:
        draft.put("data.layout", "messages")
        draft.put("data.learn_from", "content")
        draft.not_taken["eos_token behind another end of turn"] = "TRL adds and learns it there"
    else:
        draft.put("data.layout", "sharegpt", "the messages, behind a row's `system`")
        draft.put("data.learn_from", "content", "and the tokenizer's eos_token behind it, as there")
    given = entry.given("chat_template", text) or draft.given("chat_template", text) or "tokenizer_default"
    jinja = entry.given("chat_template_jinja", text) or draft.given("chat_template_jinja", text)
    if given == "jinja" or (jinja and given == "tokenizer_default"):
        _jinja(draft, jinja)
    elif given in ("chatml", "llama3"):
        path = draft.folder / "template.jinja"
        draft.files[path] = TEMPLATES[given] + "\n"
        draft.put("data.chat_template", str(path), f"Axolotl's {given}")
    elif given != "tokenizer_default":
        draft.put("data.chat_template", f"{FILL_IN}.jinja")
        draft.drop("chat_template", f"{given}: its text is not in the import's tables")
        draft.fill_in.append(
            f"data.chat_template: Axolotl's file {given}.jinja (utils/chat_templates/templates)"
        )


def _is_known(role: str, theirs: Any) -> bool:
    return isinstance(theirs, list) and set(map(str, theirs)) <= set(ROLES.get(role, ()))


def _jinja(draft: Draft, jinja: str | None) -> None:
    found = draft.found(jinja) if jinja and "{" not in jinja else None
    path = found or draft.folder / "template.jinja"
    if found is None:
        draft.files[path] = (jinja or "") + "\n"
    draft.put("data.chat_template", str(path))


TEMPLATES = {
    "chatml": "{% for turn in messages %}"
    "{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{% for turn in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' + turn.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
}


def _source(draft: Draft, entry: Section, kind: str) -> Source:
    found = find_source(draft, entry)
    if any(entry.given("type") in types for types in CHAT_TYPES.values()):
        named = {name: entry.given(f"field_{name}", text) or name for name in FIELDS}
        named |= {"conversations": named.pop("messages")} if kind == "chat" else {}
        found |= {"fields": {ours: theirs for ours, theirs in named.items() if ours != theirs}}
    field = entry.given("text_column", text) or (entry.given("field", text) if kind == "text" else None)
    if kind == "text" and field not in (None, "text"):
        found["text_field"] = field
    entry.given("trust_remote_code")  # no data set's code is run
    return found
