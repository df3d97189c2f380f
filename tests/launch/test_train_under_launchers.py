"""Training among ranks that torchrun or SLURM started, or that `phalanx train` starts itself; and plans that do not fit
the ranks there are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.errors import ConfigError, PlanError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.observe.story import story
from phalanx.plan.plan import Plan
from phalanx.training import trainer
from phalanx.training.trials import STEPS
from tests.children import Popen, environment
from tests.faults.ranks import fit
from tests.run_helpers import SHORT, NoDecay, losses, records, short_run

ROOT = Path(__file__).parents[2]
DATA = "synthetic:7"
ENDLESS = 100_000
OPTIONS = {"lr": 3e-3, "lr_schedule": "constant", "export": False, "device": "cpu"}
PLAN = "pp=2,mb=2"


@pytest.fixture(scope="module", autouse=True)
def captured_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The capture is made here, unchecked, instead of by the ranks."""
    short_run("gpt2", DATA, tmp_path_factory.mktemp("first"), **{**OPTIONS, "steps": 2})


def local(pool: WorkerPool, out: Path, steps: int) -> dict[int, float]:
    """Step → loss with ranks of our own."""
    fit(pool, out, "gpt2", DATA, **{**OPTIONS, "plan": PLAN, "steps": steps})
    return losses(out)


def command(out: Path, **options: object) -> list[str]:
    given = {**SHORT, **OPTIONS, "model": "gpt2", "data": DATA, "plan": PLAN, **options, "out": out}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
    flags += [f"--{'' if value else 'no-'}{name}" for name, value in given.items() if isinstance(value, bool)]
    return ["-m", "phalanx", "train", *flags]


def started(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    return Popen(
        [sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(OMP_NUM_THREADS="1", PHALANX_DEBUG="0", **variables),
    )  # fmt: skip


def torchrun(out: Path, **options: object) -> subprocess.Popen[str]:
    port = 33000 + (os.getpid() * 11 + len(str(out))) % 20000
    run = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    return started([*run, *command(out, **options)])


def slurm(job: int, out: Path, **options: object) -> list[subprocess.Popen[str]]:
    """Two tasks, as srun starts them."""
    common = {"SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost"}
    common["SLURM_JOB_ID"] = f"{os.getpid()}{job}"
    return [
        started(command(out, **options), SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **common) for rank in range(2)
    ]


def wait_for_step(out: Path, rank: int, step: int, process: subprocess.Popen[str]) -> None:
    deadline, log = time.monotonic() + 120, out / f"log-rank{rank}.jsonl"
    while not (log.exists() and f'"step": {step},' in log.read_text()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the ranks did not get under way"
        time.sleep(0.05)


def test_under_torchrun_the_losses_are_those_of_our_own_ranks(pool: WorkerPool, tmp_path: Path):
    process = torchrun(tmp_path / "joined", steps=4)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert "error" not in err.lower() and out == ""
    assert losses(tmp_path / "joined") == local(pool, tmp_path / "local", 4)


@pytest.mark.long
def test_under_slurm_a_killed_rank_ends_the_job_and_rank_0_tells_of_it(pool: WorkerPool, tmp_path: Path):
    ranks = slurm(1, tmp_path / "joined", steps=ENDLESS)
    wait_for_step(tmp_path / "joined", 1, 4, ranks[1])
    time.sleep(1.5)  # ranks show what they do once a second
    ranks[1].kill()
    began = time.monotonic()
    _, err = ranks[0].communicate(timeout=60)
    ranks[1].communicate()
    assert time.monotonic() - began < 20
    assert ranks[0].returncode == 2 and err.count("error:") == 1 and "Traceback" not in err, err
    assert re.match(r"error: rank 1 \(stage 1\) stopped answering for \d+ s in step \d+", err), err
    found = losses(tmp_path / "joined")
    expected = local(pool, tmp_path / "local", 4)
    assert {step: found[step] for step in expected} == expected


@pytest.mark.long
def test_under_torchrun_a_killed_worker_ends_the_job_and_is_named(tmp_path: Path):
    process = torchrun(tmp_path, steps=ENDLESS)
    wait_for_step(tmp_path, 1, 4, process)
    worker = next(pid for pid in children(process.pid) if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(worker, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    # torchrun notices first, ends the others and tells which one it was.
    assert process.returncode != 0 and "Signal 9 (SIGKILL)" in err and f"pid: {worker}" in err, err


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (1, "failed: rank 1 (stage 1) stopped answering for "),
        (0, "failed: the store of this job does not answer: rank 0 or its launcher is gone or stands still"),
    ],
)
def test_without_a_supervisor_a_rank_that_is_left_tells_the_log_who_was_lost(
    tmp_path: Path, lost: int, said: str
) -> None:
    ranks = slurm(8 + lost, tmp_path, steps=ENDLESS, checkpoint_every=1)
    wait_for_step(tmp_path, 1, 4, ranks[0])
    ranks[lost].kill()
    outputs = [process.communicate(timeout=120) for process in ranks]
    told = list(story(read_log(tmp_path / "log-rank0.jsonl")))
    assert said in told[-1] and sum("failed: " in line for line in told) == 1, (
        told[-3:],
        [each[1][:1500] + "<...>" + each[1][-1500:] for each in outputs],
    )
    assert "--resume auto" in told[-1] and f"error: {told[-1].partition('failed: ')[2]}" in outputs[1 - lost][1]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.long
def test_a_plan_for_more_ranks_than_the_launcher_started_is_refused_by_rank_0(tmp_path: Path):
    ranks = slurm(2, tmp_path, plan="pp=4", steps=3)
    (_, first), (_, second) = (process.communicate(timeout=120) for process in ranks)
    assert [process.returncode for process in ranks] == [2, 1], (first, second)
    assert first.splitlines() == [
        "error: plan: pp=4 does not divide the number of ranks: there are 2",
        "  → use pp=1 or 2, or start a number of ranks that 4 divides",
    ]
    assert second == ""


# Plans that do not fit after all. Greedy says on which rank that is: on whichever comes first.

GREEDY = {"plan": "auto", "optimizer": "tests.greedy.Greedy", "progress": "plain", "steps": 2}


def greedy(monkeypatch: pytest.MonkeyPatch, folder: Path, when: str, times: int, after: int = 0) -> None:
    folder.mkdir()
    monkeypatch.setenv("TEST_GREEDY", f"{folder},{when},{times},{after}")


@pytest.mark.long
@pytest.mark.parametrize("when", ["state", "step"])
def test_under_torchrun_a_plan_for_which_one_rank_lacks_memory_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    greedy(monkeypatch, tmp_path / "greedy", when, 1)
    process = torchrun(tmp_path / "run", **GREEDY)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    require_gave_way(tmp_path, out)


@pytest.mark.long
def test_under_slurm_a_plan_for_which_one_rank_lacks_memory_gives_way_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(monkeypatch, tmp_path / "greedy", "step", 1)
    ranks = slurm(5, tmp_path / "run", **GREEDY)
    (out, first), (silent, second) = (process.communicate(timeout=150) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], (first, second)
    assert silent == ""
    require_gave_way(tmp_path, out)


def require_gave_way(folder: Path, out: str) -> None:
    """out: what rank 0 said, for all ranks."""
    record = records(folder / "run", "plan")[-1]
    (first,) = record["did_not_fit"]
    assert Plan.parse(record["plan"]) != Plan.parse(first) and record["reason"].endswith(f"; {first} did not fit")
    assert out.count(f"plan {first} did not fit, and gives way to one that needs less: ") == 1
    short_run("gpt2", DATA, folder / "plain", **OPTIONS, plan="simple", steps=2, optimizer_class=NoDecay)
    assert losses(folder / "run") == pytest.approx(losses(folder / "plain"), rel=1e-5)


@pytest.mark.long
def test_under_slurm_ranks_measure_the_best_plans_and_pass_over_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(monkeypatch, tmp_path / "greedy", "step", times=1, after=STEPS)  # in the second trial
    ranks = slurm(6, tmp_path / "run", **GREEDY, measure_top=3)
    (_, first), (silent, second) = (process.communicate(timeout=150) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], (first, second)
    (record,) = records(tmp_path / "run", "plan")
    fastest = min(record["measured"], key=lambda own: own["measured_step_seconds"])
    assert silent == "" and record["chosen"] == "measured" and len(record["measured"]) == 2
    assert Plan.parse(fastest["plan"]).shown == Plan.parse(record["plan"]).shown
    (failed,) = record["failed"]
    assert " failed: " in failed and "does not fit in the memory of cpu" in failed and failed in record["reason"]
    assert list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.long
def test_under_slurm_ranks_begin_anew_as_often_as_plans_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(monkeypatch, tmp_path / "greedy", "step", 3)  # of which both ranks may have one in the same attempt
    ranks = slurm(3, tmp_path / "run", **GREEDY)
    (out, first), (silent, second) = (process.communicate(timeout=200) for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], (first, second)
    others = out.count("did not fit, and gives way to one that needs less: ")
    assert others in (2, 3) and silent == ""
    assert len(records(tmp_path / "run", "plan")[-1]["did_not_fit"]) == others


def test_under_a_launcher_a_plan_that_was_given_does_not_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy(monkeypatch, tmp_path / "greedy", "step", 1)
    ranks = slurm(4, tmp_path / "run", **{**GREEDY, "plan": "dp=2"})
    (_, first), (_, second) = (process.communicate(timeout=150) for process in ranks)
    assert [process.returncode for process in ranks] == [2, 1], (first, second)
    assert first.count("error:") == 1 and "does not fit in the memory of cpu" in first
    assert "error:" not in second  # torch may warn there of the store that went with rank 0


@pytest.fixture
def alone_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(33000 + os.getpid() * 13 % 20000)
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("alone_under_torchrun")
def test_a_plan_or_a_number_of_ranks_that_the_launcher_does_not_have_is_refused(tmp_path: Path):
    with pytest.raises(PlanError) as plan:
        short_run("gpt2", DATA, tmp_path, **OPTIONS, plan="pp=4")
    assert plan.value.message == "plan: pp=4 does not divide the number of ranks: there is 1"
    with pytest.raises(ConfigError) as ranks:
        short_run("gpt2", DATA, tmp_path, **OPTIONS, ranks=2)
    assert ranks.value.message == "option ranks = 2, but the launcher started 1"
    assert "leave ranks out where a launcher starts them" in ranks.value.hint


@pytest.mark.usefixtures("alone_under_torchrun")
def test_a_script_under_a_launcher_may_train_several_times(tmp_path: Path):
    first, second = (short_run("gpt2", DATA, tmp_path / name, **OPTIONS) for name in ("first", "second"))
    assert len(first.losses) == 3 and first.losses == second.losses


def test_without_plan_and_ranks_a_cpu_is_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "WorkerPool", None)  # nobody is started
    short_run("gpt2", DATA, tmp_path, **OPTIONS)
    assert json.loads((tmp_path / "plan.json").read_text())["pp"] == 1
    assert "ranks" not in records(tmp_path, "start")[0]["header"]


def test_a_number_of_ranks_makes_a_simple_plan(lent_ranks: list[int], tmp_path: Path):
    result = short_run("gpt2", DATA, tmp_path, **OPTIONS, ranks=2, plan="simple")
    header = records(tmp_path, "start")[0]["header"]
    assert json.loads((tmp_path / "plan.json").read_text())["pp"] == 2
    assert header["ranks"] == "2 (2 in a pipeline × 1 replica)"
    assert "pp 2: all ranks in one pipeline" in header["stages"]
    assert lent_ranks == [2] and list(result.losses) == list(losses(tmp_path).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks=3", "--plan=pp=2"), "plan: pp=2 does not divide the number of ranks: there are 3"),
        (("--ranks=2", "--plan=pp=2,dp=2"), "plan: pp=2 × dp=2 makes 4 ranks, and there are 2"),
        (("--ranks=3", "--plan=zero=1", "--batch-size=2"), "dp=3 × mb=1 cuts a batch of 2 samples into more parts"),
        (("--ranks=0",), "option ranks = '0' must be greater than or equal to 1"),
    ],
)
def test_ranks_and_plans_that_do_not_fit_are_refused_before_anything_is_started(
    options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    monkeypatch.setattr(trainer, "WorkerPool", None)  # nobody is started
    given = ["--model=gpt2", "--tiny", "--data=synthetic:7", "--device=cpu", "--steps=2", f"--out={tmp_path}"]
    assert main(["train", *given, *options]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and message in said and "\n  → " in said and "Traceback" not in said


def test_what_only_the_model_can_refuse_comes_from_a_rank_in_the_same_words(pool: WorkerPool, tmp_path: Path):
    with pytest.raises(PlanError) as caught:
        fit(pool, tmp_path, "gpt2", DATA, **{**OPTIONS, "plan": "pp=2,stages=3-4"})
    assert caught.value.message == "plan: stages=3-4 holds 7 blocks, and the model has 6"


def writer_of(log: Path) -> int:
    """The process that has a file open."""
    for found in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(found) == str(log.resolve()):
                return int(found.parts[2])
    raise AssertionError(f"nobody writes {log}")


@pytest.mark.long
def test_a_rank_is_lost_and_replaced_under_torchrun(pool: WorkerPool, tmp_path: Path) -> None:
    """No process of the launcher is a rank, so it does not see that one is lost."""
    process = torchrun(tmp_path / "run", plan="dp=2", on_loss="replace", steps=60)
    wait_for_step(tmp_path / "run", 0, 3, process)
    os.kill(writer_of(tmp_path / "run" / "log-rank1.jsonl"), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    (loss,) = records(tmp_path / "run", "loss")
    assert "was killed by signal SIGKILL" in loss["lost"][0] and loss["source"] == "the ranks that were left"
    fit(pool, tmp_path / "own", "gpt2", DATA, **{**OPTIONS, "plan": "dp=2", "steps": 60})
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "own"), rel=1e-6)
