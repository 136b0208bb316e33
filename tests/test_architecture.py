"""Imports between packages, and the tables from which a newcomer learns where a thing is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module imports from its own room and from those before it.
ROOMS = [
    "root",  # the modules beside the rooms
    "config",
    "distributed",
    "planner",
    "data",
    "models",
    "objectives",
    "checkpoint",
    "engine",
    "monitoring",
    "evaluation",
    "training",
    "cli",
]
MOST_AT_THE_ROOT = 5
APART = {"data", "models"}
"""Rooms that do not know each other."""
IMPORTERS = {
    "deepspeed": ["engine"],
    "wandb": ["monitoring/trackers"],
    "bitsandbytes": ["models"],
    "transformers": ["models", "data"],
}
"""Library -> the only places that import it."""
WITHOUT_TORCH = [
    *("errors.py", "files.py", "redaction.py", "__main__.py"),
    *("config", "planner", "cli", "distributed/launch", "distributed/doctor", "distributed/op_builds.py"),
    "monitoring/logs.py",
]
"""Modules that commands without torch import: importing torch takes seconds."""
LEANING = re.compile(
    r"\s*(about|above|across|after|against|along|among|around|as|at|before|behind|below|beside|besides|between|by|down"
    r"|during|for|from|how|if|in|inside|into|near|of|off|on|onto|out|outside|over|per|since|than|that|through|till|to"
    r"|toward|under|until|up|upon|via|what|whatever|when|where|which|while|who|whoever|whose|why|with|within|without)\b",
    re.IGNORECASE,
)
"""First words of docstrings that need the line before them."""
LAZY = {"importlib", "importlib.import_module", "typing", "typing.Any", "typing.TYPE_CHECKING"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(module: str) -> str:
    """Return the room of `pipeline.room.module`."""
    name = module.split(".")[1] if "." in module else ""
    return name if (PACKAGE / name).is_dir() and name else "root"


def is_in(path: Path, places: list[str]) -> bool:
    name = path.relative_to(PACKAGE).as_posix()
    return any(name == place or name.startswith(f"{place}/") for place in places)


@cache
def imports(path: Path, top_level_only: bool = False) -> list[tuple[int, str]]:
    """Return (line, module) of every import, but for those of type checking."""
    tree = tree_of(path)
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
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
    """Return the modules of this tree that one imports, at the top or inside a function.

    An import runs the `__init__` of each package on the way, so these count as well.
    """
    found = set()
    for _, imported in imports(MODULES[name]):
        parts = imported.split(".")
        for length in range(1, len(parts) + 1):
            other = ".".join(parts[:length])
            if other in MODULES and other != name and not name.startswith(f"{other}."):
                found.add(other)
    return found


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return names that lead from one to itself; an empty list if there are none."""
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


def test_every_room_is_in_the_list_and_the_root_is_small():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(ROOMS[1:])
    modules = {path.name for path in PACKAGE.glob("*.py")}
    assert len(modules) <= MOST_AT_THE_ROOT, sorted(modules)


def test_what_the_face_offers_is_imported_when_it_is_asked_for():
    assert {imported for _, imported in imports(MODULES["pipeline"])} <= LAZY


def test_a_room_imports_only_rooms_before_it():
    for module in MODULES.keys() - {"pipeline", "pipeline.__main__"}:  # that imports every command
        room = room_of(module)
        path = MODULES[module]
        for line, imported in imports(path):
            if not imported.startswith("pipeline."):
                continue
            other = room_of(imported)
            assert ROOMS.index(other) <= ROOMS.index(room), f"{path}:{line}: {room} may not import {other}"
            assert {room, other} != APART, f"{path}:{line}: {room} and {other} do not know each other"


def test_no_import_circle():
    """Also inside a room, and not by an import in a function either."""
    circle = find_circle({name: needs(name) for name in MODULES})
    assert not circle, " imports ".join(circle)


def test_libraries_are_imported_in_one_place():
    for path in FILES:
        for line, module in imports(path):
            places = IMPORTERS.get(module.split(".")[0])
            assert places is None or is_in(path, places), f"{path}:{line}: {module} belongs in {places}"


def test_what_needs_no_torch_does_not_load_it():
    for path in FILES:
        if is_in(path, WITHOUT_TORCH):
            for line, module in imports(path, top_level_only=True):
                library = module.split(".")[0]
                assert library not in ("torch", "transformers"), f"{path}:{line}: {module} is slow to load"


def test_every_module_says_what_it_is_for():
    for path in FILES:
        tree = tree_of(path)
        assert ast.get_docstring(tree) or path.name == "__init__.py" or not tree.body, path


def asked_by_kind(tree: ast.Module) -> list[str]:
    """Return the calls that ask a section of the recipe for its class, or for a field by a string."""
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    of_config = [node for node in imported if (node.module or "").startswith("pipeline.config")]
    classes = {alias.asname or alias.name for node in of_config for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
            continue
        subject, what = node.args[:2]
        if node.func.id in ("isinstance", "issubclass"):
            is_asked = bool(classes & {name.id for name in ast.walk(what) if isinstance(name, ast.Name)})
        else:
            owner = ast.unparse(subject.value) if isinstance(subject, ast.Attribute) else ""
            is_section = owner.endswith("config") and subject.attr in RunConfig.model_fields
            by_string = node.func.id in ("getattr", "hasattr") and isinstance(what, ast.Constant)
            is_asked = is_section and by_string
        if is_asked:
            found.append(ast.unparse(node))
    return found


def test_sections_of_the_recipe_answer_for_themselves():
    """A kind is asked as `config.model.language_model`, which mypy narrows, not by class or by string."""
    for module, path in MODULES.items():
        if room_of(module) != "config":
            assert not asked_by_kind(tree_of(path)), path


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by name alone, and refuses the second."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_nothing_in_launch_shadows_a_package():
    """The launcher runs `python launch/train.py`, which puts launch/ first on sys.path."""
    taken = {"deepspeed", "wandb", "data", "logging", "torch", "pipeline", "yaml"}
    assert not taken & {path.stem for path in (ROOT / "launch").rglob("*.py")}


def test_the_loop_decides_when_and_nothing_else():
    tree = tree_of(PACKAGE / "training" / "loop.py")
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    text = ast.unparse(loop)
    for word in ("deepspeed", "rank ==", ".item()", "try:", "print("):
        assert word not in text, f"{word} in the loop"


def rows_of(page: str, heading: str) -> list[str]:
    """Return the rows of the table below a heading of a page, without its head."""
    text = (ROOT / page).read_text()
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


WHERE = rows_of("CONTRIBUTING.md", "Where a new thing goes")


def check_place(place: str, name: str) -> None:
    path = ROOT / place
    assert path.exists(), place
    if not name:
        return
    tree = ast.parse(path.read_text())
    names = {getattr(node, "name", None) for node in tree.body}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert name in names, f"{place} has no {name}"


def test_a_newcomer_finds_where_a_new_thing_goes():
    for row in WHERE:
        places = re.findall(r"`([\w./]+/[\w./]*)(?::(\w+))?`", row)
        assert places, row
        for place, name in places:
            check_place(place, name)
    asked = " ".join(row.split("|")[1] for row in WHERE)
    for what in ("optimizer", "loss", "metric", "adapter", "alert", "layout", "launcher"):
        assert what in asked
    assert len(WHERE) >= 20


def test_the_page_lists_the_packages_in_their_order_and_their_places_are_there():
    rows = rows_of("docs/explanation/architecture.md", "Packages")
    assert [row.split("|")[1].strip().strip("`/") for row in rows] == ROOMS
    for place in re.findall(r"`(pipeline/[\w./]*)`", "".join(rows)):
        assert (ROOT / place).exists(), place


def docstrings_of(path: Path) -> Iterator[ast.Constant]:
    """Yield constants that stand alone as a statement: docstrings of modules, classes, functions, fields."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def test_a_docstring_begins_with_its_subject_or_a_verb():
    """One that begins with "Of" or "What" needs the line before it."""
    folders = ("tests", "benchmarks", "launch", "docs")
    others = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    texts = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value}"
        for path in [*FILES, *sorted(others)]
        for text in docstrings_of(path)
        if isinstance(text.value, str)
    ]
    assert len(texts) > 5000
    assert [text for text in texts if LEANING.match(text.split(": ", 1)[1])] == []
