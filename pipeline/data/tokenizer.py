"""Tokenizers: trained on the data, or loaded from a file, a folder or the hub. Never runs code from a hub."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.hub import use_hub_or_cache
from pipeline.errors import DataError, summarize_error
from pipeline.files import find_unsafe_files, is_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE_CHARACTERS = 100_000  # characters
CONTEXT_CHARACTERS = 1_000  # characters on both sides of a cut by which it is judged
MAX_CUTS_TRIED = 50  # cuts that are tried before a text is taken whole
WORD_END = re.compile(r"\w(?=\W)")
END_OF_DOCUMENT = "<|endoftext|>"
# A bare tokenizer.json does not say which of its special tokens ends a document.
USUAL_END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")


def cut_text(core: Any, text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a text in pieces of about `size` characters that have the ids of the whole.

    A text is cut only between two words of the tokenizer's pre-tokenizer. Without one, or where nothing is
    certain, the rest of the text comes in one piece.

    Args:
        core: The `tokenizers.Tokenizer`; special tokens are taken for text.
    """
    start = 0
    while core.pre_tokenizer is not None and len(text) - start > size:
        ends = islice(WORD_END.finditer(text, start + size), MAX_CUTS_TRIED)
        cut = next((end.end() for end in ends if _is_divided(core, text, end.end())), None)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _is_divided(core: Any, text: str, cut: int) -> bool:
    """Return whether the text around a cut is divided there, into the words that each side has alone."""
    before, behind = text[max(0, cut - CONTEXT_CHARACTERS) : cut], text[cut : cut + CONTEXT_CHARACTERS]
    added = [token.content for token in core.get_added_tokens_decoder().values() if not token.special]
    if any(token in before + behind for token in added):
        return False
    return bool(_words(core, before) + _words(core, behind) == _words(core, before + behind))


def _words(core: Any, text: str) -> list[str]:
    normal = text if core.normalizer is None else core.normalizer.normalize_str(text)
    return [word for word, _ in core.pre_tokenizer.pre_tokenize_str(normal)]


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE as in GPT-2 (Radford et al. 2019): any text comes back unchanged.

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
    divider = Tokenizer.from_str(core.to_str())  # a tokenizer is locked while it is trained
    core.train_from_iterator((piece for text in documents for piece in cut_text(divider, text)), trainer)
    return _wrap(tokenizer_object=core, eos_token=END_OF_DOCUMENT)


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Return the `tokenizer.json` of a tokenizer that `train_tokenizer` made."""
    return _wrap(tokenizer_file=str(path), eos_token=END_OF_DOCUMENT)


def load_pretrained(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `data.tokenizer.pretrained`: a `tokenizer.json`, a local folder or a hub name.

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
    if problem := next(find_unsafe_files(beside), None) if beside.is_dir() else None:
        raise DataError(f"data.tokenizer.pretrained: {name}: {problem}; remove or replace it")
    try:
        with use_hub_or_cache("data.tokenizer.pretrained", name, DataError):
            tokenizer = _load(name, path)
    except DataError:
        raise
    except Exception as error:  # these libraries raise bare Exceptions as well
        reason = summarize_error(error, 300)
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


def get_token_id_bound(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return one more than the largest token id; more than `len(tokenizer)` where the ids have gaps."""
    return int(max(tokenizer.get_vocab().values())) + 1


def digest_tokenizer(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a hash of all that decides the ids of a text."""
    content = f"{tokenizer.eos_token_id} {tokenizer.backend_tokenizer.to_str()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
