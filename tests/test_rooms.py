"""Which part of the package may import which, and that no two modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
# From the bottom up: a room imports from lower rows only. A module outside these rooms is the package itself.
ROWS = (
    ("errors", "expressions", "records", "spellings"),
    ("plan",),
    ("written",),
    ("contradictions",),
    ("config", "model.facts", "tasks"),
    ("program", "data", "launch", "state"),
    ("observe", "model", "comm"),
    ("params",),
    ("engine",),
    ("profile", "lab", "adapt"),
    ("training",),
    ("verification",),
    ("compat", "hf"),
    ("cli",),
)
ROW = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
WITHOUT_TORCH = ("errors", "expressions", "records", "spellings", "plan", "written", "contradictions", "config")
WITHOUT_TORCH += ("program", "model.facts")
EXCEPTIONS = {
    ("model.facts.facts", "model.zoo.zoo_table"),  # names only, as plain data
    ("state.dcp", "model.weights.weights"),
    ("state.huggingface", "model.weights.weights"),
}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Also those inside functions; not those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports_of(node)


PATHS = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
         for path in ROOT.rglob("*.py")}  # fmt: skip
NAMES = {module: set(imports_of(ast.parse(path.read_text("utf-8")))) for module, path in PATHS.items()}


def found(name: str) -> str | None:
    """The module of the package that an imported name stands for or lies in."""
    inside = name.removeprefix("phalanx.")
    return next((m for m in (inside, inside.rpartition(".")[0]) if m in PATHS), None) if inside != name else None


IMPORTS = {module: {m for name in names if (m := found(name))} for module, names in NAMES.items()}


def room(module: str) -> str | None:
    return next((room for room in sorted(ROW, reverse=True) if f"{module}.".startswith(f"{room}.")), None)


def test_rooms_import_from_lower_rooms_only() -> None:
    upwards = {
        (module, other)
        for module, others in IMPORTS.items()
        for other in others
        if (own := room(module)) and (its := room(other)) and own != its and ROW[own] <= ROW[its]
    }
    assert not upwards - EXCEPTIONS


def test_every_module_has_a_room() -> None:
    assert {module for module in PATHS if room(module) is None} == {"__init__", "__main__"}


def test_planning_imports_no_torch() -> None:
    heavy = {m for m, names in NAMES.items() for name in names if name.split(".")[0] in ("torch", "transformers")}
    assert not [module for module in heavy if room(module) in WITHOUT_TORCH]


def test_no_two_modules_import_each_other() -> None:
    TopologicalSorter(IMPORTS).prepare()  # raises a CycleError that shows them
