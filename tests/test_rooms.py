"""Which part of the package may import which, that no two modules import each other, and the map of all of them.

`python tests/test_rooms.py` writes the map anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
# From the bottom up: a room imports from lower rows only. A module outside these rooms is the package itself.
ROWS = (
    ("errors", "expressions", "records", "spellings"),
    ("plan",),
    ("planning",),
    ("written",),
    ("contradictions",),
    ("config", "model.facts", "tasks"),
    ("program", "data", "launch", "state"),
    ("predict",),
    ("observe", "model", "comm"),
    ("params",),
    ("engine",),
    ("profile", "lab", "adapt"),
    ("session", "prepare"),
    ("own_loop", "training"),
    ("verification",),
    ("compat", "hf"),
    ("cli",),
)
ROW = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
WITHOUT_TORCH = ("errors", "expressions", "records", "spellings", "plan", "written", "contradictions", "config")
WITHOUT_TORCH += ("planning", "program", "predict", "model.facts")
EXCEPTIONS = {
    ("model.facts.facts", "model.zoo.zoo_table"),  # names only, as plain data
    ("state.dcp", "model.weights.weights"),
    ("state.huggingface", "model.weights.weights"),
}


HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Also those inside functions; not those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, HOLDS_STATEMENTS) and not _for_type_checkers(node):
            yield from imports_of(node)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


PATHS = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in ROOT.rglob("*.py")}  # fmt: skip


@cache
def tree_of(path: Path) -> ast.Module:
    """Of a module: read when a test first asks, as every test process imports this file and few run its tests."""
    return ast.parse(path.read_text("utf-8"))


@cache
def names() -> dict[str, set[str]]:
    """What each module imports."""
    return {module: set(imports_of(tree_of(path))) for module, path in PATHS.items()}


def found(name: str) -> str | None:
    """The module of the package that an imported name stands for or lies in."""
    inside = name.removeprefix("phalanx.")
    return next((m for m in (inside, inside.rpartition(".")[0]) if m in PATHS), None) if inside != name else None


@cache
def imports() -> dict[str, set[str]]:
    """Which of our modules each imports."""
    return {module: {m for name in own if (m := found(name))} for module, own in names().items()}


def room(module: str) -> str | None:
    return next((room for room in sorted(ROW, reverse=True) if f"{module}.".startswith(f"{room}.")), None)


def test_rooms_import_from_lower_rooms_only() -> None:
    upwards = {
        (module, other)
        for module, others in imports().items()
        for other in others
        if (own := room(module)) and (its := room(other)) and own != its and ROW[own] <= ROW[its]
    }
    assert not upwards - EXCEPTIONS


def test_every_module_has_a_room() -> None:
    assert {module for module in PATHS if room(module) is None} == {"__init__", "__main__"}


def test_planning_imports_no_torch() -> None:
    heavy = {m for m, own in names().items() for name in own if name.split(".")[0] in ("torch", "transformers")}
    assert not [module for module in heavy if room(module) in WITHOUT_TORCH]


def test_no_two_modules_import_each_other() -> None:
    TopologicalSorter(imports()).prepare()  # raises a CycleError that shows them


MAP = Path(__file__).parent.parent / "docs" / "map.md"
MAP_INTRO = """# Every module, in a sentence

Rooms from the top of the house to its foundation ([architecture](architecture.md) says why they lie so); each imports
from those below only. Written by `python tests/test_rooms.py` from what the modules say of themselves.
"""


def sentence(path: Path) -> str:
    """The first one of a module's docstring."""
    said = ast.get_docstring(tree_of(path)) or ""
    return " ".join(re.split(r"(?<=[.!?])\s", said.partition("\n\n")[0])[0].split())


def map_page() -> str:
    folders = sorted({path.parent for path in PATHS.values()}, key=_place)
    return "\n".join([MAP_INTRO, *(line for folder in folders for line in _folder_lines(folder))])


def _place(folder: Path) -> tuple[int, str]:
    name = ".".join(folder.relative_to(ROOT).parts)
    return (-ROW[room(name) or "errors"], name)


def _folder_lines(folder: Path) -> list[str]:
    name = folder.relative_to(ROOT.parent).as_posix()
    rows = [f"| `{path.name}` | {sentence(path)} |" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return [f"## {name}/", "", sentence(folder / "__init__.py"), "", "| file | what it is |", "|---|---|", *rows, ""]


def test_every_module_says_what_it_is() -> None:
    assert not [module for module, path in PATHS.items() if not sentence(path).endswith((".", "!", "?", ":"))]


def test_the_map_is_what_modules_say_of_themselves() -> None:
    assert MAP.read_text("utf-8") == map_page(), "run `python tests/test_rooms.py`"


if __name__ == "__main__":
    MAP.write_text(map_page(), "utf-8")
