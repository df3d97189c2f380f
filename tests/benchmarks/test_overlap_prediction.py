"""Predictions of the overlap benchmark's modes: they give what was measured apart, and know nothing of the step."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import overlap
from overlap_cases import MODES
from overlap_prediction import BLOCKING, Case, collectives, divided, predictions

from phalanx.predict.costs import Link, uniform
from phalanx.predict.simulate import seconds_among_others
from phalanx.program.shape import ModelShape

FILE = Path(__file__).parent.parent.parent / "docs" / "results" / "overlap_gpu.json"
SHOWN = "H 8192"  # the fewest layers


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The file, with this case alone."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return {**data, "results": [result for result in data["results"] if result["case"] == SHOWN]}


@pytest.fixture(scope="module")
def case(results: dict[str, Any]) -> Case:
    return overlap.case_of(results["setting"]["kind"], results["results"][0])


@pytest.fixture(scope="module")
def found(case: Case) -> dict[str, dict[str, float]]:
    return predictions(case)


def with_step(case: Case, mode: str, factor: float) -> Case:
    """As if this mode's steps had taken another time."""
    modes = copy.deepcopy(dict(case.modes))
    modes[mode]["step"]["median"] *= factor
    return replace(case, modes=modes)


def test_results_have_the_predictions_that_are_made_of_them(case: Case, found: dict[str, dict[str, float]]) -> None:
    for mode, of in case.modes.items():
        assert of["predicted"] == pytest.approx(found[mode]), "run overlap.py --predict and pages.py"


def test_predictions_are_written_anew_beside_what_was_measured(results: dict[str, Any], tmp_path: Path) -> None:
    file, old = tmp_path / "overlap_gpu.json", copy.deepcopy(results)
    for of in old["results"][0]["modes"].values():
        of["predicted"] = {"seconds": 0.0}
    old["results"].append({"case": "failed", "modes": {}, "error": "why"})
    file.write_text(json.dumps(old), encoding="utf-8")
    overlap.predict_anew(file)
    new, failed = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert failed == old["results"][1]
    for mode, of in results["results"][0]["modes"].items():
        assert new["modes"][mode].pop("predicted") == pytest.approx(of["predicted"])
        assert new["modes"][mode] == {kind: figures for kind, figures in of.items() if kind != "predicted"}


@pytest.mark.parametrize("mode", MODES)
def test_the_measured_step_of_a_mode_does_not_enter_its_prediction(
    case: Case, found: dict[str, dict[str, float]], mode: str
) -> None:
    other = predictions(with_step(case, mode, 3.0))
    assert other[mode] == found[mode]
    changed = {name for name in MODES if other[name] != found[name]}
    assert changed == (set(MODES) - {mode} if mode in BLOCKING else set()), "only blocking modes say what is lost"


@pytest.mark.parametrize("mode", MODES)
def test_computation_and_communication_by_themselves_take_what_was_measured(case: Case, mode: str) -> None:
    program = case.program(mode)
    silent = replace(program.costs, group_link=Link())
    assert seconds_among_others(program.compiled, silent) == pytest.approx(case.median(mode, "compute"))
    assert sum(collectives(program.compiled, program.costs)) == pytest.approx(case.median(mode, "communication"))


@pytest.mark.parametrize("mode", BLOCKING)
def test_a_blocking_step_grows_in_proportion_to_what_is_lost_where_ranks_wait(case: Case, mode: str) -> None:
    program = case.program(mode)
    for lost in (0.0, 1e-4, 0.01, 0.5):
        assert program.lost(program.seconds(lost)) == pytest.approx(lost, abs=1e-9)


def test_nothing_is_gained_where_ranks_wait(case: Case) -> None:
    quick = case
    for mode in BLOCKING:
        quick = with_step(quick, mode, 0.1)
    assert all(own["lost"] == 0.0 and own["seconds"] == own["without"] for own in predictions(quick).values())


def test_a_program_that_is_not_the_one_that_ran_is_refused(case: Case) -> None:
    modes = {**case.modes, "none": {**case.modes["none"], "collectives": 9}}
    with pytest.raises(SystemExit, match="none: the program has 10 collectives, not those that were measured"):
        replace(case, modes=modes).program("none")


def test_a_part_of_the_computation_is_the_forward() -> None:
    costs = divided(uniform(ModelShape(2, (), (True,) * 2, (True,) * 2)), 0.2)
    assert costs.forward == pytest.approx((0.6, 0.6))
    assert costs.backward == costs.weight == pytest.approx((1.2, 1.2))
