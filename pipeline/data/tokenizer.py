"""Tokenizers: trained on the data, or loaded from a file, a folder or the hub. Never runs code from a hub."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.hub import hub_or_cache
from pipeline.errors import DataError, one_line
from pipeline.files import is_path, unsafe_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PIECE = 100_000  # characters
# Between a letter or digit and the space, or the punctuation mark, behind it. What stands before a mark is
# kept to characters that no normalizer turns into several.
SPACE = r"(?<=[^\W_])(?= )"
MARK = r'(?<=[0-9A-Za-z\u3400-\u4dbf\u4e00-\u9fff])(?=[,.;:!?")\u3001\u3002\uff0c\uff1a\uff1b\uff01\uff1f])'
BOTH, NONE = frozenset({SPACE, MARK}), frozenset[str]()
LOCAL_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")

WHITE_SPACE = r"\s+"
MARKS = (
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
)
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# The alternatives that the patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2 and DeepSeek 3 are made of. None
# matches a letter or digit together with a space or mark behind it, or looks at what is left of its match;
# the one look to the right is that of white space at what follows it.
ALTERNATIVES = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'(?:[sdmt]|ll|ve|re)"),
    *(CONTRACTIONS, "(?i:'s|'t|'re|'ve|'m|'ll|'d|'ll)", "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{L}+"),
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,3}+"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"),
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s*[\r\n]++", r"\s+(?!\S)", WHITE_SPACE, r"\s++"),
    *MARKS,
}


def find_places(tokenizer: dict[str, Any]) -> re.Pattern[str] | None:
    """What matches (nothing) wherever a text can be cut; None: nowhere that is certain.

    Args:
        tokenizer: The content of its `tokenizer.json`; special tokens are taken for text.
    """
    pre_tokenizer = tokenizer.get("pre_tokenizer")
    if pre_tokenizer is None or not _is_local(tokenizer.get("normalizer")):
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    judged = [_judge(step, is_last=step is steps[-1]) for step in steps]
    divided = NONE.union(*(divides for divides, _ in judged)).intersection(*(keeps for _, keeps in judged))
    if not divided:
        return None
    places = re.compile("|".join(sorted(divided)))
    for token in tokenizer.get("added_tokens") or []:
        is_wide = token["lstrip"] or token["rstrip"] or token["single_word"]
        contents = (token["content"], unicodedata.normalize("NFKC", token["content"]))
        if not token["special"] and (is_wide or any(map(places.search, contents))):
            return None
    return places


def cut_text(text: str, places: re.Pattern[str] | None, size: int = PIECE) -> Iterator[str]:
    """The text in pieces of `size` characters, at least 1, and what there is up to the next place."""
    start = 0
    while places is not None and (found := places.search(text, start + size)) is not None:
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text


def _is_local(normalizer: dict[str, Any] | None) -> bool:
    """Whether it does the same to two pieces as to the whole. That of BERT puts spaces around ideographs."""
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_is_local, normalizer["normalizers"]))
    return normalizer["type"] in LOCAL_NORMALIZERS


def _judge(step: dict[str, Any], is_last: bool) -> tuple[frozenset[str], frozenset[str]]:
    """At which places a step of a pre-tokenizer surely divides; and at which a cut changes nothing for it."""
    kind = step["type"]
    if kind in ("BertPreTokenizer", "Whitespace"):
        return BOTH, BOTH
    if kind == "WhitespaceSplit":
        return frozenset({SPACE}), BOTH
    if kind == "Digits" or (kind == "Punctuation" and step["behavior"] in ("Isolated", "Contiguous")):
        return NONE, BOTH
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
        alternatives = _alternatives(step["pattern"].get("Regex", ""))
        if not alternatives <= ALTERNATIVES:
            return NONE, NONE
        takes_all = not alternatives.isdisjoint((WHITE_SPACE, r"\s++")) and not alternatives.isdisjoint(MARKS)
        return (BOTH if takes_all else NONE), BOTH
    # These write other characters, by which a step behind them would go.
    if kind == "ByteLevel" and is_last:  # it may put a space before a text that begins with none
        keeps = frozenset({SPACE}) if step["add_prefix_space"] else BOTH
        return (BOTH if step.get("use_regex", True) else NONE), keeps
    if kind == "Metaspace" and is_last:
        return (frozenset({SPACE}) if step.get("split", True) else NONE), frozenset({SPACE})
    return NONE, NONE


def _alternatives(pattern: str) -> set[str]:
    """What stands between the bars of a pattern that are in no bracket."""
    found, depth, in_class, escaped, start = set(), 0, False, False, 0
    for place, character in enumerate(pattern):
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            found.add(pattern[start:place])
            start = place + 1
    return found | {pattern[start:]}


END_OF_DOCUMENT = "<|endoftext|>"
# A bare tokenizer.json does not say which of its special tokens ends a document.
USUAL_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE as in GPT-2 (Radford et al. 2019): any text can be encoded, and comes back unchanged.

    The same documents give the same ids. There are fewer entries than `vocab_size` where the text has no more
    pairs that occur twice. `special_tokens` are among them, behind the end-of-document token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    places = find_places(json.loads(core.to_str()))
    core.train_from_iterator((piece for text in documents for piece in cut_text(text, places)), trainer)
    return _wrap(tokenizer_object=core, eos_token=END_OF_DOCUMENT)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The `tokenizer.json` of a tokenizer that `train_tokenizer` made."""
    return _wrap(tokenizer_file=str(path), eos_token=END_OF_DOCUMENT)


def load_pretrained(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of `data.tokenizer.pretrained`: a `tokenizer.json`, a local folder or a hub name.

    Raises:
        DataError: nothing there, not a (fast) tokenizer, or one without an end-of-document token.
    """
    path = Path(name).expanduser()
    if not path.exists() and (is_path(name) or name.endswith(".json")):
        raise DataError(f"data.tokenizer.pretrained: {name} does not exist")
    if path.is_dir() and not any(file.name.startswith(("tokenizer", "vocab")) for file in path.iterdir()):
        raise DataError(
            f"data.tokenizer.pretrained: the folder {name} has no tokenizer; name the one that the model was "
            "trained with (a folder, a tokenizer.json or a hub name)"
        )
    if path.exists() and not path.is_dir() and not path.is_file():
        raise DataError(f"data.tokenizer.pretrained: {name} is no file: a pipe or a device")
    beside = path.parent if path.name == "tokenizer.json" else path
    if problem := next(unsafe_files(beside), None) if beside.is_dir() else None:
        raise DataError(f"data.tokenizer.pretrained: {name}: {problem}; remove or replace it")
    try:
        with hub_or_cache("data.tokenizer.pretrained", name, DataError):
            tokenizer = _load(name, path)
    except DataError:
        raise
    except Exception as error:  # these libraries raise bare Exceptions as well
        reason = one_line(error, 300)
        what = name if path.exists() else f"{name} from the hub (nor is there a folder of that name)"
        raise DataError(f"data.tokenizer.pretrained: cannot load {what}: {reason}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"data.tokenizer.pretrained: {name} is a {type(tokenizer).__name__}, written in Python; "
            "expected one with a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer.pretrained: {name} has no end-of-document token; "
            "set eos_token in the tokenizer_config.json beside its tokenizer.json"
        )
    return tokenizer


def _load(name: str, path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.is_file():
        if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(str(path.parent), trust_remote_code=False)
        tokenizer = _wrap(tokenizer_file=str(path))
        vocabulary = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in USUAL_END_TOKENS if token in vocabulary), None)
        return tokenizer
    return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)


def _wrap(**given: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(clean_up_tokenization_spaces=False, **given)


def token_ids_end(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest token id; more than `len(tokenizer)` where the ids have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def digest_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of all that decides the ids of a text."""
    content = f"{tokenizer.eos_token_id} {tokenizer.backend_tokenizer.to_str()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
