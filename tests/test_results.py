"""Results pages are what their JSON gives, and every figure that the README claims is on the page it is taken from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from pages import measured

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")
ROW = re.compile(r"^\|.*\(docs/results/(\w+)\.md\) \|$", re.M)


def measured_section() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme[readme.index("## Measured") : readme.index("## Further")]


MEASURED = measured()
CLAIMS = {row[1]: row[0].replace(f"docs/results/{row[1]}.md", "") for row in ROW.finditer(measured_section())}


def unfounded(claim: str, page: str) -> set[str]:
    """The figures of a claim that the page does not have."""
    return set(FIGURE.findall(claim)) - set(FIGURE.findall(page))


def test_every_page_has_its_results_and_every_result_its_page() -> None:
    assert {file.stem for file in RESULTS.glob("*.md")} == set(MEASURED)
    for file in RESULTS.glob("*.json"):
        assert sum(f"]({file.name})" in text for text in MEASURED.values()) == 1, file.name


@pytest.mark.parametrize("name", MEASURED)
def test_a_page_is_what_its_results_give(name: str) -> None:
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == MEASURED[name], "run python benchmarks/pages.py"


@pytest.mark.parametrize("name", CLAIMS)
def test_the_readme_claims_what_was_measured(name: str) -> None:
    assert not unfounded(CLAIMS[name], MEASURED[name])


def test_the_readme_claims_figures_only_under_the_name_of_a_page() -> None:
    assert CLAIMS, "nothing is claimed"
    assert not FIGURE.findall(ROW.sub("", measured_section()))


def test_a_figure_that_was_not_measured_is_found() -> None:
    assert unfounded("65,342 tokens/s, 1.07× with 31 % less", "65,342 | 1.07× | 310 %") == {"31"}
