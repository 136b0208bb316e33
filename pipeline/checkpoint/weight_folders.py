"""Where weights from elsewhere lie: a path -> the files behind it, or one line that says what it is instead.

What lies outside the folder that was named is not read.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pipeline import foreign
from pipeline.checkpoint.folders import named_in, steps_in
from pipeline.checkpoint.manifest import MANIFEST, read_manifest
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.checkpoint.verify import check_content, check_sizes, look
from pipeline.checkpoint.weight_files import (
    PICKLES,
    OwnCheckpoint,
    Pickles,
    Safetensors,
    WeightFile,
    refusal,
)
from pipeline.errors import CheckpointError, ModelError

log = logging.getLogger(__name__)

# In this order: as transformers looks for them.
IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
DEEPSPEED = "*_model_states.pt"


def open_weights(path: Path) -> WeightFile:
    """A file, a folder of them, a run directory (its newest checkpoint that verifies) or a checkpoint.

    Raises:
        ModelError: there is none, it cannot be read, or something in it would have to be run.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise refusal(path, "does not exist")
    if path.match(DEEPSPEED):
        raise _of_deepspeed(path, path.parent)
    return _open_files({path: None})


def tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer.json of these weights: in their folder, or in the run they are of; None: neither has."""
    folder = path if path.is_dir() else path.parent
    places = (folder, folder / "model", folder.parent.parent / "model")  # the last of a checkpoint
    files = (place / "tokenizer.json" for place in places)
    return next((file for file in files if file.is_file()), None)


def _open_folder(folder: Path) -> WeightFile:
    if (folder / MANIFEST).is_file():
        return _open_checkpoint(folder)
    for place in (folder / "checkpoints", folder):
        if steps_in(place):
            return _open_newest(folder, list(named_in(place).values()))
    for name in IN_FOLDERS:
        if (folder / name).exists():
            is_index = name.endswith(".json")
            return _open_files(_listed(folder, name) if is_index else {_inside(folder, name): None})
    if (folder / "checkpoints").is_dir():
        raise refusal(folder, "is a run directory without a checkpoint")
    if any(folder.glob(DEEPSPEED)) or any(folder.glob(f"*/{DEEPSPEED}")):
        raise _of_deepspeed(folder, folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return _open_files({_inside(folder, found[0]): None})
    many = f"; it has {', '.join(found[:3])}{' ...' * (len(found) > 3)}: name one of them" if found else ""
    expected = f"{', '.join(IN_FOLDERS)}, or a run directory"
    raise refusal(folder, f"holds no weights: expected {expected}{many}")


def _of_deepspeed(path: Path, folder: Path) -> ModelError:
    what = "is part of" if path != folder else "is"
    return refusal(
        path,
        f"{what} a checkpoint of DeepSpeed's own; run `python zero_to_fp32.py . OUT --safe_serialization` "
        "where its zero_to_fp32.py lies, and give OUT",
    )


def _open_newest(folder: Path, newest_first: list[Path]) -> WeightFile:
    problems = []
    for path in newest_first:
        try:
            if path.is_symlink():
                raise refusal(path, "is a link, and what lies outside the run is not read")
            return _open_checkpoint(path)
        except ModelError as error:
            log.warning("%s; an older checkpoint is looked for", error)
            problems.append(error)
    raise refusal(folder, f"holds no whole checkpoint; the newest: {problems[0]}")


def _open_checkpoint(folder: Path) -> WeightFile:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        raise ModelError(f"model.weights: {error}") from None
    if damages := check_sizes(folder, manifest) or check_content(folder, manifest):
        raise refusal(folder, f"is damaged: {damages[0]}")
    if absent := look(folder, manifest)[1]:
        elsewhere = next(file for file in manifest.files if file.name in absent)
        raise refusal(folder, f"lacks {elsewhere.name}, which was written on {elsewhere.host}; bring it here")
    return OwnCheckpoint(CheckpointReader(folder, manifest))


def _inside(folder: Path, name: str) -> Path:
    """The file of that name, which must lie in the folder: names and links may lead anywhere."""
    path = foreign.inside(folder, name)
    if path is None:
        raise refusal(folder, f"points outside of itself: {name[:100]!r}")
    try:
        is_there = path.is_file()
    except (OSError, ValueError):  # a name that cannot be
        is_there = False
    if not is_there:
        raise refusal(folder, f"has no file {name[:100]!r}")
    return path


def _listed(folder: Path, index: str) -> dict[Path, list[str] | None]:
    """file -> the names of its tensors, of an index of several files."""
    try:
        places = foreign.weight_map(_inside(folder, index))
    except (OSError, ValueError):
        raise refusal(folder / index, "cannot be read as an index of weights") from None
    files = {place: _inside(folder, place) for place in dict.fromkeys(places.values())}
    listed: dict[Path, list[str] | None] = {}
    for name, place in places.items():
        listed.setdefault(files[place], []).append(name)  # type: ignore[union-attr]
    return listed


def _open_files(files: dict[Path, list[str] | None]) -> WeightFile:
    suffixes = {path.suffix for path in files}
    for path in files:
        if not path.is_file():
            raise refusal(path, "is no file")
    if suffixes == {".safetensors"}:
        return Safetensors(files)
    if suffixes <= set(PICKLES):
        return Pickles(files)
    raise refusal(next(iter(files)), f"cannot be read; expected .safetensors, {', '.join(PICKLES)}")
