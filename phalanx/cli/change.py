"""`phalanx change`: another plan for a run that is under way, from another terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import ConfigError, PlanError

_LOOK_SECONDS = 1.0
_LATER = "a run that has ended goes on under any plan with phalanx train --resume auto --plan PLAN"


def register(app: typer.Typer) -> None:
    app.command("change")(change)


def change(
    run: Annotated[Path, typer.Argument(help="folder of a run that is training now")],
    plan: Annotated[str, typer.Argument(help="plan as text, e.g. pp=2,mb=4, or a .json or .yaml file of it")],
    wait: Annotated[float, typer.Option(help="seconds to wait for the answer", min=0)] = 600.0,
) -> None:
    """Change the plan of a run that is training, between two of its steps and without stopping it."""
    from phalanx.observe.format import bytes_text, seconds_text
    from phalanx.observe.requests import ask, take_back, wait_for
    from phalanx.state.lock import Holder, read_holder
    from phalanx.written import plan_text

    def is_training() -> bool:
        holder = read_holder(run)
        return holder is not None and not holder.is_gone(Holder.here())

    if not is_training():
        raise ConfigError(f"no run is training in {run}", f"name the folder of one that is (its --out); {_LATER}")
    request, deadline = ask(run, plan_text(plan)), time.monotonic() + wait
    answer = wait_for(run, request, min(_LOOK_SECONDS, wait))
    while answer is None and is_training() and time.monotonic() < deadline:
        answer = wait_for(run, request, _LOOK_SECONDS)
    if answer is None:
        taken_back = take_back(run, request)
        if not is_training():
            raise ConfigError(f"the run in {run} ended before it came to this request", _LATER)
        said = "and it was taken back" if taken_back else "and it is being carried out"
        raise ConfigError(
            f"the run in {run} has not answered for {wait:g} s, {said}",
            "a step, or compiling, may take longer: give more time (--wait)",
        )
    if answer.refused:
        raise PlanError(f"the run goes on as it was: {answer.refused}", answer.hint)
    typer.echo(
        f"changed before step {answer.step} to {answer.plan}: {bytes_text(answer.bytes)} moved, "
        f"a pause of {seconds_text(answer.seconds)}"
    )
