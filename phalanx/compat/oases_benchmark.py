"""Oases' two benchmark commands: steps of a `BenchmarkLM` under a training schedule, and the profile that its planner
reads.

    python -m phalanx.compat.oases_benchmark overlap --schedule oases --num_l 24 --h 3072 --n 48 --tp 4 --dp 1
    python -m phalanx.compat.oases_benchmark profile --profile_path profile_res.json
    python -m phalanx.compat.oases_benchmark overlap --tp 4 --auto_plan --profile_path profile_res.json

With `--verify` the model is compared with plain PyTorch under the schedule, instead. They are what `overlap_run.sh` and
`sbatch_profile.sh` do there. On one node ranks are started; on several, start `overlap` on each rank with srun or
torchrun.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.compat.oases import SCHEDULES, language_model, plan_of, require_schedule
from phalanx.compat.terapipe import Timed, told
from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.context import local_device
from phalanx.plan.plan import Plan
from phalanx.profile import hardware
from phalanx.profile.store import Store, profiles_path, read_profile
from phalanx.training.trainer import Trainer
from phalanx.verification.verify import verify

PROFILE = "profile_res.json"


def overlap(given: argparse.Namespace) -> int:
    """Seconds of every step, and the plan where it was searched for."""
    if given.verify:
        return _verified(given)
    plan = _auto_plan(given) if given.auto_plan else plan_of(given.schedule or SCHEDULES[-1], given.tp, given.dp, 1)
    if given.profile_path and not given.auto_plan:
        raise ConfigError("--profile_path does nothing without --auto_plan", "add --auto_plan, or leave it out")
    model = language_model(given.num_l, given.h, given.n, given.vocabulary, given.seq_len)
    timed = Timed()
    with tempfile.TemporaryDirectory(prefix="phalanx-oases-") as out:
        config = RunConfig.create(
            plan=plan, ranks=given.tp * given.dp, steps=given.steps, batch_size=given.batch_size,
            seq_len=given.seq_len, dtype=given.dtype, device=given.device, out=f"{out}/run", export=False,
            progress="off", checkpoint_every="never",
        )  # fmt: skip
        Trainer(model, "synthetic", config, callbacks=[timed]).fit()
        if given.auto_plan and timed.seconds:
            print(f"plan {Plan.from_json(Path(out, 'run', 'plan.json').read_text(encoding='utf-8')).shown}")
    if timed.seconds:
        print(timed.mean())
    return 0


def _verified(given: argparse.Namespace) -> int:
    if given.auto_plan:
        raise ConfigError("--verify compares a schedule, and --auto_plan searches for one", "leave one of them out")
    plan = plan_of(given.schedule or SCHEDULES[-1], given.tp, given.dp, 1)
    model = language_model(given.num_l, given.h, given.n, given.vocabulary, given.seq_len)
    return told(verify(model, plan, tokens=given.seq_len, device=given.device))


def _auto_plan(given: argparse.Namespace) -> str:
    """What is left to the planner, which finds the measurements where `phalanx profile` keeps them."""
    if given.schedule is not None:
        require_schedule(given.schedule)
    if given.profile_path is not None:
        rows, ranks = read_profile(given.profile_path), given.tp * given.dp
        here = torch.device(local_device(given.device, 0))
        name = hardware.device_name(here)
        if hardware.rates_of(rows, name, given.dtype, hardware.spread_here(here, ranks)) is None:
            raise ConfigError(
                f"--profile_path {given.profile_path} holds nothing of {name} in {given.dtype} with {ranks} ranks",
                "measure here: python -m phalanx.compat.oases_benchmark profile --profile_path "
                f"{given.profile_path} --ranks {ranks} --dtype {given.dtype}",
            )
        Store(profiles_path(), _warn).take(rows)
    return "auto" if given.schedule is None else f"auto,tp={given.tp},dp={given.dp},overlap={given.schedule}"


def profile(given: argparse.Namespace) -> int:
    """Measures the devices that are here, and writes what is known of them."""
    here = torch.device(local_device(given.device, 0))
    ranks = given.ranks or (torch.cuda.device_count() if here.type == "cuda" else 1)
    store, name = Store(profiles_path(), _warn), hardware.device_name(here)
    hardware.measure(store, given.device, given.dtype, ranks)
    rows = [row for row in store.rows() if row.key.get("device") == name]
    store.export(given.profile_path, rows)
    print(f"{len(rows)} measurements of {name} written to {given.profile_path}")
    return 0


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m phalanx.compat.oases_benchmark", description="Oases' benchmarks.")
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("overlap", help="steps of a model under a training schedule")
    runs.add_argument(
        "--schedule", help=f"{', '.join(SCHEDULES)} (default: {SCHEDULES[-1]}, or what --auto_plan finds)"
    )
    sizes = {"num_l": 24, "h": 3072, "n": 48, "tp": 1, "dp": 1, "batch_size": 8, "seq_len": 1024, "steps": 10}
    for name, default in {**sizes, "vocabulary": 50304}.items():
        runs.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    runs.add_argument("--auto_plan", action="store_true", help="search for degrees, overlap and the rest of the plan")
    runs.add_argument("--profile_path", type=Path, help="with --auto_plan: what `profile` measured")
    runs.add_argument("--verify", action="store_true", help="compare with plain PyTorch in float64, instead")
    runs.set_defaults(does=overlap)
    measures = commands.add_parser("profile", help="measure the devices that are here")
    measures.add_argument("--profile_path", type=Path, default=Path(PROFILE), help=f"default: {PROFILE}")
    measures.add_argument("--ranks", type=int, help="that compute at once (default: the CUDA devices, else 1)")
    measures.set_defaults(does=profile)
    for command in (runs, measures):
        command.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
        command.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        return given.does(given)
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
