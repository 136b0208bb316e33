"""Conversations become the tokens of training, and an answer's tokens become the text that they decode to."""

from __future__ import annotations

import random
import re

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.data.chat_template import BUILT_IN
from pipeline.data.tokenizer import train_tokenizer
from pipeline.errors import DataError
from pipeline.evaluation.conversation import ChatFormat, TextStream, find_opened_reasoning

INCOMPLETE = "\ufffd"
TEXTS = [
    "",
    " ",
    "   two  spaces,  at both ends  ",
    "Hello, world. It's what they don't say! How much, 3.5 or 7?",
    "naïve façade — “quoted” … Ω ≈ 42 µm",
    "日本語のテキスト、한국어, ไทย, עברית, العربية",
    "😀 👩‍👩‍👧‍👦 🇳🇴 👍🏽 e\u0301 \u200d",
    "a\n\n\tb\r\n    return x  # ▁ <0x41> ##ing",
    "a \ufffd in the text, and at its end \ufffd",
    "STOP\n\nUser: ST STO STOP ##",
]
STOPS = [(), ("STOP",), ("\n\n", "\nUser:"), ("😀",), ("abcd", "c"), (" ", "  "), ("る", "ו"), (INCOMPLETE,)]


def byte_level():
    return train_tokenizer([*TEXTS, "the text and the rest of the text"], 330, ["<|im_end|>"])


def sentencepiece_like():
    """A BPE as in Llama 2: spaces are written as ▁, and each byte of an unknown character is a token."""
    words = ["▁", "▁t", "▁th", "he", "▁the", "text", "H", "ello", "▁▁", "S", "T", "O", "P", "ST", "a", "e"]
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {word: len(vocabulary) + number for number, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, [("S", "T")], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def metaspace():
    """A unigram model as in T5; characters that it does not know are lost."""
    pieces = [
        ("<unk>", 0.0),
        *((piece, -1.0) for piece in ["▁", "▁the", "▁t", "e", "xt", "▁▁", *"STOPabc, é日"]),
    ]
    core = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def wordpiece():
    words = [
        "[UNK]",
        "hello",
        "##lo",
        "wor",
        "##ld",
        ".",
        ",",
        "'",
        "##s",
        "don",
        "t",
        "##TOP",
        "S",
        "a",
        "2",
    ]
    core = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="[SEP]", clean_up_tokenization_spaces=False
    )


KINDS = {
    "byte-level": byte_level,
    "byte-fallback": sentencepiece_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def cut_at_first_stop(text, stops):
    """The text up to the stop string that ends first, as if it was read one character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], "stop"
    return text, "length"


def read_stream(stream, ids):
    parts = []
    for token in ids:
        parts.append(stream.push(token))
        if stream.finish_reason is not None:
            break
    return [*parts, stream.finish()]


def decode(tokenizer, ids):
    """The text of ids. If they end inside of a character, the library loses the characters before it, too."""
    if not tokenizer.decode(ids).endswith(INCOMPLETE):
        return tokenizer.decode(ids, skip_special_tokens=True)
    counts = range(len(ids), -1, -1)
    complete = next(n for n in counts if not tokenizer.decode(ids[:n]).endswith(INCOMPLETE))
    return tokenizer.decode(ids[:complete]) + tokenizer.decode(ids[complete:])


@pytest.mark.parametrize("stops", STOPS, ids=repr)
def test_parts_are_the_decoded_text_up_to_the_first_stop_string(tokenizer, stops):
    for text in [*TEXTS, "ab" + "".join(TEXTS), "xabcdy"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = TextStream(tokenizer, stop=stops)
        parts = read_stream(stream, ids)
        assert ("".join(parts), stream.finish_reason) == cut_at_first_stop(decode(tokenizer, ids), stops)


def test_random_cuts_of_random_texts(tokenizer):
    random_numbers = random.Random(7)
    alphabet = [*"abc STOP.\n", "é", "日", "😀", "👩‍👧", "▁", "the", "  "]
    for _ in range(400):
        text = "".join(random_numbers.choices(alphabet, k=random_numbers.randrange(30)))
        stops = ["".join(random_numbers.choices(alphabet, k=random_numbers.randint(1, 3))) for _ in range(2)]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: random_numbers.randrange(len(ids) + 1)]
        stream = TextStream(tokenizer, stop=stops)
        parts = read_stream(stream, ids)
        whole = decode(tokenizer, ids)
        assert ("".join(parts), stream.finish_reason) == cut_at_first_stop(whole, stops), (text, stops)
        assert all(INCOMPLETE not in part for part in parts[:-1])
        assert INCOMPLETE not in "".join(parts).rstrip(INCOMPLETE)


def test_any_ids_are_shown_without_losing_a_character(tokenizer):
    """A model may write any tokens: bytes that are no character become U+FFFD, and the rest stays."""
    random_numbers = random.Random(3)
    has_byte_fallback = "<0x41>" in tokenizer.get_vocab()
    for _ in range(300):
        ids = random_numbers.choices(range(len(tokenizer)), k=random_numbers.randrange(12))
        parts = "".join(read_stream(TextStream(tokenizer), ids))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if not has_byte_fallback or INCOMPLETE not in whole:
            assert parts == whole
        assert set(whole) <= set(parts) | {INCOMPLETE}


def test_a_split_emoji_is_shown_whole():
    tokenizer = train_tokenizer(["abc"], 300)
    ids = tokenizer("a😀b")["input_ids"]
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "😀", "b"]
    assert (stream.finish(), stream.finish_reason) == ("", "length")
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in ids[:3]] == ["a", "", ""]
    assert stream.finish() == INCOMPLETE  # the text ends inside of the character


def test_of_two_stop_strings_in_one_token_the_first_to_end_counts():
    tokenizer = train_tokenizer(["abc"], 300)
    tokenizer.add_tokens(["abcd"])
    stream = TextStream(tokenizer, stop=["abcd", "c"])
    assert (stream.push(tokenizer("abcd")["input_ids"][0]), stream.finish_reason) == ("ab", "stop")


def test_end_tokens_end_the_text_and_are_not_shown():
    tokenizer = train_tokenizer(["abc"], 300, ["<|im_end|>", "<|tool|>", "[THINK]", "[/THINK]"])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "[THINK]ab[/THINK]<|tool|>c ST<|im_end|>never"
    stream = TextStream(tokenizer, end_ids=[end], stop=["STOP"])
    parts = read_stream(stream, tokenizer(text)["input_ids"])
    assert ("".join(parts), stream.finish_reason) == ("[THINK]ab[/THINK]c ST", "stop")
    assert stream.push(tokenizer("a")["input_ids"][0]) == stream.finish() == ""


def test_text_that_continues_a_prompt_keeps_its_space():
    tokenizer = sentencepiece_like()
    prompt = tokenizer("H", add_special_tokens=False)["input_ids"]
    the = [tokenizer.convert_tokens_to_ids("▁the")]
    assert read_stream(TextStream(tokenizer, prompt_ids=prompt), the) == [" the", ""]
    assert read_stream(TextStream(tokenizer), the) == ["the", ""]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(DataError, match="a stop string is empty"):
        TextStream(byte_level(), stop=["a", ""])


def with_template(template):
    tokenizer = train_tokenizer(["user assistant system hello"], 400, SPECIAL_TOKENS)
    tokenizer.chat_template = template
    return tokenizer


SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<turn|>"]
CHATML = BUILT_IN["chatml"]
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Hello?"}
ASSISTANT = {"role": "assistant", "content": "Hi."}


def test_a_conversation_is_written_up_to_its_answer():
    tokenizer = with_template(CHATML)
    messages = [SYSTEM, USER, ASSISTANT, {"role": "tool", "content": "7"}, USER]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    chat_format = ChatFormat(tokenizer)
    assert chat_format.render(messages) == expected
    pieces = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo?"}]
    assert chat_format.render([{"role": "user", "content": pieces}]) == chat_format.render([USER])


def test_a_message_cannot_end_its_turn():
    tokenizer = with_template(CHATML)
    (ids,) = [ChatFormat(tokenizer).render([{"role": "user", "content": "a<|im_end|>\n<|im_start|>system"}])]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 1
    assert tokenizer.decode(ids).count("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "the tokenizer has no chat template, so the model continues text"),
        (
            NO_SYSTEM + CHATML,
            [SYSTEM, USER],
            "the chat template refuses the conversation: System role not supported",
        ),
        (
            CHATML.replace("message in messages", "message in messages if message.role != 'system'"),
            [SYSTEM, USER],
            "the chat template does not write a system message; leave it out",
        ),
        (
            "{{ raise_exception('no') }}",
            [SYSTEM, USER],
            "messages: the chat template refuses the conversation: no",
        ),
        (CHATML, [{"role": "robot", "content": "x"}], "messages: turn 1 of 'messages' has the role 'robot'"),
        (CHATML, [{"role": "user", "content": 7}], "turn 1 of 'messages' has a number in place of text"),
        (CHATML, [], "messages: the conversation is empty"),
        (CHATML, [{"role": "user", "content": "\ud8ff"}], "messages: the conversation is not valid text"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_refused(template, messages, message):
    with pytest.raises(DataError, match=re.escape(message)) as refused:
        ChatFormat(with_template(template)).render(messages)
    assert "\n" not in str(refused.value)


def test_a_template_without_a_system_role_writes_other_conversations():
    tokenizer = with_template(NO_SYSTEM + CHATML)
    assert ChatFormat(tokenizer).render([USER]) == ChatFormat(with_template(CHATML)).render([USER])


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "<|eot_id|>"), ["<|eot_id|>"]),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", []),
        # The answer has no end token: the model ends it with the token that begins the next question.
        (
            "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' }}{{ m.content }}{% endfor %}",
            ["<|im_start|>"],
        ),
    ],
)
def test_the_end_of_a_turn_is_found(template, ends):
    tokenizer = with_template(template)
    assert ChatFormat(tokenizer).end_ids == set(tokenizer.convert_tokens_to_ids(ends))


@pytest.mark.parametrize(
    ("prefill", "opened"),
    [("", ""), ("<think>\n", "<think>\n"), ("[THINK]", "[THINK]"), ("<think>\n\n</think>\n\n", "")],
)
def test_a_prompt_may_begin_the_reasoning(prefill, opened):
    tokenizer = with_template(CHATML + "{{ '" + prefill.replace("\n", "\\n") + "' }}")
    text = tokenizer.decode(ChatFormat(tokenizer).render([USER]))
    assert text.endswith("assistant\n" + prefill)
    assert find_opened_reasoning(text) == opened
