"""Figures that README and results pages claim are in the result files."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def single_gpu() -> dict[str, dict[str, str]]:
    """What the result file says, in the form the pages write it."""
    data = json.loads((RESULTS / "single_gpu.json").read_text())
    tokens = data["setting"]["batch"] * data["setting"]["tokens"]
    best = min(row["seconds"]["median"] for row in data["results"][:3])
    return {
        row["candidate"]: {
            "milliseconds": f"{row['seconds']['median'] * 1e3:.1f} "
            f"({row['seconds']['low'] * 1e3:.1f}–{row['seconds']['high'] * 1e3:.1f})",
            "tokens": f"{tokens / row['seconds']['median']:,.0f}",
            "ratio": f"{best / row['seconds']['median']:.2f}×",
            "memory": f"{row['peak_bytes'] / 2**30:.1f}",
        }
        for row in data["results"]
    }


def test_the_results_page_shows_what_was_measured() -> None:
    page = (RESULTS / "single_gpu.md").read_text()
    for figures in single_gpu().values():
        assert all(figure in page for figure in figures.values()), figures


def test_the_readme_claims_what_was_measured() -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("<!-- single_gpu -->") : readme.index("<!-- /single_gpu -->")]
    ours, plain = single_gpu()["phalanx"], single_gpu()["compiled layers"]
    for figure in (ours["tokens"], ours["ratio"], ours["memory"], plain["tokens"], plain["memory"]):
        assert figure in section
    less = 1 - float(ours["memory"]) / float(plain["memory"])
    assert f"{less:.0%}".replace("%", " %") in section
