"""A function on every rank of a lab: what ranks saw comes back, and links that cannot be limited end the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import in_lab

from tests.lab.labs import needs_namespaces
from tests.launch.jobs import sends_much


@needs_namespaces
def test_what_every_rank_saw_comes_back() -> None:
    seconds = in_lab.run("nodes=2,link=100mbit", sends_much, 1000, -1, device="cpu", variables=["OMP_NUM_THREADS=1"])
    assert len(seconds) == 2 and all(0 < each < 60 for each in seconds)


def test_links_that_cannot_be_limited_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlimited:
        spec, effective, notes = "link=1gbit", "", ["no network namespaces"]

        def __init__(self, spec: str, say: object) -> None: ...

        def __enter__(self) -> Unlimited:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(in_lab, "Lab", Unlimited)
    with pytest.raises(SystemExit, match="links of a known rate are needed: no network namespaces"):
        in_lab.run("nodes=2,link=1gbit", sends_much, 1000, -1, device="cpu")
