"""Everything that the pages print can be typed: each command, file, key and snippet is tried."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from support.launch import ROOT, read_reproducible_rows, write_recipe

from pipeline.__main__ import COMMANDS
from pipeline.__main__ import main as pipeline
from pipeline.cli.train import main as train
from pipeline.config.schema import RunConfig
from pipeline.config.settings import load_settings
from pipeline.distributed.launch.environment import split_arguments

sys.path.append(str(ROOT / "docs"))
import outputs

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(
    r"(CUDA_VISIBLE_DEVICES=\S* )?"
    r"(ds-pipeline|deepspeed|torchrun|python|sbatch|make|pip|(~/deepspeed-pipeline/)?launch/\w+\.sh) +\S"
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
FILES = (".py", ".md", ".json", ".jsonl", ".yaml", ".safetensors")
FAILING = re.compile(r"^```bash\n((?:(?!```).*\n)*)```\n+<!-- \[\[\[cog output\([^\n]*\bcode=", re.M)
"""Block of commands that are printed with the error in which they end."""
INLINE = re.compile(r"`([^`\n]+)`")
TRAINERS = (
    "launch/train.py",
    "launch/multi_gpu.sh",
    "launch/multi_node.sh",
    "launch/torchrun.sh",
    "launch/slurm.sbatch",
)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in this language; "" are those of a shell."""
    return [content for named, content in FENCE.findall(page.read_text()) if named == language]


def commands() -> list[str]:
    """Every command line that a page prints, in a block or in a sentence, once."""
    found = []
    for page in PAGES:
        shell = "".join(blocks(page, "") + blocks(page, "bash") + blocks(page, "sh"))
        lines = shell.replace("\\\n", " ").splitlines()
        lines = [re.split(r"\s#\s", line.strip().removeprefix("$ "))[0].strip() for line in lines]
        lines += INLINE.findall(FENCE.sub("", page.read_text()))
        found += [line for line in lines if COMMAND.match(line) and "..." not in line]
    named = {f"python -m pipeline{name}" for name in ("", *(f" {command}" for command in COMMANDS))}
    failing = {
        line for page in PAGES for block in FAILING.findall(page.read_text()) for line in block.splitlines()
    }
    return sorted(set(found) - named - failing)


def argument_after(words: list[str], option: str) -> str | None:
    """Value of `--option value` or `--option=value`."""
    for number, word in enumerate(words):
        if word == option:
            return words[number + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def ranks_of(words: list[str]) -> int:
    """Number of ranks that the launcher's options start; one if they do not say."""
    nodes = argument_after(words, "--nodes") or (argument_after(words, "--nnodes") or "1").split(":")[-1]
    included = argument_after(words, "--include")
    if included is not None and "," in included:
        return included.count(",") + 1
    for option in ("--num_gpus", "--nproc-per-node", "--ntasks-per-node"):
        if given := argument_after(words, option):
            return int(given) * int(nodes)
    return 1


def is_trainer(words: list[str], number: int) -> bool:
    """Whether what trains is named here: a file, or the command `train` of the package."""
    return words[number].endswith(TRAINERS) or words[number - 1 : number + 1] == ["pipeline", "train"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run that RUN stands for: three steps, with checkpoints."""
    folder = tmp_path_factory.mktemp("docs")
    recipe = write_recipe(folder, max_steps=3, checkpoint={"every": 1, "keep_last": 3}, eval={"every": 1})
    assert train(["--config", str(recipe), f"run_dir={folder / 'run'}"]) == 0
    return folder / "run"


@pytest.fixture
def try_out(run, tmp_path, monkeypatch, capsys):
    """`try_out(line)`: runs or plans what can be, looks up the rest. What went wrong, or None."""
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def planned(words):
        place = next(number for number, word in enumerate(words) if is_trainer(words, number))
        options, arguments = split_arguments(words[place + 1 :])
        size = ["--world-size", str(ranks_of([*words[:place], *options]))]
        given = arguments if "--dry-run" in arguments else [*arguments, "--dry-run"]
        given = [word.replace(str(Path("~/deepspeed-pipeline")), str(ROOT)) for word in given]
        if "my.yaml" in given:
            given[given.index("my.yaml")] = "launch/recipes/python_stdlib.yaml"
            if any(word.startswith("batch.global_batch_size=") for word in given):
                given.append("batch.micro_batch_size=null")
        if "your.json" in given:
            given[given.index("your.json")] = "ds_configs/zero2.json"
        code = train([*given, *([] if "--world-size" in given else size)])
        return None if code == 0 else capsys.readouterr().err

    def commanded(words):
        at_hand = {
            "RUN": str(run),
            "THEIRS.yaml": str(tmp_path / "theirs.yaml"),
            "OUT": str(tmp_path / "out"),
            "my-model": str(tmp_path / "out"),
            "before.json": str(tmp_path / "before.json"),
            "OUT.html": str(tmp_path / "out.html"),
            "100": "1",
            "300": "1",
            "6": "1",
        }
        arguments = [at_hand.get(word, word) for word in words]
        arguments = [str(run) if word.startswith("runs/") else word for word in arguments]
        name = arguments[0]
        has_own_file = name == "evaluate" and any(
            word.endswith(("_task.yaml", "calls.yaml")) for word in words
        )
        if name in ("chat", "serve") or has_own_file or "--compare" in words:
            # They wait for messages or requests, or need files of the reader's own.
            given = {word for word in words if word.startswith("--")}
            return None if given <= help_of(name) else "no such option"
        (tmp_path / "theirs.yaml").write_text("model_name_or_path: a/b\nstage: sft\ncutoff_len: 64\n")
        if name in ("prepare", "inspect"):
            recipe = argument_after(words, "--config")
            overrides = [word for word in words if "=" in word]
            if recipe != "RECIPE.yaml":
                load_settings(Path(recipe), None, overrides)
            words = [word for word in words if word.startswith("--")]
            return None if set(words) <= help_of(name) else "no such option"
        if name == "doctor":  # needs ssh
            return (
                None if set(re.findall(r"--[\w-]+", " ".join(words))) <= help_of(name) else "no such option"
            )
        code = pipeline(arguments)
        return None if code == 0 else capsys.readouterr().err

    def function(line):
        words = shlex.split(line.replace("~/deepspeed-pipeline", str(ROOT)))
        words = words[1:] if words[0].startswith("CUDA_VISIBLE_DEVICES=") else words
        words = ["python", "-m", "pipeline", *words[1:]] if words[0] == "ds-pipeline" else words
        if any(is_trainer(words, number) for number in range(len(words))):
            return planned(words)
        if words[:3] == ["python", "-m", "pipeline"]:
            return commanded(words[3:])
        return looked_up(words)

    return function


@cache
def help_of(command: str) -> set[str]:
    """The options of a command of `python -m pipeline`."""
    import argparse

    parser = argparse.ArgumentParser()
    COMMANDS[command].add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


def looked_up(words: list[str]) -> str | None:
    """Parts of an untried command that do not exist: a target, an extra, a file, an option."""
    match words:
        case ["make", *rest]:
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
            return next((f"no target {w}" for w in rest if "=" not in w and w not in targets), None)
        case ["pip", "install", *rest]:
            project = (ROOT / "pyproject.toml").read_text()
            asked = [name for word in rest for name in re.findall(r"\[([\w-]+)\]", word)]
            return next((f"no extra {name}" for name in asked if f"\n{name} = [" not in project), None)
        case ["python", "-m", module, *_]:
            parts = module.split(".")
            there = (ROOT / Path(*parts)).with_suffix(".py").is_file() or (ROOT / parts[0]).is_dir()
            return None if there else f"no module {module}"
        case ["python", script, *rest] if (ROOT / script).is_file():
            text = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))
            options = [word for word in rest if word.startswith("--")]
            return next((f"{script} has no {word}" for word in options if f'"{word}"' not in text), None)
        case ["deepspeed" | "torchrun" | "sbatch", *_]:
            return None  # a line of another program's own
    missing = [word for word in words if "/" in word and not (ROOT / word).exists()]
    return f"no file {missing[0]}" if missing else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_short", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["short", "whole"]
)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "[[[cog" in page.read_text()], ids=lambda page: page.name
)
def test_the_printed_outputs_are_what_the_commands_print(page, is_short):
    """`make docs` writes the outputs anew."""
    printed = outputs.Page(page, is_short)
    printed.update()
    assert printed.differences == [], "\n".join(printed.differences)


@pytest.mark.slow
@pytest.mark.parametrize("line", commands())
def test_a_printed_command_works(line, try_out):
    problem = try_out(line)
    assert problem is None, problem


def test_there_are_commands():
    assert len(commands()) > 50


def count_words(page: Path) -> int:
    """Words of a page that are written by hand: without tables from the code and outputs of commands."""
    text = re.sub(r"<!-- ([\w ]+) -->\n.*?<!-- end of \1 -->", "", page.read_text(), flags=re.S)
    return len(re.sub(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->", "", text, flags=re.S).split())


def test_the_pages_stay_short():
    assert count_words(ROOT / "README.md") <= 900
    assert sum(map(count_words, (ROOT / "docs").rglob("*.md"))) <= 17_000


def slug(heading: str) -> str:
    """The anchor that a heading gets on a page."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return words.replace(" ", "-")


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
            assert anchor in map(slug, headings), target


def recipe_blocks():
    """Parts of recipes that a page shows."""
    for page in PAGES:
        for number, block in enumerate(blocks(page, "yaml")):
            if set(yaml.safe_load(block) or {}) & set(RunConfig.model_fields):
                yield pytest.param(block, id=f"{page.name}-{number}")


def whole_recipes():
    """The recipes among them: what says which model is trained on which data."""
    for case in recipe_blocks():
        if {"model", "data"} <= set(yaml.safe_load(case.values[0])):
            yield case


@pytest.mark.parametrize("block", whole_recipes())
def test_a_printed_recipe_runs_as_it_stands(block, tmp_path, monkeypatch):
    """The command is tried as printed, with a folder for FOLDER."""
    monkeypatch.chdir(ROOT)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    path = tmp_path / "recipe.yaml"
    path.write_text(block.replace("FOLDER", str(tokenizer)))
    load_settings(path, None, [])


@pytest.mark.parametrize("block", recipe_blocks())
def test_a_printed_part_of_a_recipe_is_one(block, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    rest = {
        "max_steps": 1,
        "model": {"kind": "causal_lm", "architecture": "llama"},
        "data": {"kind": "text", "paths": ["a"]},
        "eval": {"every": 100},
    }
    tree = yaml.safe_load(block)
    if "max_epochs" in tree:
        del rest["max_steps"]
    if tree.get("data", {}).get("kind") == "images":
        rest["model"] = {"kind": "cnn"}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(rest | tree))
    load_settings(path, None, [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_key_is_one(page):
    """`section.key` and `section.key: value`, of the recipe."""
    keys = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    known = set(re.findall(r"^\| `([\w.]+)` \|", keys, re.M))
    sections = set(RunConfig.model_fields) - {"engine"}  # which is a name in code as well
    for name in INLINE.findall(FENCE.sub("", page.read_text())):
        key = re.match(r"([a-z_]+)\.[a-z_.]+(?=$|[:=])", name)
        if key and key[1] in sections and not name.endswith(FILES):
            inside = key[0] in known or any(other.startswith(f"{key[0]}.") for other in known)
            assert inside or key[0].startswith("model.extra."), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_printed_file_of_the_project_is_there(page):
    for name in INLINE.findall(FENCE.sub("", page.read_text())):
        if re.fullmatch(r"(launch|ds_configs|docs|tests|benchmarks|pipeline)/[\w./-]+", name):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        if re.fullmatch(r"(zero|ddp|tensor|pipeline|sequence|fp32|single|dp|torch_ddp)\w*\.json", name):
            assert (ROOT / "ds_configs" / name).exists(), f"{page.name}: {name}"


@pytest.mark.slow
def test_the_picture_of_the_curves_is_drawn_and_the_table_written(run, tmp_path, monkeypatch):
    page = ROOT / "docs" / "how-to" / "watching.md"
    (snippet,) = (code for code in blocks(page, "python") if "import pandas" in code)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet.replace("RUN/", f"{run}/"), page.name, "exec"), {})
    assert (tmp_path / "curves.png").stat().st_size > 5000
    assert "train/loss" in (tmp_path / "metrics.csv").read_text().splitlines()[0]


def test_the_table_of_memory_is_what_its_sentence_says():
    page = ROOT / "docs" / "how-to" / "memory-and-speed.md"
    table = page.read_text().split("<!-- memory -->")[1].split("<!-- end of memory -->")[0]
    for line in table.strip().splitlines()[2:]:
        size, gpus, *told = (cell.strip() for cell in line.strip("|").split("|"))
        billions = float(size.split()[0])
        ranks = int(gpus)
        for each, number in zip((16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks), told, strict=True):
            assert float(number) == pytest.approx(each * billions, abs=0.051), line


@pytest.mark.slow
def test_the_recipe_of_the_readme_trains_a_script_in_ones_own_folder(tmp_path, monkeypatch):
    """Recipe, module and runs are in the working directory; the clone is elsewhere."""
    (tmp_path / "regression.py").write_text((ROOT / "docs" / "example" / "regression.py").read_text())
    (recipe,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "my.yaml").write_text(recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "regression", raising=False)
    assert train(["--config", "my.yaml", "max_steps=2", "wandb.mode=disabled"]) == 0
    (made,) = (tmp_path / "runs").iterdir()
    assert read_reproducible_rows(made)[-1]["step"] == 2


@pytest.mark.slow
def test_the_tutorial_names_all_that_a_run_leaves(run):
    tutorial = (ROOT / "docs" / "tutorials" / "first-run.md").read_text()
    listing = tutorial[tutorial.index("## Look at what the run left") :].split("## ")[1]
    for path in run.iterdir():
        assert path.name in listing, path.name
    for path in (run / "model").iterdir():
        assert path.suffix in (".json", ".jinja"), path.name
