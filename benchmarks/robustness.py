"""Every family of transformers, as a tiny model made from its configuration class, under every kind of plan.

    python benchmarks/robustness.py [--families llama bart] [--plans tp=2] [--jobs 8] [--limit 240] [--out FILE]

Each case is `phalanx verify` in float64: loss, gradients and updated parameters of two steps against the plain model.
Results are kept in FILE after each case; what stands there is not tried again, so that a run that was ended goes on
where it was (without `--again`, which begins anew). A case that ended its process is a crash.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import robustness_workers as workers
from robustness_families import FAMILIES, MISSING, OWN, PADDED

PLANS = ("mb=2", "pp=2", "tp=2", "dp=2,zero=2", "slices=2")
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "robustness.json"
LIMIT = 240  # seconds
WRONG = "disagrees with the model"


class TooLong(BaseException):
    """A case took longer than it may."""


@dataclass
class Helpers:
    """The plain process and the ranks that serve all cases, made when they are first needed."""

    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    both: tuple[Any, Any] | None = None

    def get(self) -> tuple[Any, Any]:
        from phalanx.launch.worker_pool import WorkerPool
        from phalanx.verification.plain_side import PlainProcess

        if self.both is None:
            self.both = self.stack.enter_context(PlainProcess()), self.stack.enter_context(WorkerPool(2, device="cpu"))
        return self.both

    def close(self) -> None:
        """What failed in one case must not touch the next."""
        with contextlib.suppress(Exception):
            self.stack.close()
        self.both = None


def config_of(family: str) -> Any:
    """The smallest configuration of a family: its class's own, with what it leaves open, shrunk."""
    from transformers import AutoConfig

    from phalanx.model.zoo.configure import tiny

    config = AutoConfig.for_model(family)
    for name, value in MISSING.items():
        if name in vars(config) and getattr(config, name) is None:
            setattr(config, name, value)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.get_text_config(decoder=True).decoder_start_token_id = 0
    for name, value in OWN.get(family, {}).items():
        setattr(config, name, value)
    return tiny(config)


def share(captured: Any, batch: dict[str, Any]) -> float:
    """Of the layers' parameters, which have a number in their names, how much two ranks divide between them."""
    import torch

    from phalanx.model.shard import report as split
    from phalanx.plan.plan import Plan

    total = divided = 0
    for block in split.report(captured, Plan(tp=2), torch.float64, captured.dims(batch)).blocks:
        for weight in block.weights:
            name = f"{block.names[0]}.{weight.name}"
            name = name if name in captured.shapes else weight.name
            if not any(part.isdigit() for part in name.split(".")):
                continue
            size = len(block.names) * prod(captured.shapes[name])
            total += size
            divided += 0 if weight.how in ("whole", "samples") else size
    return divided / max(total, 1)


def outcome(family: str, task: str, plan: str, limit: int, helpers: Helpers) -> dict[str, Any]:
    """The result of one case."""
    row: dict[str, Any] = {"family": family, "task": task, "plan": plan}
    try:
        with _at_most(limit):
            return row | _verified(family, task, plan, helpers)
    except TooLong:
        row |= {"outcome": "crash", "reason": f"no end within {limit} s"}
    except Exception as error:
        row |= _of_error(error)
    if row["outcome"] == "crash":
        helpers.close()
    return row


def _verified(family: str, task: str, plan: str, helpers: Helpers) -> dict[str, Any]:
    from phalanx.verification.case import Case
    from phalanx.verification.plan_side import prepare
    from phalanx.verification.verify import verify_case

    case = Case(config_of(family), plan, task=task, dropout=0.0, batch=4, padding=family in PADDED)
    found = verify_case(case, *helpers.get())
    if not found.ok:
        return _not_exact(case, found.failures[0])
    if not plan.startswith("tp="):
        return {"outcome": "exact"}
    spec, captured, _ = prepare(case)
    return {"outcome": "exact", "share": share(captured, next(case.batches(spec))[1])}


def _of_error(error: Exception) -> dict[str, str]:
    """What is said to a user is a refusal; what a rank ends with, and what nobody foresaw, a crash."""
    from phalanx.errors import PhalanxError, RankError

    if isinstance(error, RankError):
        return {"outcome": "crash", "reason": shortened(error.message)}
    if isinstance(error, PhalanxError):
        return {"outcome": "wrong" if WRONG in error.message else "refused", "reason": shortened(error.message)}
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return {"outcome": "crash", "reason": shortened(f"{type(error).__name__}: {error} ({place})")}


def _not_exact(case: Any, failure: str) -> dict[str, str]:
    """What training would say of it: a backward of a model's own, which no graph of the forward has, is refused there.
    Every other difference is wrong."""
    from phalanx.errors import CaptureError
    from phalanx.model.capture import capture

    spec = case.spec()
    try:
        capture(spec, case.task_of(spec).inputs(spec.config), dtype=case.torch_dtype, dropout=0.0, use_cache=False)
    except CaptureError as error:
        if "autograd.Function" in error.hint:
            return {"outcome": "refused", "reason": shortened(f"{error.message}: {error.hint}")}
    return {"outcome": "wrong", "reason": failure}


def shortened(reason: str) -> str:
    """One line, with paths below the installed packages."""
    return re.sub(r"/\S*?/site-packages/", "", " ".join(reason.split()))


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []


def absent() -> set[str]:
    """Families that the transformers that is installed does not have."""
    from transformers import CONFIG_MAPPING

    return {family for family in FAMILIES if family not in CONFIG_MAPPING}


def cases(families: Sequence[str], plans: Sequence[str], limit: int) -> list[dict[str, Any]]:
    return [
        {"family": family, "task": FAMILIES[family], "plan": plan, "limit": limit}
        for family in families for plan in plans
        if FAMILIES[family] == "causal-lm" or not plan.startswith("slices")
    ]  # fmt: skip


def in_order(results: Mapping[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """As the families and plans stand in their tables, whatever was done first."""
    return [results[key] for key in ((family, plan) for family in FAMILIES for plan in PLANS) if key in results]


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.set_defaults(out=str(RESULTS))
    parser.add_argument("--families", nargs="+", metavar="FAMILY", choices=FAMILIES, help="these instead of all")
    parser.add_argument("--plans", nargs="+", metavar="PLAN", choices=PLANS, help="these instead of all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases beside each other, of 4 processes each")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="SECONDS", help="for one case")
    parser.add_argument("--again", action="store_true", help="forget first what stands in FILE of these cases")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no case after that; call again to go on")
    chosen = parser.parse_args()
    results = {(row["family"], row["plan"]): row for row in read(Path(chosen.out))}
    asked = cases(chosen.families or list(FAMILIES), chosen.plans or PLANS, chosen.limit)
    if chosen.again:
        for case in asked:
            results.pop((case["family"], case["plan"]), None)
    missing = absent()
    if missing:
        print("not in this transformers:", ", ".join(sorted(missing)), flush=True)
    families: dict[str, list[dict[str, Any]]] = {}
    for case in asked:
        if case["family"] not in missing and (case["family"], case["plan"]) not in results:
            families.setdefault(case["family"], []).append(case)
    stop, last = threading.Event(), time.monotonic() + chosen.seconds
    for row in workers.results(families, chosen.jobs, stop):
        results[row["family"], row["plan"]] = row | {"date": time.strftime("%Y-%m-%d")}
        report.write(Path(chosen.out), "robustness", {"limit": chosen.limit}, in_order(results))
        print(row["family"], row["plan"], row["outcome"], row.get("reason", "")[:200], flush=True)
        if time.monotonic() > last:
            stop.set()


if __name__ == "__main__":
    main()
