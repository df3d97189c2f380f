"""The form of every benchmark's results: JSON that says where it was measured, a plot, and the options for both."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import plot
import report

PANELS = [
    plot.Panel("ratios", "", "theirs / ours", {"torch": [plot.Point("pp=2", 1.1, 1.0, 1.3)]}, level=1.0),
    plot.Panel("growth", "layers", "s", {"a": [plot.Point.of(n, report.summary([n, n + 1.0])) for n in (2, 4)]}),
]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def test_results_say_where_and_how_busy_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_LAB", "2 nodes, 1 Gbit/s")
    chosen = report.options("about").parse_args(["--out", str(tmp_path / "deep" / "found.json")])
    report.publish(chosen, "mine", {"rounds": 3}, [{"seconds": 1.0}], PANELS)
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert (found["benchmark"], found["setting"], found["results"]) == ("mine", {"rounds": 3}, [{"seconds": 1.0}])
    assert {"date", "python", "torch", "transformers", "gpus", "cores", "load"} <= set(found["machine"])
    assert found["machine"]["lab"] == "2 nodes, 1 Gbit/s"
    assert report.busy(found["machine"]).endswith("In a lab: 2 nodes, 1 Gbit/s.")


def test_a_page_says_how_busy_the_machine_was_or_that_it_is_not_known() -> None:
    assert report.busy({"cores": 2, "load": 1.26}) == "Processes ready to run on 2 cores at the start: 1.3."
    assert "was not recorded" in report.busy({})


def test_without_matplotlib_a_plot_is_skipped_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.publish(report.options("").parse_args(["--plot", str(tmp_path / "a.png")]), "mine", {}, [], PANELS)
    assert "a.png was not drawn: matplotlib is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_a_plot_is_drawn_as_its_name_says(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / f"a{suffix}"
    assert plot.draw(path, PANELS)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_plot_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.options("").parse_args(["--plot", "a.pdf"])
    assert "'a.pdf' does not end in .png or .svg" in capsys.readouterr().err


def test_a_page_shows_the_table_that_is_printed() -> None:
    assert report.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert report.table(["a", "b"], [["1", "22"]]).splitlines() == ["a  b ", "-  --", "1  22"]
