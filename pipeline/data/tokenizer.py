"""Trains tokenizers, or loads them from a file, a folder or the hub. Code from the hub is never run."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.hub import use_hub_or_cache
from pipeline.errors import DataError, summarize_error
from pipeline.files import find_unsafe_files, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 100_000  # approximate size of a piece of a long text
CONTEXT_CHARACTERS = 1_000  # on each side of a cut, in which the words are compared
MAX_CUT_TRIALS = 50  # after as many unsuitable cuts, the rest of the text is one piece
WORD_END_PATTERN = re.compile(r"\w(?=\W)")
END_OF_DOCUMENT = "<|endoftext|>"
# A tokenizer.json alone does not say which of its special tokens ends a document.
KNOWN_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
SENTENCEPIECE_SPACE = "\u2581"
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def cut_text(core: Any, text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a text in pieces whose ids, concatenated, are those of the whole text.

    Pieces save memory: the tokenizers library needs 90 times the size of a text for training, and 9 times for
    encoding. A text is cut only between two words of the pre-tokenizer, which must split the text around the
    cut into the same words with and without the cut. If there is no pre-tokenizer or no such cut, the rest of
    the text is one piece.

    Args:
        core: The `tokenizers.Tokenizer`, which must encode special tokens as text.
        text: Text to cut.
        size: Approximate number of characters in a piece.
    """
    start = 0
    while core.pre_tokenizer is not None and len(text) - start > size:
        ends = islice(WORD_END_PATTERN.finditer(text, start + size), MAX_CUT_TRIALS)
        cut = next((end.end() for end in ends if _is_word_boundary(core, text, end.end())), None)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _is_word_boundary(core: Any, text: str, cut: int) -> bool:
    """Return whether the text around a cut has the same words as its two sides have separately."""
    before = text[max(0, cut - CONTEXT_CHARACTERS) : cut]
    after = text[cut : cut + CONTEXT_CHARACTERS]
    # Added tokens are matched before the pre-tokenizer runs, so a cut may divide one.
    added = [token.content for token in core.get_added_tokens_decoder().values() if not token.special]
    if any(token in before + after for token in added):
        return False
    return _split_words(core, before) + _split_words(core, after) == _split_words(core, before + after)


def _split_words(core: Any, text: str) -> list[str]:
    normalized = text if core.normalizer is None else core.normalizer.normalize_str(text)
    return [word for word, _ in core.pre_tokenizer.pre_tokenize_str(normalized)]


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer as in GPT-2 (Radford et al. 2019), which decodes any text unchanged.

    The same documents give the same ids. The vocabulary includes the end-of-document token, followed by
    `special_tokens`. It has fewer than `vocab_size` entries if no further pair of tokens occurs twice.
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
    cutter = Tokenizer.from_str(core.to_str())  # a copy, since `core` is locked during training
    core.train_from_iterator((piece for text in documents for piece in cut_text(cutter, text)), trainer)
    return _make_tokenizer(tokenizer_object=core, eos_token=END_OF_DOCUMENT)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the `tokenizer.json` of a tokenizer that `train_tokenizer` made."""
    return _make_tokenizer(tokenizer_file=str(path), eos_token=END_OF_DOCUMENT)


def load_pretrained(name: str, key: str = "data.tokenizer.pretrained") -> PreTrainedTokenizerFast:
    """Load the tokenizer of `data.tokenizer.pretrained`: a `tokenizer.json`, a local folder or a hub name.

    Code in a tokenizer's folder is not run.

    Args:
        name: File, folder or hub name.
        key: Key of the recipe, or option, that has the name, for messages.

    Raises:
        DataError: The path does not exist or has no tokenizer; its folder has an unsafe file; the tokenizer
            cannot be loaded, is not a fast one, or has no end-of-document token.
    """
    path = Path(name).expanduser()
    if not path.exists() and (is_path(name) or name.endswith(".json")):
        raise DataError(f"{key}: {name} does not exist")
    if path.is_dir() and not any(file.name.startswith(("tokenizer", "vocab")) for file in path.iterdir()):
        raise DataError(
            f"{key}: the folder {name} has no tokenizer; name the one that the model was "
            "trained with (a folder, a tokenizer.json or a hub name)"
        )
    if path.exists() and not path.is_dir() and not path.is_file():
        raise DataError(f"{key}: {name} is a pipe or a device; expected a file or a folder")
    folder = path.parent if path.name == "tokenizer.json" else path
    problem = next(find_unsafe_files(folder), None) if folder.is_dir() else None
    if problem is not None:
        raise DataError(f"{key}: {name}: {problem}; remove or replace it")
    try:
        with use_hub_or_cache(key, name, DataError):
            tokenizer = _load_tokenizer(name, path)
    except DataError:
        raise
    except Exception as error:  # the libraries raise plain Exception as well
        reason = summarize_error(error, 300)
        what = name if path.exists() else f"{name} from the hub (there is no local file or folder {name})"
        raise DataError(f"{key}: cannot load {what}: {reason}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"{key}: {name} is a {type(tokenizer).__name__}, which is written in Python; "
            "expected a tokenizer with a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{key}: {name} has no end-of-document token; "
            "set eos_token in the tokenizer_config.json beside its tokenizer.json"
        )
    return tokenizer


def _load_tokenizer(name: str, path: Path) -> Any:
    """Load a tokenizer from a file or folder, or from the hub if `path` does not exist."""
    from transformers import AutoTokenizer

    if path.is_file():
        if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(str(path.parent), trust_remote_code=False)
        tokenizer = _make_tokenizer(tokenizer_file=str(path))
        vocabulary = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in KNOWN_END_TOKENS if token in vocabulary), None)
        return tokenizer
    return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name, trust_remote_code=False)


def _make_tokenizer(**arguments: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(clean_up_tokenization_spaces=False, **arguments)


def get_token_id_bound(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest token id plus 1, which is more than `len(tokenizer)` if the ids have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def count_token_bytes(tokenizer: PreTrainedTokenizerFast) -> NDArray[np.int64] | None:
    """Return the number of bytes of text that each token id stands for, (get_token_id_bound,).

    In a byte-level vocabulary a token has one character for each byte. In SentencePiece's, U+2581 is a space
    and `<0xAB>` is a byte. A special token stands for no text.

    Returns:
        The numbers; `None` for a vocabulary of another kind.
    """
    core = tokenizer.backend_tokenizer
    decoder = repr(core.decoder)
    is_byte_level = "ByteLevel(" in decoder
    if not is_byte_level and SENTENCEPIECE_SPACE not in decoder:
        return None
    counts = np.zeros(get_token_id_bound(tokenizer), np.int64)
    for token, index in tokenizer.get_vocab().items():
        if is_byte_level:
            counts[index] = len(token)
        elif BYTE_TOKEN.fullmatch(token):
            counts[index] = 1
        else:
            counts[index] = len(token.replace(SENTENCEPIECE_SPACE, " ").encode())
    for index, added in core.get_added_tokens_decoder().items():
        counts[index] = 0 if added.special else len(added.content.encode())
    counts[tokenizer.all_special_ids] = 0
    return counts


def digest_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of everything that decides the ids of a text."""
    content = f"{tokenizer.eos_token_id} {tokenizer.backend_tokenizer.to_str()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
