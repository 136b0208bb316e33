"""A command that is killed, interrupted or not alone ends with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from prepare_command import (
    PATIENCE,
    Command,
    bytes_of,
    parts_of,
    workers_of,
    write_recipe,
)

from pipeline.data.prepared import prepare_documents
from pipeline.errors import DataError

pytestmark = pytest.mark.slow

FILES = 8
CHARACTERS = 1_000_000
WHOM = ("group", "parent", "worker")
KILLS = 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, cut_stdlib):
    """Eight files, each a part that takes a worker an eighth of a second."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = cut_stdlib("*.py", CHARACTERS)
    paths = [folder / f"{number}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::FILES]))
    return paths


@pytest.fixture(scope="module")
def recipe_for(make_config):
    """A recipe over some files, with a tokenizer trained on them; its cache is beside it."""

    def write(folder: Path, paths: list[Path], name: str = "recipe", **changes) -> Path:
        settings = {"prepare_workers": 2, "tokenizer": {"vocab_size": 600}} | changes
        config = make_config(paths, folder / "cache", **settings)
        return write_recipe(folder / f"{name}.yaml", config.model_dump(exclude_unset=True))

    return write


@dataclass(frozen=True)
class Quiet:
    """An undisturbed run: what it left, and how long it worked."""

    content: dict[str, bytes]
    tokenizer: Path
    documents: int
    seconds: float
    """Seconds from the first line that the command says to its end."""


@pytest.fixture(scope="module")
def quiet(recipe_for, corpus, tmp_path_factory):
    command = Command(recipe_for(tmp_path_factory.mktemp("quiet"), corpus))
    command.wait_for_work()
    begin = time.monotonic()
    ended = command.end()
    assert ended.code == 0, ended
    assert len(parts_of(command.cache)) == FILES
    (tokenizer,) = (command.cache / "tokenizers").iterdir()
    seconds = time.monotonic() - begin
    return Quiet(bytes_of(command.cache), tokenizer, ended.tokenised, seconds)


def lock_of(cache: Path, part: str) -> FileLock:
    """Return the lock of a part: while a test holds it, a command that prepares the part cannot end."""
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    return FileLock(cache / "locks" / f"{part}.lock", thread_local=False)


def test_stopped_in_every_way_it_goes_on_and_ends_with_the_same_bytes(recipe_for, corpus, quiet, tmp_path):
    recipe = recipe_for(tmp_path, corpus)
    part = min(parts_alone(quiet.content)).split("/")[1]
    with lock_of(tmp_path / "cache", part):
        stop_in_every_way(recipe)
    kept = parts_of(tmp_path / "cache")
    assert part not in kept
    assert Command(recipe).end().code == 0
    assert kept.items() <= parts_of(tmp_path / "cache").items()
    assert bytes_of(tmp_path / "cache") == quiet.content


def stop_in_every_way(recipe: Path) -> None:
    """Interrupt the command twice, kill a worker of it, then the command with and without its workers."""
    for moment in ("locks/tokenizer-*", 2):
        command = Command(recipe)
        command.wait_for(moment) if isinstance(moment, str) else command.wait_for_part(moment)
        command.send(signal.SIGINT)
        ended = command.end()
        assert ended.code == 130, ended
        assert ended.said[-1] == "stopped; finished parts remain; run the same command to continue"
        assert "Traceback" not in "\n".join(ended.said)
        assert not list(command.cache.glob("parts/*.tmp"))
    command = Command(recipe)
    command.wait_for_part(3)
    while command.process.poll() is None:  # there may be none yet, or one that has nothing more to do
        command.kill_worker()
        time.sleep(0.01)
    line = command.end().error
    assert line.startswith(
        "error: a worker process was ended by SIGKILL while parts were prepared; the machine was probably "
        "out of memory: lower data.prepare_workers; "
    )
    assert line.endswith("finished parts remain; run the same command to continue")
    for orphans in (False, True):
        command = Command(recipe)
        command.wait_for_part(4)
        command.kill(orphans=orphans)


@pytest.mark.parametrize("started", [1, 2, 3])
def test_a_worker_that_dies_while_others_are_started_is_one_line(make_config, corpus, tmp_path, started):
    """The pool starts a worker for each part; the test kills the first once `started` of them run."""

    def kill_the_first() -> None:
        while len(workers := workers_of(os.getpid())) < started:
            time.sleep(0.001)
        workers[0].kill()

    killing = threading.Thread(target=kill_the_first)
    killing.start()
    with pytest.raises(DataError, match=r"^a worker process was ended by SIGKILL"):
        prepare_documents(make_config(corpus, tmp_path / "cache", prepare_workers=FILES))
    killing.join()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(recipe_for, corpus, quiet, tmp_path):
    """The command is repeated after each kill, whichever process was killed; a finished run is compared."""
    rng = random.Random(4)
    history: list[tuple[str, float]] = []
    while len(history) < KILLS:
        folder = tmp_path / f"after-{len(history)}"
        folder.mkdir()
        recipe = recipe_for(folder, corpus)
        while disturb(Command(recipe), rng, quiet, history):
            pass
        assert bytes_of(folder / "cache") == quiet.content, history
        shutil.rmtree(folder)
    assert {whom for whom, _ in history} == set(WHOM)


def disturb(command: Command, rng: random.Random, quiet: Quiet, history: list[tuple[str, float]]) -> bool:
    """Kill one or all of the processes, and note it; return False if the command came to its end before."""
    whom = WHOM[len(history) % len(WHOM)]
    moment = rng.uniform(0, quiet.seconds)
    # Counted from the command's first line: importing takes seconds, and fewer from one command to the next.
    # The cache has files of the command that was killed before.
    command.wait_for_work()
    try:
        command.process.wait(moment if len(history) < KILLS else PATIENCE)
    except subprocess.TimeoutExpired:
        if whom != "worker":
            command.kill(orphans=whom == "parent")
            history.append((whom, round(moment, 2)))
            return True
        while not (killed := command.kill_worker()) and command.process.poll() is None:
            time.sleep(0.01)  # there is none yet
        if killed:
            history.append((whom, round(moment, 2)))
    ended = command.end()
    assert ended.code in (0, 2) if history and history[-1][0] == "worker" else ended.code == 0, (
        ended,
        history,
    )
    return ended.code == 2


def test_a_file_that_changes_meanwhile_is_one_line(make_config, corpus, tmp_path):
    paths = [Path(shutil.copy(path, tmp_path)) for path in corpus]
    cache = tmp_path / "cache"
    prepare_documents(make_config(paths[-1:], tmp_path / "of the last"))
    (last,) = parts_of(tmp_path / "of the last")
    lock = lock_of(cache, last)
    lock.acquire()

    def add_to_the_last() -> None:
        while not parts_of(cache):  # its digest is made before
            time.sleep(0.001)
        with paths[-1].open("a") as file:
            file.write('{"text": "one more"}\n')
        lock.release()

    meanwhile = threading.Thread(target=add_to_the_last)
    meanwhile.start()
    config = make_config(paths, cache)
    with pytest.raises(
        DataError, match="^" + re.escape(f"{paths[-1]}: changed since its digest was computed")
    ):
        prepare_documents(config)
    meanwhile.join()
    kept = parts_of(cache)
    assert kept
    prepare_documents(config)
    assert kept.items() <= parts_of(cache).items()
    assert len(parts_of(cache)) == FILES


def test_two_at_once_that_share_some_parts_make_each_once(recipe_for, corpus, quiet, tmp_path):
    recipes = [
        recipe_for(tmp_path, some, name, tokenizer={"pretrained": str(quiet.tokenizer)})
        for some, name in ((corpus[:6], "first"), (corpus[2:][::-1], "second"))
    ]
    ended = [command.end() for command in [Command(recipe) for recipe in recipes]]
    assert [each.code for each in ended] == [0, 0], ended
    assert sum(each.tokenised for each in ended) == quiet.documents
    assert all(each.tokenised for each in ended)
    assert parts_alone(bytes_of(tmp_path / "cache")) == parts_alone(quiet.content)


def parts_alone(content: dict[str, bytes]) -> dict[str, bytes]:
    return {path: value for path, value in content.items() if path.startswith("parts/")}


def test_a_file_that_cannot_grow_is_one_line_and_the_others_stay(
    recipe_for, corpus, tmp_path, tokenizer_json
):
    large = tmp_path / "large.jsonl"
    large.write_text("".join(path.read_text() for path in corpus[2:5]))
    recipe = recipe_for(tmp_path, [*corpus[:2], large], tokenizer={"pretrained": str(tokenizer_json)})
    command = Command(recipe, "data.prepare_workers=1")
    limit = large.stat().st_size // 2  # in bytes; before it has written any
    resource.prlimit(command.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    line = command.end().error
    assert re.search(
        r"cache: part \w+ of large cannot be written: File too large \(.* GiB free there\)", line
    )
    kept = parts_of(command.cache)
    assert len(kept) == 2
    assert not list(command.cache.glob("parts/*.tmp"))
    again = Command(recipe).end()
    assert again.code == 0, again
    assert again.tokenised == len(large.read_text().splitlines())
    assert kept.items() <= parts_of(command.cache).items()
