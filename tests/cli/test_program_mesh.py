"""`phalanx program`: where a plan with tensor parallelism puts the stages, and whom the shown ranks stand for."""

from __future__ import annotations

import pytest

from phalanx.cli.main import main


def test_it_shows_all_ranks_of_a_stage_and_one_pipeline_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "pp=2,dp=2,tp=2,mb=2"
    assert main(["program", "--model", "gpt2", "--tiny", "--batch-size", "8", "--plan", plan]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    table = next(number for number, line in enumerate(lines) if line.startswith("stage"))
    assert [line.split()[1] for line in lines[table + 1 : table + 3]] == ["0–3", "4–7"]
    said = next(line for line in lines if line.startswith("predicted: "))
    assert said.endswith("the first of 2 tensor-parallel ranks, one of 2 equal replicas")
    assert {line.split()[1] for line in lines if line.startswith("rank ") and "·" in line} == {"0", "4"}
