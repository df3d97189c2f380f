"""Classes and functions of the user's own script in processes that load it: scripts are really written and run."""

from __future__ import annotations

import io
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

import phalanx
from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.launch.main_script import MainScript, unpickle
from phalanx.launch.worker_pool import WorkerPool
from tests import children

ROOT = Path(__file__).parents[2]

JOB = """
from phalanx.launch.worker_pool import WorkerPool

print("loaded as", __name__, flush=True)

def job(context):
    return context.rank, __name__

def pool():
    return WorkerPool(2, threads_per_rank=1, device="cpu", preload=())
"""

GUARDED = """
if __name__ == "__main__":
    with pool() as ranks:
        print(ranks.run(job))
"""

TRAINING = """
import sys

import torch
from torch import nn

import phalanx


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x)[:, 0], y)


class Rows:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 8).roll(index)
        return x, x[:3].sum()


def collate(rows):
    return {"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad.sign(), alpha=group["lr"])


def train(model, out, **options):
    return phalanx.train(
        model, Rows(), collate=collate, eval_data=Rows(), optimizer_class=Signs, out=f"{sys.argv[1]}/{out}",
        batch_size=4, steps=3, progress="off", device="cpu", **options,
    )
"""


def run_script(script: Path, text: str, *arguments: str, started_as: tuple[str, ...] = ()) -> str:
    """What the script says on both its outputs."""
    script.write_text(text)
    done = children.run(
        [sys.executable, *(started_as or (str(script),)), *arguments], cwd=script.parent,
        env=children.environment(OMP_NUM_THREADS="1", PHALANX_DEBUG="0"),
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_script_trains_its_own_module_data_collate_and_optimizer_on_two_ranks(tmp_path: Path):
    said = run_script(
        tmp_path / "script.py",
        TRAINING
        + """
if __name__ == "__main__":
    torch.manual_seed(0)
    module = Regressor()
    before = module.layers[0].weight.detach().clone()
    result = train(module, "module", plan="dp=2")
    made = train(Regressor, "factory", plan="dp=2,mb=2")
    print(result.module() is module, not torch.equal(before, module.layers[0].weight), type(made.module()) is Regressor)
""",
        str(tmp_path),
    )
    assert "True True True" in said, said


def test_a_script_that_trains_whenever_it_is_loaded_is_refused(tmp_path: Path):
    said = run_script(tmp_path / "script.py", TRAINING + "\ntrain(Regressor(), 'run', plan='dp=2')\n", str(tmp_path))
    assert "ConfigError: script.py calls phalanx.train whenever it is loaded" in said, said
    assert 'put the call under `if __name__ == "__main__":`' in said


def test_every_rank_loads_the_script_once_under_another_name(tmp_path: Path):
    said = run_script(tmp_path / "script.py", JOB + GUARDED.replace("run(job)", "run(job), ranks.run(job)"))
    assert "[(0, '__mp_main__'), (1, '__mp_main__')]" in said, said
    assert said.count("loaded as __main__") == said.count("loaded as __mp_main__") == 1, said  # rank 1 is not shown


@pytest.mark.long
def test_a_module_that_was_started_by_its_name_is_loaded_by_it(tmp_path: Path):
    said = run_script(tmp_path / "started.py", JOB + GUARDED, started_as=("-m", "started"))
    assert "[(0, '__mp_main__'), (1, '__mp_main__')]" in said, said


@pytest.mark.long
def test_a_script_of_which_nothing_is_needed_is_not_loaded_and_needs_no_guard(tmp_path: Path):
    unguarded = (
        "from tests.launch import jobs\nwith pool() as ranks:\n    print(len(ranks.run(jobs.describe)), 'ranks')\n"
    )
    said = run_script(tmp_path / "script.py", JOB + unguarded)
    assert "2 ranks" in said and said.count("loaded as") == 1, said


@pytest.mark.long
def test_what_is_defined_under_the_guard_is_not_found(tmp_path: Path):
    definition = "    def late(context): return 1\n    with pool()"
    said = run_script(
        tmp_path / "script.py", JOB + GUARDED.replace("    with pool()", definition).replace("job", "late")
    )
    assert "ConfigError: a process that loads script.py afresh does not find 'late' in it" in said, said
    assert "define it at the top level" in said


def test_what_an_interactive_session_defines_is_refused(tmp_path: Path):
    said = run_script(tmp_path / "unused.py", "", started_as=("-c", JOB + GUARDED))
    assert "ConfigError: 'job' is defined in a notebook or an interactive session" in said, said
    assert "put it into a file of its own and import it from there" in said


@pytest.mark.parametrize(
    "leaves", ["raise ValueError('no data')", pytest.param("sys.exit('no data')", marks=pytest.mark.long)]
)
def test_a_script_that_cannot_be_loaded_says_why(tmp_path: Path, leaves: str):
    text = f"import sys\nif __name__ != '__main__':\n    {leaves}\n{JOB}{GUARDED}"
    said = run_script(tmp_path / "script.py", text)
    assert "ConfigError: script.py cannot be loaded by another process:" in said and ": no data" in said, said
    assert "only definitions should stand outside" in said


def test_what_a_job_is_given_must_be_picklable() -> None:
    with (
        WorkerPool(1, device="cpu", preload=()) as pool,
        pytest.raises(ConfigError, match="what the run is given cannot be handed to other processes"),
    ):
        pool.run(lambda context: 1)


@pytest.mark.parametrize("call", ["phalanx.train", "Trainer.fit", "phalanx.verify", "WorkerPool"])
def test_nothing_is_started_while_a_script_is_being_loaded(call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    trainer = phalanx.Trainer("gpt2", "synthetic", RunConfig(out=str(tmp_path)))
    calls = {
        "phalanx.train": lambda: phalanx.train("gpt2", "synthetic", out=tmp_path),
        "Trainer.fit": trainer.fit,
        "phalanx.verify": lambda: phalanx.verify(torch.nn.Linear(3, 3)),
        "WorkerPool": lambda: WorkerPool(1).__enter__(),
    }
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=rf"calls {call} whenever it is loaded(.|\n)*under `if __name__ == "):
        calls[call]()


def test_what_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match="cannot find something it was given: No module named 'nowhere'"):
        unpickle(io.BytesIO(b"cnowhere\nThing\n."), MainScript.of_this_process())
