"""Finds or trains the tokenizer of a recipe, and saves it to a cache folder that all processes share."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.data_schema import ConversationsConfig, DocumentsConfig
from pipeline.data.chat_layouts import Conversation, read_conversation
from pipeline.data.chat_template import find_template, get_special_tokens
from pipeline.data.documents.part import SourcePart, read_records, read_texts
from pipeline.data.documents.records import Tally
from pipeline.data.documents.streams import hash_json
from pipeline.data.preference_layouts import PreferenceExample, read_example
from pipeline.data.prepared.part_files import (
    compute_checksum,
    explain_write_errors,
    fill_folder,
    find_damage,
    hash_keys,
    hold_lock,
    select_held_out,
    write_json,
)
from pipeline.data.tokenizer import (
    digest_tokenizer,
    get_token_id_bound,
    load_pretrained,
    read_tokenizer,
    train_tokenizer,
)
from pipeline.errors import DataError
from pipeline.files import format_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TRAINING_VERSION = 2  # part of the key: increase it when a change alters the trained tokenizer
MAX_TRAINING_BYTES = 1_000_000_000  # of text: more takes minutes per GB and hardly changes the tokens
INDEX_FILE = "index.json"
MARKER_PATTERN = re.compile(r"<[|｜][^\s<>'\"{}|｜]+[|｜]>")  # a template's marker, such as <|im_end|>
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer and the folder with its files.

    Attributes:
        path: Folder from which worker processes load the tokenizer.
        tokenizer: The loaded tokenizer.
        digest: Hash of everything that decides the ids of a text.
        vocab_size: Upper bound of token ids (exclusive).
    """

    path: Path
    tokenizer: PreTrainedTokenizerFast
    digest: str
    vocab_size: int


def find_tokenizer(config: DocumentsConfig, parts: Sequence[SourcePart], cache_dir: Path) -> TokenizerFolder:
    """Load the recipe's tokenizer, or train it on the training split of `parts`; save it to the cache.

    For chat and preference data, the tokenizer gets the recipe's chat template. One process trains and saves
    the tokenizer; others that need the same one wait.

    Args:
        config: The recipe's data section.
        parts: Parts of all training sources.
        cache_dir: The recipe's cache folder.

    Raises:
        DataError: The pretrained tokenizer cannot be used, chat data has no chat template, a document cannot
            be read, or the cache cannot be written.
        ConfigError: The recipe needs a chat template, and jinja2 is not installed.
    """
    conversations = config.conversations
    if config.tokenizer.pretrained is not None:
        tokenizer = load_pretrained(config.tokenizer.pretrained)
        if conversations is not None:
            tokenizer.chat_template = _find_chat_template(conversations, tokenizer.chat_template)
            _warn_of_unknown_markers(conversations, tokenizer)
        digest = digest_tokenizer(tokenizer)
        path = _save_once(cache_dir, hash_json([digest, str(tokenizer.chat_template)]), lambda: tokenizer)
    else:
        identity: list[Any] = [
            TRAINING_VERSION,
            "text" if conversations is None else conversations.kind,
            config.tokenizer.vocab_size,
            config.eval_fraction,
            sorted(part.digest for part in parts),
        ]
        template = None
        if conversations is not None:
            template = _find_chat_template(conversations, None)  # may fail, so do it before the training
            identity.append([conversations.layout, *get_special_tokens(conversations)])
        path = _save_once(cache_dir, hash_json(identity), lambda: _train_on_parts(config, parts))
        tokenizer = read_tokenizer(path / "tokenizer.json")
        tokenizer.chat_template = template
        digest = digest_tokenizer(tokenizer)
    return TokenizerFolder(path, tokenizer, digest, get_token_id_bound(tokenizer))


def _find_chat_template(
    config: ConversationsConfig, tokenizer_template: str | dict[str, str] | None
) -> str | None:
    """Return the Jinja text of the template; `None` for preference data without one, which is plain text."""
    if config.preferences is not None and config.chat_template is None and not tokenizer_template:
        return None
    return find_template(config, tokenizer_template)


def _warn_of_unknown_markers(config: ConversationsConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Warn of markers in `data.chat_template` that the tokenizer splits into several tokens.

    A tokenizer's own template gives no warning, since the model was trained with it.
    """
    if config.chat_template is None:
        return
    num_tokens = {
        marker: len(tokenizer.encode(marker, add_special_tokens=False))
        for marker in MARKER_PATTERN.findall(str(tokenizer.chat_template))
    }
    unknown = [marker for marker, count in num_tokens.items() if count > 1]
    if unknown:
        _warn_once(
            f"data.chat_template: {config.chat_template} writes {' and '.join(unknown)}, no token of "
            f"data.tokenizer.pretrained ({config.tokenizer.pretrained}), which splits {unknown[0]} into "
            f"{num_tokens[unknown[0]]} tokens; use a template with the tokenizer's own markers, or add these "
            "markers to the tokenizer's folder (add_special_tokens, save_pretrained) and set "
            "model.grow_vocabulary=true"
        )


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _save_once(cache_dir: Path, key: str, create: Callable[[], PreTrainedTokenizerFast]) -> Path:
    """Return the folder of a key; if it is missing or damaged, one process calls `create` and writes it."""
    folder = cache_dir / "tokenizers" / key
    if find_damage(folder, INDEX_FILE, verify=False) is None:
        return folder
    notice = "waiting for another process, which is creating the tokenizer"
    with hold_lock(cache_dir, f"tokenizer-{key}", lambda: notice):
        if find_damage(folder, INDEX_FILE, verify=False) is not None:
            if folder.exists():
                log.warning("the tokenizer in %s is damaged: creating it again", folder)
            tokenizer = create()
            with (
                fill_folder(folder, cache_dir, "the tokenizer") as temporary,
                explain_write_errors(cache_dir, "the tokenizer"),
            ):
                tokenizer.save_pretrained(str(temporary))
                # Worker processes load this file, so it must equal the tokenizer in memory, whatever
                # save_pretrained changed.
                (temporary / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
                files = {
                    file.name: {"bytes": file.stat().st_size, "xxh3_128": compute_checksum(file)}
                    for file in sorted(temporary.iterdir())
                }
                write_json(temporary / INDEX_FILE, {"files": files})
    return folder


def _train_on_parts(config: DocumentsConfig, parts: Sequence[SourcePart]) -> PreTrainedTokenizerFast:
    size = min(sum(part.size for part in parts), MAX_TRAINING_BYTES)
    log.info("training the tokenizer on %s", format_bytes(size))
    start = time.perf_counter()
    documents = _iter_training_texts(config, parts)
    special_tokens = () if config.conversations is None else get_special_tokens(config.conversations)
    tokenizer = train_tokenizer(documents, config.tokenizer.vocab_size, special_tokens)
    log.info("trained a tokenizer of %d entries in %.1f s", len(tokenizer), time.perf_counter() - start)
    return tokenizer


def _iter_training_texts(config: DocumentsConfig, parts: Sequence[SourcePart]) -> Iterator[str]:
    """Yield texts of the training split, up to MAX_TRAINING_BYTES.

    Parts are read in the order of their digests, so that a limited amount is a fair sample of all sources.
    """
    remaining_bytes = MAX_TRAINING_BYTES
    for part in sorted(parts, key=lambda part: part.digest):
        for key, text in _iter_keys_and_texts(config, part):
            if select_held_out(hash_keys([key]), config.eval_fraction)[0]:
                continue
            yield text
            remaining_bytes -= len(key)
            if remaining_bytes <= 0:
                return


def _iter_keys_and_texts(config: DocumentsConfig, part: SourcePart) -> Iterator[tuple[bytes, str]]:
    """Yield the key and the text of each document; for conversations, the text of all turns."""
    conversations = config.conversations
    preferences = config.preferences
    if conversations is None:
        yield from ((text.encode(), text) for _, text in read_texts(part, Tally()))
        return
    for where, record in read_records(part, Tally()):
        try:
            example: Conversation | PreferenceExample
            if preferences is not None:
                example = read_example(where, record, preferences.layout, unpaired=preferences.is_unpaired)
            else:
                example = read_conversation(where, record, conversations.layout)
        except DataError:
            if not part.skip_bad_records:
                raise
            continue
        yield example.key, "\n".join(example.texts())
