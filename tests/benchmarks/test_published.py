"""Steps that others measured: what is calibrated on some models tells those of the others, and the page shows it."""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import published
import published_page

from phalanx.errors import DataError
from phalanx.planning.calibrate import step_seconds
from phalanx.planning.cost import Software
from phalanx.planning.runs import COLUMNS, read_run

ROW = dict.fromkeys(COLUMNS, "") | {
    "source": "VIA-Research/vTrain@1 runs.csv", "hidden": "2048", "heads": "16", "vocab": "51200", "seq_len": "1024",
    "gpu": "A100-80GB", "n_gpus": "8", "gpus_per_node": "8", "cp": "1", "global_batch": "64", "recompute": "full",
}  # fmt: skip
MESHES = [(1, 1, 8, 2), (1, 2, 4, 2), (2, 1, 4, 4), (8, 1, 1, 8), (2, 4, 1, 1), (4, 2, 1, 4)]


def table(path: Path) -> Path:
    """Of two models, as a program of other shares would take; and a row that says too little."""
    made = Software(products=0.6, small=250.0)
    rows = [ROW | {"model": "gpt"}]
    for layers in (12, 24):
        for tp, pp, dp, samples in MESHES:
            mesh = {"tp": str(tp), "pp": str(pp), "dp": str(dp), "micro_batch": str(samples), "layers": str(layers)}
            row = ROW | mesh | {"model": f"gpt-{layers}", "measured_iter_s": "1"}
            rows.append(row | {"measured_iter_s": str(step_seconds(read_run(row), made))})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list[str](COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_one_model_tells_the_steps_of_another_and_the_page_shows_how_well(tmp_path: Path) -> None:
    published.main([str(table(tmp_path / "runs.csv")), "--out", str(tmp_path / "published.json")])
    page = published_page.page(tmp_path)
    row = next(line for line in page.splitlines() if line.startswith("| vTrain, one node, A100 | 12 |"))
    error, rank, top_1 = (float(cell.split()[0]) for cell in row.split(" | ")[2:5])
    assert error < 3
    assert rank > 0.9
    assert top_1 == 0
    assert "Of 13 rows, 12 say enough." in page
    assert "| 1 | no measured time |" in page


def test_what_layers_with_odd_times_cost_a_choice_is_computed(tmp_path: Path) -> None:
    """A layer over two ranks that takes half of what it should for four samples is the best, and is not foreseen."""
    rows: list[dict[str, str]] = []
    for layers, tp, samples in itertools.product((12, 16, 24, 32), (1, 2), (1, 2, 4, 8)):
        mesh = {"tp": str(tp), "pp": "1", "dp": str(8 // tp), "micro_batch": str(samples), "layers": str(layers)}
        row = ROW | mesh | {"model": f"gpt-{layers}", "measured_iter_s": "1"}
        seconds = step_seconds(read_run(row), Software()) * (0.3 if (tp, samples) == (2, 4) else 1.0)
        rows.append(row | {"measured_iter_s": str(seconds)})
    odd = published.odd_layers(
        runs := [read_run(row) for row in rows],
        published.sweeps_of([(step_seconds(run, Software()), run.seconds or 0.0, run) for run in runs]),
    )["odd_layers"]
    assert odd["of"] == 8 and odd["best"] == 4 and odd["exponent"] == 2.5
    (layer,) = odd["layers"]
    assert (layer["width"], layer["tp"], layer["samples"]) == (2048, 2, 4) and layer["share"] < 0.5
    assert odd["with"]["top_1_regret"] > 0.5 and odd["without"]["top_1_regret"] is None
    assert odd["left_out"] == {"top_1_regret": 0.0, "top_3_regret": 0.0}
    assert published.odd_layers([run for run in runs if run.plan.tp == 1], []) == {}


def test_a_table_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        published.main([str(tmp_path / "none.csv")])
