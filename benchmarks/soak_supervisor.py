"""Runs of the soak whose supervisor, the process that started them, is killed again and again: ranks finish their step,
save and end, and the run is resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from soak_checks import Followed, descendants, ledger, runs
from soak_job import Samples, Struck, config

from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

if TYPE_CHECKING:
    from soak_settings import Setting

KINDS = ("supervisor",)
_WHY = "the supervisor was killed"
_START, _END = 180.0, 120.0  # seconds


def run(setting: Setting, out: Path) -> tuple[list[Struck], list[str]]:
    struck: list[Struck] = []
    for fault in setting.faults:
        supervisor, log = _start(setting, out), Followed(out)
        began, problem = time.time(), ""
        while supervisor.poll() is None and log.num_steps(began) < fault.gap and not problem:
            problem = f"no step in {_START:.0f} s" if time.time() - began > _START else ""
            time.sleep(0.005)
        if supervisor.poll() is None:
            time.sleep(fault.delay)
            step = max((record["step"] for record in log.read() if record["kind"] == "step"), default=0)
            struck.append(Struck(fault.kind, step, setting.world, time.time(), _WHY))
            problem = problem or _killed(supervisor, out)
        if problem or supervisor.returncode == 0:
            return struck, [problem] if problem else []
    last = _start(setting, out)
    code = last.wait(_START)
    return struck, [f"the last attempt left with exit code {code}"] if code else []


def _start(setting: Setting, out: Path) -> subprocess.Popen[bytes]:
    options = {"plan": setting.plan, "on_loss": setting.on_loss, **setting.options}
    asked = [sys.executable, __file__, str(out), str(setting.world), json.dumps(options)]
    return subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _killed(supervisor: subprocess.Popen[bytes], out: Path) -> str:
    """Kills it; what is wrong with what the others did then."""
    others = descendants(supervisor.pid)
    supervisor.kill()
    supervisor.wait()
    deadline = time.time() + _END
    while (left := [pid for pid in others if runs(pid)]) and time.time() < deadline:
        time.sleep(0.02)
    if left:
        return f"{len(left)} processes run on without the one that started them"
    saved, told = checkpoint.latest(out / "checkpoints"), [step for step, _, _ in ledger(out)]
    if told and (saved is None or saved.name != f"step-{told[-1]:08}"):
        return f"step {told[-1]} was made, and what the ranks saved without their supervisor is {saved}"
    return ""


def main() -> None:
    """One attempt, whose supervisor this process is."""
    out, world, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])

    given: Any = config(out, resume="auto", **options)
    job = Trainer("gpt2", Samples(), given).job
    with WorkerPool(world, threads_per_rank=1, device="cpu", silence=3.0) as pool, pack(job) as payload:
        pool.run(fit_on_rank, payload, world=world, on_loss=given.on_loss)


if __name__ == "__main__":
    main()
