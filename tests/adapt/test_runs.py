"""A run whose plan, batch size or sample length changes on the way is the run of one process."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from phalanx.cli import change as change_verb
from phalanx.cli.main import app
from phalanx.errors import ConfigError, PhalanxError, PlanError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe import requests
from phalanx.state import checkpoint
from phalanx.state.lock import Holder
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.captured import LLAMA
from tests.run_helpers import losses, records, short_config, short_run

OPTIONS = {
    "dtype": "float64", "batch_size": 8, "lr": 3e-3, "warmup_steps": 2, "clip": 0.5, "seed": 3, "export": False,
    "device": "cpu", "steps": 6, "seq_len": 8,
}  # fmt: skip
DATA = "synthetic:13"


def fit(pool: WorkerPool, out: Path, world: int, model: str = "gpt2", on_event: Any = None, **options: Any) -> Any:
    trainer = Trainer(model, DATA, short_config(out, **{**OPTIONS, **options}))
    with pack(trainer.job) as payload:
        return pool.run(fit_on_rank, payload, world=world, on_event=on_event)[0]


def stored(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names()}


def require_same_run(found: Path, expected: Path) -> None:
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9, abs=0.0)
    torch.testing.assert_close(stored(found), stored(expected), rtol=1e-7, atol=1e-10)


def test_a_run_follows_its_options_from_plan_to_plan(pool: WorkerPool, tmp_path: Path) -> None:
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS)
    plans = ("3:pp=2,dp=1,mb=4", "4:dp=4,zero=1", "5:dp=4,zero=1", "6:pp=3,mb=2")  # one is named twice
    fit(pool, tmp_path / "four", 4, plan="pp=2,tp=2,mb=2", plan_at=plans)
    require_same_run(tmp_path / "four", tmp_path / "one")
    changes = records(tmp_path / "four", "change")
    assert [(each["step"], each["how"]) for each in changes] == [(step, "as the options say") for step in (3, 4, 6)]
    assert [each["old"] for each in changes[1:]] == [each["plan"] for each in changes[:-1]]
    assert all(each["bytes"] > 0 and each["seconds"] > 0 for each in changes)
    newest = checkpoint.latest(tmp_path / "four" / "checkpoints")
    assert newest is not None
    assert [each["step"] for each in checkpoint.open(newest).state["plans"]] == [1, 3, 4, 6]


def test_a_change_is_made_ready_for_while_the_old_plan_trains(pool: WorkerPool, tmp_path: Path) -> None:
    """By the options, with other batches; and when asked: then the run trains on until all ranks are ready."""
    options = {"steps": 40, "batch_size_at": "6:4", "checkpoint_every": "never"}
    short_run("gpt2", DATA, tmp_path / "one", **{**OPTIONS, **options})

    def asks(event: str, given: Any) -> None:
        if event == "on_step" and given[0]["step"] == 7:
            requests.ask(tmp_path / "two", "pp=2,mb=2")

    fit(pool, tmp_path / "two", 2, on_event=asks, plan="pp=2,mb=2", plan_at="6:dp=2,zero=1", **options)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9, abs=0.0)
    scheduled, asked = records(tmp_path / "two", "change")
    assert (scheduled["step"], scheduled["ready"]) == (6, True)
    assert asked["step"] > 8 and asked["ready"] and asked["plan"].startswith("pp=2")


@pytest.mark.long
def test_samples_grow_eightfold_with_a_change_to_slices(pool: WorkerPool, tmp_path: Path) -> None:
    """512 tokens in stages, 4,096 in stages and slices, in one run."""
    grown = {"seq_len": 512, "seq_len_at": "3:4096", "batch_size": 2, "batch_size_at": "3:1", "steps": 4}
    grown |= {"checkpoint_every": 4}
    short_run(LLAMA, DATA, tmp_path / "one", **{**OPTIONS, **grown})
    fit(pool, tmp_path / "two", 2, LLAMA, plan="pp=2,mb=2", plan_at="3:pp=2,slices=4", **grown)
    require_same_run(tmp_path / "two", tmp_path / "one")
    (changed,) = records(tmp_path / "two", "change")
    assert changed["seq_len"] == 4096 and "slices=" in changed["plan"]


@pytest.mark.long
def test_batches_and_samples_grow_with_the_plan_and_a_resumed_run_sees_the_same(
    pool: WorkerPool, tmp_path: Path
) -> None:
    grown = {"batch_size_at": ("3:4", "5:12"), "seq_len_at": "4:16", "eval_data": "synthetic:5", "eval_every": 2}
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS, **grown)
    samples = [record["samples"] for record in records(tmp_path / "one", "step")]
    assert samples == [8, 16, 20, 24, 36, 48]
    plans = ("2:dp=2,zero=3", "4:pp=2,slices=2,mb=2")
    fit(pool, tmp_path / "two", 2, plan="pp=2,mb=2", plan_at=plans, **grown)
    require_same_run(tmp_path / "two", tmp_path / "one")


def test_a_run_is_asked_for_another_plan_while_it_trains(tmp_path: Path, lent_ranks: list[int]) -> None:
    """From a callback, which is called in another process than the ranks; and a plan that it cannot have."""
    options = {**OPTIONS, "steps": 48}  # so many that it still runs when the second question comes
    short_run("gpt2", DATA, tmp_path / "one", **options)
    answers: list[dict[str, Any]] = []

    class Asks:
        def on_start(self, trainer: Trainer) -> None:
            self.trainer = trainer

        def on_step(self, record: dict[str, Any]) -> None:
            if record["step"] in (1, 3):
                self.trainer.change("dp=2,zero=1" if record["step"] == 1 else "pp=2,mb=9")

        def on_change(self, record: dict[str, Any]) -> None:
            answers.append(record)

    short_run("gpt2", DATA, tmp_path / "two", **options, plan="pp=2,mb=2", callbacks=[Asks()])
    require_same_run(tmp_path / "two", tmp_path / "one")
    done, refused = answers
    assert done["how"] == "asked for while it ran" and done["plan"].startswith("dp=2,zero=1")
    assert refused["refused"].startswith("plan: mb=9 cuts a batch of 8 samples into more micro-batches than it has")
    told = CliRunner().invoke(app, ["history", str(tmp_path / "two")]).output
    assert "the run began, 48 steps, with plan pp=2,mb=2" in told
    assert "→ dp=2,zero=1" in told and "was refused and the old one stays" in told and "the run ended with" in told


@pytest.mark.long
def test_a_run_that_stops_between_changes_goes_on_with_what_holds_then(pool: WorkerPool, tmp_path: Path) -> None:
    grown = {"batch_size_at": ("3:4", "5:12"), "seq_len_at": "4:16", "lr_schedule": "constant"}
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS, **grown)
    plans = ("2:dp=2,zero=3", "4:pp=2,mb=2")
    for steps in (5, 6):
        fit(pool, tmp_path / "two", 2, plan="pp=2,mb=2", plan_at=plans, resume="auto", **{**grown, "steps": steps})
    require_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan_at": "dp=2"}, "option plan_at = 'dp=2' does not begin with the step from which it holds, 2 or more"),
        ({"plan_at": "1:dp=2"}, "option plan_at = '1:dp=2' does not begin with the step from which it holds"),
        ({"plan_at": ("3:dp=2", "3:pp=2")}, "option plan_at names step 3 twice"),
        ({"plan_at": "3:dpp=2"}, "unknown field 'dpp'"),
        ({"batch_size_at": "3:many"}, "option batch_size_at = '3:many': 'many' is not a number of 1 or more"),
        ({"seq_len_at": "3:0"}, "option seq_len_at = '3:0': '0' is not a number of 1 or more"),
        ({"plan_at": "9:dp=1"}, "option plan_at: step 9 is after the last of 6 steps (as given)"),
        ({"batch_size_at": "3:1", "plan": "mb=2"}, "plan: mb=2 cuts a batch of 1 samples into more micro-batches"),
        ({"plan_at": "3:pp=2", "ranks": 1}, "plan: pp=2 needs 2 ranks, and there is 1"),
        ({"seq_len_at": "3:9999"}, "a sample of 9999 tokens is longer than the model takes"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PhalanxError) as refused:
        short_run("gpt2", DATA, tmp_path, **{**OPTIONS, **options})
    assert message in str(refused.value) and refused.value.hint


def test_another_terminal_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change that is made, one that is refused, and one that nobody has looked at."""

    class Terminal:
        def on_start(self, trainer: Trainer) -> None:
            self.failed: list[str] = []
            self.trainer = trainer
            self.thread = threading.Thread(target=self.ask, args=[trainer.folder])

        def on_step(self, record: dict[str, Any]) -> None:
            if record["step"] == 1:
                with pytest.raises(ConfigError, match="has not answered for 0 s, and it was taken back"):
                    change_verb.change(tmp_path, "mb=2", wait=0)
                self.thread.start()
            elif self.thread.is_alive():
                time.sleep(0.05)
            else:
                self.trainer.stop()

        def ask(self, folder: Path) -> None:
            change_verb.change(folder, "mb=4", wait=60)
            try:
                change_verb.change(folder, "mb=9", wait=60)
            except PlanError as error:
                self.failed.append(error.message)

    terminal = Terminal()
    short_run("gpt2", DATA, tmp_path, **{**OPTIONS, "steps": 80, "checkpoint_every": "never"}, callbacks=[terminal])
    terminal.thread.join()
    assert re.search(r"changed before step \d+ to mb=4.*: 0 B moved, a pause of", capsys.readouterr().out)
    assert terminal.failed[0].startswith("the run goes on as it was: plan: mb=9 cuts a batch of 8 samples into more")


def test_only_a_run_that_trains_can_be_asked(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["change", str(tmp_path), "dp=2"])
    assert isinstance(found.exception, ConfigError)
    assert f"no run is training in {tmp_path}" in str(found.exception)
    found = CliRunner().invoke(app, ["history", str(tmp_path)])
    assert "holds no log of a run (log-rank0.jsonl)" in str(found.exception)


def test_an_answer_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "change-ab.json").write_text('{"plan": 3}')
    with pytest.raises(ConfigError, match=r"the answer of the run in .* cannot be read: plan: .*\n.*phalanx history"):
        requests.wait_for(tmp_path, requests.Request("ab", "pp=2"), 1.0)
    assert not (tmp_path / "change-ab.json").exists()


def test_who_asks_is_told_that_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holders = [Holder.here()]
    monkeypatch.setattr("phalanx.state.lock.read_holder", lambda folder: holders.pop() if holders else None)
    monkeypatch.setattr(Holder, "is_gone", lambda self, seen_by: False)
    with pytest.raises(ConfigError, match="ended before it came to this request"):
        change_verb.change(tmp_path, "mb=2", wait=30)
    assert not list(tmp_path.iterdir())
