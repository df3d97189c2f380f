"""What holds for every test, and what all tests of a process share: captures, a pool of ranks, a plain process.

A fixture here is made when the first test asks for it, so that tests of plans and programs import no torch.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import children, zygote

if TYPE_CHECKING:
    from phalanx.launch.worker_pool import WorkerPool
    from phalanx.verification.plain_side import PlainProcess

# A busy machine must not fail a test: what is too slow is caught by pytest's timeout, not per example.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", PATIENT, max_examples=20)  # others in every run
settings.register_profile("check", PATIENT, max_examples=8)  # `make check`
settings.register_profile("all", PATIENT, max_examples=150)  # `make test-all`
settings.load_profile("quick")

FOLDER = Path(__file__).parent
# Folders whose tests take longest come first, so that both workers are busy to the end.
LONGEST_FIRST = ("parity", "faults", "launch", "lab", "benchmarks", "verification", "engine", "model")
# No test of these folders is light, nor of a module that has one of these names: they stand for other processes,
# training, captured, traced and built models.
HEAVY_FOLDERS = ("parity", "faults", "lab", "benchmarks", "gpu")
HEAVY_NAMES = {
    "subprocess", "children", "Popen", "multiprocessing", "WorkerPool", "PlainProcess", "main", "train", "fit",
    "short_run", "capture", "captured", "named", "capture_model", "traced", "build", "open_on",
}  # fmt: skip
RANKS = {"pool", "plain_process"}  # fixtures that are other processes


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where light tests alone are asked for, modules without any are not even imported."""
    is_test = collection_path.match("test_*.py")
    return (is_test and config.option.markexpr.startswith("light") and not _is_light(collection_path)) or None


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        needs_others = not RANKS.isdisjoint(item.fixturenames)
        if _is_light(item.path) and not needs_others and item.get_closest_marker("heavy") is None:
            item.add_marker("light")
    items.sort(key=_order)


@cache
def _is_light(module: Path) -> bool:
    return _folder(module) not in HEAVY_FOLDERS and HEAVY_NAMES.isdisjoint(_names(module))


def _names(module: Path) -> Iterator[str]:
    """What is imported and defined at the top of a module."""
    for node in ast.parse(module.read_bytes()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def pytest_collection_finish() -> None:
    """What is imported by now stays, and is no longer gone through whenever Python looks for cycles: with torch and all
    test modules that takes longer than most tests."""
    _keep_what_there_is()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same with what a module's tests leave for others: every run looks for cycles before it begins."""
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_there_is()


def _keep_what_there_is() -> None:
    gc.collect()
    gc.freeze()


def _folder(module: Path) -> str:
    return module.relative_to(FOLDER).parts[0]


def _order(item: pytest.Function) -> tuple[int, str]:
    """Parity's cases of one architecture stand together, so that one worker runs them from one capture."""
    folder = _folder(item.path)
    if folder not in LONGEST_FIRST:
        return len(LONGEST_FIRST), ""
    case = item.callspec.params if folder == "parity" and hasattr(item, "callspec") else {}
    return LONGEST_FIRST.index(folder), str(case.get("name", ""))


@pytest.fixture(scope="session", autouse=True)
def captures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All processes of a test run keep captures in one folder, and nothing from an earlier run is trusted.

    They are not checked against the plain model again: tests/model and tests/parity do that.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "phalanx-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(folder))
        if "torch" in sys.modules:  # else no test of this run captures anything
            for module, name in zygote.UNCHECKED:
                patch.setattr(f"{module}.{name}", lambda *arguments: "")
            patch.setattr("phalanx.launch.processes.Popen", children.Popen)  # fork servers are forks themselves
        yield folder


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Eight warm ranks, of which a test uses (and starts) as many as it needs, with `world` or by its plan."""
    from phalanx.launch.worker_pool import WorkerPool

    with WorkerPool(8, threads_per_rank=1, device="cpu", silence=5.0) as ranks:
        yield ranks


@pytest.fixture
def lent_ranks(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A training in this process gets its ranks from the pool instead of starting some; how many it asked for."""
    asked: list[int] = []

    def lent(size: int, device: str, silence: float) -> contextlib.AbstractContextManager[SimpleNamespace]:
        asked.append(size)
        return contextlib.nullcontext(SimpleNamespace(run=partial(pool.run, world=size)))

    monkeypatch.setattr("phalanx.training.trainer.WorkerPool", lent)
    return asked


@pytest.fixture
def lent_plain_process(plain_process: PlainProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification in this process gets the plain side that is there instead of starting one."""
    monkeypatch.setattr("phalanx.verification.verify.PlainProcess", lambda: contextlib.nullcontext(plain_process))


@pytest.fixture(scope="session")
def plain_process() -> Iterator[PlainProcess]:
    from phalanx.verification.plain_side import PlainProcess

    with PlainProcess() as process:
        yield process
