"""A long document has the ids of the whole wherever it is cut, for every kind of tokenizer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from pipeline.config.data_schema import TextDataConfig
from pipeline.data.documents.records import Tally
from pipeline.data.prepared import encoder
from pipeline.data.prepared.encoder import EncoderSettings, TextEncoder
from pipeline.data.tokenizer import cut_text, train_tokenizer

pytestmark = pytest.mark.slow

ALPHABET = [*"abzAZ 09.,;:!?'\"()-_#\n\r\t字。，かが한éﬁ½⑴İ\u00a0\u3000\u2028▁\x00"]
ALPHABET += ["  ", " a", "n't", "'s", "'LL", " the", "123", "e\u0301", "🤷🏽", "क्", "<tool>"]
LEFT = r"[^\r\n\p{L}\p{N}]?"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "gpt4o": f"{LEFT}{UPPER}*{LOWER}+{CONTRACTIONS}?|{LEFT}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek3": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def split(pattern: str):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
NUMBERS = r"\p{N}{1,3}"
HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
PRE_TOKENIZERS = {
    "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte level with a space before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "digits, byte level": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
    ),
    **{name: pre_tokenizers.Sequence([split(pattern), BYTES]) for name, pattern in PATTERNS.items()},
    "three": pre_tokenizers.Sequence([split(NUMBERS), split(HAN), split(PATTERNS["deepseek3"]), BYTES]),
    "metaspace": pre_tokenizers.Metaspace(),
    "metaspace, first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "words, metaspace": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    ),
    "bert": pre_tokenizers.BertPreTokenizer(),
    "words": pre_tokenizers.Whitespace(),
}
NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "nfkc, lower": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "nfd, accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
}


# Text that tokenisers most often disagree about.
NASTY = (
    "",
    " ",
    "   \n\t \r\n\r\n  x",
    "don't I'LL we've IT'S 'tis",
    "1234567890 12,345.67 １２３ ½ ²",
    "a\x00b\x7f\x1b[0m",
    "é e\u0301 \u1e9b\u0323 ﬁ İi ß",
    "🤷🏽\u200d♀️🇩🇪 \U0010ffff\ufffd",
    "\ufeffbyte order mark\u2028line\u2029paragraph\u00a0space\u200b\u3000",
    "日本語のテキスト 한국어 العربية עברית हिन्दी ไทย",
    "=" * 200 + "-" * 77 + " " * 130 + "x",
    "\t\tif (x != 0) { return ~x; } // ok\r\n",
    "snake_case CamelCase SHOUTED __dunder__ x1y2",
)


def nasty_texts(number: int) -> list[str]:
    drawn = random.Random(number)
    texts = ["".join(drawn.choices(ALPHABET, k=drawn.randint(1, 60))) for _ in range(number)]
    return [*texts, *NASTY, " ".join(NASTY)]


def trained(pre_tokenizer, normalizer=None) -> Tokenizer:
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        core.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<end>"], show_progress=False)
    core.train_from_iterator(nasty_texts(150), trainer)
    core.encode_special_tokens = True
    return core


def ids_of(core: Tokenizer, texts: list[str]) -> list[int]:
    return [id for row in core.encode_batch_fast(texts, add_special_tokens=False) for id in row.ids]


def count_cuts(core: Tokenizer) -> int:
    """Cut texts wherever they can be; return how many pieces more there are than texts."""
    more = 0
    for text in nasty_texts(100):
        pieces = list(cut_text(core, text, 1))
        assert "".join(pieces) == text
        assert ids_of(core, pieces) == ids_of(core, [text]), text
        more += len(pieces) - 1
    return more


@pytest.mark.parametrize(
    ("name", "normalizer"),
    [
        *((name, "none") for name in PRE_TOKENIZERS),
        *(("llama3", name) for name in NORMALIZERS if name != "none"),
    ],
)
def test_a_text_in_pieces_has_the_ids_of_the_whole(name, normalizer):
    assert count_cuts(trained(PRE_TOKENIZERS[name], NORMALIZERS[normalizer])) > 100


def test_so_it_does_with_added_tokens():
    core = trained(PRE_TOKENIZERS["llama3"], normalizers.NFC())
    core.add_tokens(["<tool>", "a !", AddedToken("b", rstrip=True)])
    assert count_cuts(core) > 30


@pytest.mark.parametrize("pre_tokenizer", [None, pre_tokenizers.Metaspace(split=False)], ids=["none", "one"])
def test_a_tokenizer_that_divides_no_text_gets_it_whole(pre_tokenizer):
    core = trained(pre_tokenizers.Whitespace())
    core.pre_tokenizer = pre_tokenizer
    assert count_cuts(core) == 0


def test_the_encoder_cuts_long_texts_alone(tmp_path, monkeypatch):
    core = trained(PRE_TOKENIZERS["llama3"])
    core.save(str(tmp_path / "tokenizer.json"))
    settings = EncoderSettings(
        TextDataConfig(kind="text", paths=["x"]), tmp_path, 1, core.get_vocab_size(), threads=1
    )
    texts = [text for text in nasty_texts(200) if text]
    whole = TextEncoder(settings)([("", text) for text in texts], Tally())
    monkeypatch.setattr(encoder, "LONG_TEXT_CHARACTERS", 20)
    monkeypatch.setattr(encoder, "PIECE_CHARACTERS", 5)
    monkeypatch.setattr(encoder, "cut_text", lambda core, text: cut_text(core, text, 5))
    cut = TextEncoder(settings)([("", text) for text in texts], Tally())
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        assert one.ids[-1] == 1


def test_training_on_a_long_text_gives_the_tokenizer_of_its_pieces():
    text = "".join(f"{text} end\n" for text in nasty_texts(2500))
    assert len(text) > 100_000
    by_pieces = train_tokenizer(cut_text(trained(PRE_TOKENIZERS["byte level"]), text, 2_000), 700)
    assert by_pieces.backend_tokenizer.to_str() == train_tokenizer([text], 700).backend_tokenizer.to_str()


PEAK = """
import resource, sys, pathlib
from pipeline.config.data_schema import TextDataConfig
from pipeline.data.documents.records import Tally
from pipeline.data.prepared.encoder import EncoderSettings, TextEncoder
from pipeline.data.tokenizer import train_tokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

train_tokenizer(["one two"], 300)
folder = pathlib.Path(sys.argv[1])
text = " ".join(f"word{number * 7919 % 5003}" for number in range(400_000))
before = peak()
train_tokenizer([text], 400).save_pretrained(folder)
trained = peak() - before
settings = EncoderSettings(TextDataConfig(kind="text", paths=["x"]), folder, 0, 400, threads=1)
TextEncoder(settings)([("", text)], Tally())
print(trained // len(text), (peak() - before) // len(text))
"""


def test_memory_for_one_long_text_is_bounded(tmp_path: Path):
    """It took 91 times the text to train, and 9 to encode; a few copies of the text and its ids are left."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "RAYON_NUM_THREADS": "2"},
    )
    trained_times, encoded_times = map(int, done.stdout.split())
    assert trained_times < 15
    assert encoded_times < 15
