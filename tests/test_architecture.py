"""The walls of the house: imports go one way, third parties stay behind theirs, parts stay small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower layers first; a module imports from its own layer or from lower ones.
LAYERS = [
    ["errors", "events", "foreign", "redaction", "units"],
    [
        *("command_lines", "config", "hub", "importing", "durable", "op_builds", "optional_packages"),
        *("peak_flops", "run_lock", "shards", "shipped", "working_tree"),
    ],
    ["distributed", "kept_sizes", "logs", "foreign_configs", "planning"],
    ["launching"],
    ["doctor"],
    ["objectives", "optim", "own_optimizer", "schedule", "models", "data", "sampling", "sinks"],
    ["engine"],
    ["checkpoint", "evaluation", "inspection", "peaks", "reference_logps", "report"],
    ["trained"],
    [
        *("band", "metrics", "replica_check", "rows", "safeguard"),
        *("expectation", "gpu_meter", "histograms", "node_meter", "profiler", "wall_time", "watchers"),
    ],
    ["long_lived"],
    ["identity"],
    ["callbacks"],
    ["run_directory", "recovery"],
    ["stepping", "training"],
    ["remedies"],
    ["device_failures"],
    ["assemble", "build_engine", "build_meters", "joining", "micro_batch", "profiling", "plan"],
    ["api"],
    ["closing"],
    ["running"],
    ["cli", "commands"],
    ["__main__"],
]
LAZY = {"importlib", "importlib.import_module", "typing", "typing.Any", "typing.TYPE_CHECKING"}
# Never each other.
APART = ["models", "data", "sinks", "optim", "schedule"]

WALLS = {
    "deepspeed": ["engine"],
    "wandb": ["sinks"],
    "bitsandbytes": ["models"],
    "transformers": ["models", "data"],
}
TORCH_FREE = [
    "errors",
    "units",
    "config",
    "cli",
    "commands",
    "__main__",
    "importing",
    "logs",
    "launching",
    "doctor",
    "op_builds",
    "planning",
    "foreign_configs",
]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(line, module) of every import, type-checking ones left out."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = []
    for node in nodes:
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def needs(name: str) -> set[str]:
    """The modules of this tree that one imports, at the top or inside a function, with the packages of each
    that it is not in itself: an import runs their `__init__`."""
    found = set()
    for _, imported in imports(MODULES[name]):
        parts = imported.split(".")
        for length in range(1, len(parts) + 1):
            other = ".".join(parts[:length])
            if other in MODULES and other != name and not name.startswith(f"{other}."):
                found.add(other)
    return found


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead from one to itself; empty: there is no such way."""
    done: set[str] = set()
    for start in graph:
        path = [start]
        ways = [iter(sorted(graph[start]))]
        while path:
            following = next(ways[-1], None)
            if following in path:
                return [*path[path.index(following) :], following]
            if following is None:
                done.add(path.pop())
                ways.pop()
            elif following not in done:
                path.append(following)
                ways.append(iter(sorted(graph[following])))
    return []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    part = part_of(path)
    if part == "__init__":  # the face: what it offers is imported when it is asked for
        assert {module for _, module in imports(path)} <= LAZY
        return
    assert part in height, f"{part} has no layer yet"
    for line, module in imports(path):
        names = module.split(".")
        if names[0] == "pipeline" and len(names) > 1:
            other = names[1]
            assert height[other] <= height[part], f"{path}:{line}: {part} may not import {other}"
            both_apart = part in APART and other in APART
            assert part == other or not both_apart, (
                f"{path}:{line}: {part} and {other} do not know each other"
            )


def test_no_import_circle():
    """Also inside a package, and not by an import in a function either."""
    circle = find_circle({name: needs(name) for name in MODULES})
    assert not circle, " imports ".join(circle)


@pytest.mark.parametrize(
    ("graph", "circle"),
    [
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
)
def test_a_circle_is_found(graph, circle):
    assert find_circle(graph) == circle


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_third_parties_stay_behind_their_walls(path):
    part = part_of(path)
    for line, module in imports(path):
        allowed = WALLS.get(module.split(".")[0])
        assert allowed is None or part in allowed, f"{path}:{line}: {module} belongs in {allowed}"
    if part in TORCH_FREE:
        for line, module in imports(path, top_level_only=True):
            assert module.split(".")[0] not in ("torch", "transformers"), (
                f"{path}:{line}: {module} is slow to load"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_parts_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 900, "a file as long as its topic, 900 lines at most"
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or path.name == "__init__.py" or not tree.body, "no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name}: {length} lines"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by name alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_nothing_in_launch_shadows_a_package():
    """The launcher runs `python launch/train.py`, which puts launch/ first on sys.path."""
    taken = {"deepspeed", "wandb", "data", "logging", "torch", "pipeline", "yaml"}
    assert not taken & {path.stem for path in (ROOT / "launch").rglob("*.py")}


def test_the_loop_decides_when_and_nothing_else():
    tree = ast.parse((PACKAGE / "training.py").read_text())
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    text = ast.unparse(loop)
    for word in ("deepspeed", "rank ==", ".item()", "try:", "print("):
        assert word not in text, f"{word} in the loop"
    assert loop.end_lineno - loop.lineno <= 45


def table_of_new_things() -> list[str]:
    text = (ROOT / "docs" / "design.md").read_text()
    section = text.partition("## Where a new thing goes")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| a")]


@pytest.mark.parametrize("row", table_of_new_things(), ids=lambda row: row.split("|")[1].strip())
def test_a_newcomer_finds_where_a_new_thing_goes(row):
    cells = row.strip("|").split("|")[1:]
    assert len([cell for cell in cells if "`" in cell]) == 3, "what is written, made known and tested"
    for place in re.findall(r"`([\w./]+/[\w./]*)(?::(\w+))?`", row):
        path, name = ROOT / place[0], place[1]
        assert path.exists(), place[0]
        if name:
            tree = ast.parse(path.read_text())
            names = {getattr(node, "name", None) for node in tree.body}
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
            assert name in names, f"{place[0]} has no {name}"


def test_the_table_of_new_things_answers_what_newcomers_ask():
    told = " ".join(row.split("|")[1] for row in table_of_new_things())
    for what in ("optimizer", "loss", "metric", "adapter", "alert", "data layout", "launcher"):
        assert what in told
