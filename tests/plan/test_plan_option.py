"""The option `plan` of RunConfig: a text, a file or a Plan, kept as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PhalanxError, PlanError
from phalanx.plan.complete import needed_ranks
from phalanx.plan.plan import Plan


def test_a_text_is_kept_as_it_is_written() -> None:
    assert RunConfig(plan="pp=2, mb=4").plan == "pp=2, mb=4"


def test_a_plan_object_is_kept_with_all_it_decides() -> None:
    plan = Plan(pp=2, stages=(3, 4), recompute=("block",))
    config = RunConfig.create(plan=plan)
    assert config.plan == "pp=2,dp=1,mb=1,schedule=1f1b,stages=3-4,recompute=block"
    assert Plan.parse(config.plan) == plan
    assert needed_ranks(RunConfig.create(plan=Plan()).plan) == 1


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_a_file_that_a_plan_was_written_to_is_read_back(tmp_path: Path, name: str) -> None:
    plan = Plan(pp=2, dp=4, mb=8, zero=3, zero_degree=2)
    (tmp_path / name).write_text(plan.to_json())  # JSON is YAML
    for given in (tmp_path / name, str(tmp_path / name)):
        config = RunConfig.create(plan=given)
        assert Plan.parse(config.plan) == plan
        assert RunConfig.create(plan=config.plan) == config


def test_a_file_decides_only_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("schedule: interleaved\nrecompute: yes\nstages: [3, 4]\ntp: 1\n")
    assert RunConfig.create(plan=tmp_path / "plan.yaml").plan == "schedule=interleaved,recompute=block,stages=3-4,tp=1"
    (tmp_path / "empty.yaml").write_text("")
    assert RunConfig.create(plan=tmp_path / "empty.yaml").plan == ""


WRONG_FILES = {
    "missing.json": (None, ConfigError, "cannot be read", "give the path"),
    "broken.json": ("{", ConfigError, "is neither YAML nor JSON", "correct the line"),
    "list.yaml": ("[4]", ConfigError, "holds a list", "per line"),
    "field.yaml": ("mbs: 4", PlanError, "unknown field 'mbs'", "did you mean 'mb'"),
    "type.yaml": ("mb: four", PlanError, "mb='four' has the wrong type", "for example 1"),
    "value.yaml": ("mb: -1", PlanError, "mb='-1' is not a whole number", "mb=1 or more"),
    "empty.json": ('{"schedule": ""}', PlanError, "'schedule=' says nothing", "schedule=1f1b"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_refused_by_its_name_and_what_is_wrong_in_it(tmp_path: Path, name: str) -> None:
    content, kind, message, hint = WRONG_FILES[name]
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PhalanxError) as refused:
        RunConfig.create(plan=tmp_path / name)
    assert type(refused.value) is kind
    assert refused.value.message.startswith(f"option plan: {tmp_path / name}: ")
    assert message in refused.value.message and hint in refused.value.hint


def test_a_text_that_is_no_plan_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match="unknown field 'schedul'\n  → did you mean 'schedule'"):
        RunConfig(plan="mb=2,schedul=gpipe")


def test_a_wrong_plan_in_a_file_of_options_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("plan: mb=x\n")
    with pytest.raises(PlanError, match=r"run\.yaml: plan: mb='x' is not a whole number"):
        RunConfig.load(tmp_path / "run.yaml")


def test_what_is_neither_text_nor_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="option plan = 4 must be a valid string"):
        RunConfig.create(plan=4)


def test_the_number_of_ranks_is_open_or_at_least_one() -> None:
    assert RunConfig().ranks is None
    assert RunConfig.create(ranks="4").ranks == 4
    with pytest.raises(ConfigError, match="option ranks = 0 must be greater than or equal to 1"):
        RunConfig(ranks=0)
