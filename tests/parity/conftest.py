"""One plain process, one crew of ranks and one capture cache serve all parity tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.launch.crew import Crew
from phalanx.verification.plain_side import PlainProcess


@pytest.fixture(scope="session")
def plain_process() -> Iterator[PlainProcess]:
    with PlainProcess() as process:
        yield process


@pytest.fixture(scope="session")
def crew() -> Iterator[Crew]:
    """Four warm ranks, of which a case uses as many as its plan has."""
    with Crew(4, device="cpu") as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def shared_captures(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of one test run share captures, and nothing from an earlier run is trusted."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if base.name.startswith("popen-") else base
    monkeypatch.setenv("PHALANX_CACHE", str(root / "captures"))
