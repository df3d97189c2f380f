"""Whatever is done wrong in the ranks, `verify` finds it and names it; and without sabotage it finds nothing."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.verification.case import Case, Plain, Start
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.verification.sabotages import SABOTAGES, StruckPool, settings


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return settings(tmp_path_factory.mktemp("model"))


class Remembering:
    """A plain process that runs each case once: what is sabotaged is the other side."""

    def __init__(self, process: PlainProcess) -> None:
        self._process = process
        self._known: dict[int, Plain] = {}

    def run(self, case: Case, start: Start, sites: tuple[str, ...]) -> Plain:
        if id(case) not in self._known:
            self._known[id(case)] = self._process.run(case, start, sites)
        return self._known[id(case)]


@pytest.fixture(scope="module")
def plain(plain_process: PlainProcess) -> Any:
    return Remembering(plain_process)


@pytest.mark.parametrize("setting", sorted({sabotage.setting for sabotage in SABOTAGES.values()}))
def test_without_sabotage_all_is_exact(
    setting: str, cases: dict[str, Case], plain: Any, pool: WorkerPool
) -> None:  # fmt: skip
    report = verify_case(cases[setting], plain, pool)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("what", SABOTAGES)
def test_a_sabotage_is_found_and_named(what: str, cases: dict[str, Case], plain: Any, pool: WorkerPool) -> None:
    sabotage = SABOTAGES[what]
    ranks: Any = StruckPool(pool, what)
    report = verify_case(cases[sabotage.setting], plain, ranks)
    assert any(sabotage.found in failure for failure in report.failures), f"\n{report}"
