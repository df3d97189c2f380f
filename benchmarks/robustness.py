"""Every family of transformers, as a tiny model made from its configuration class, under every kind of plan.

    python benchmarks/robustness.py [--families llama bart] [--plans tp=2] [--limit 240] [--out FILE]

Each case is `phalanx verify` in float64: loss, gradients and updated parameters of two steps against the plain model.
Results are kept in FILE after each case; what stands there is not tried again, so that a run that was ended goes on
where it was. A case that ended the process itself is a crash.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf, prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from robustness_families import FAMILIES, MISSING, OWN, PADDED

PLANS = ("mb=2", "pp=2", "tp=2", "dp=2,zero=2", "slices=2")
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "robustness.json"
LIMIT = 240  # seconds
WRONG = "disagrees with the model"
UNFINISHED = "the process ended"


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


def outcomes(family: str, task: str, plans: list[str], limit: int, helpers: Helpers) -> Iterator[dict[str, Any]]:
    """One result per plan, each beforehand as the crash that it is if nothing follows."""
    from phalanx.errors import PhalanxError, RankError
    from phalanx.verification.case import Case
    from phalanx.verification.plan_side import prepare
    from phalanx.verification.verify import verify_case

    config: Any = None
    for plan in plans:
        row: dict[str, Any] = {"family": family, "task": task, "plan": plan}
        yield {**row, "outcome": "crash", "reason": UNFINISHED}
        try:
            with _at_most(limit):
                config = config or config_of(family)
                case = Case(config, plan, task=task, dropout=0.0, batch=4, padding=family in PADDED)
                found = verify_case(case, *helpers.get())
                row |= {"outcome": "exact"} if found.ok else _not_exact(case, found.failures[0])
                if found.ok and plan.startswith("tp="):
                    spec, captured, _ = prepare(case)
                    row["share"] = share(captured, next(case.batches(spec))[1])
        except RankError as error:
            row |= {"outcome": "crash", "reason": shortened(error.message)}
            helpers.close()
        except PhalanxError as error:
            row |= {"outcome": "wrong" if WRONG in error.message else "refused", "reason": shortened(error.message)}
        except TooLong:
            row |= {"outcome": "crash", "reason": f"no end within {limit} s"}
            helpers.close()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            row |= {"outcome": "crash", "reason": shortened(f"{type(error).__name__}: {error} ({place})")}
            helpers.close()
        yield row


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


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.set_defaults(out=str(RESULTS))
    parser.add_argument("--families", nargs="+", metavar="FAMILY", choices=FAMILIES, help="these instead of all")
    parser.add_argument("--plans", nargs="+", metavar="PLAN", choices=PLANS, help="these instead of all")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="SECONDS", help="for one case")
    parser.add_argument("--again", action="store_true", help="try what was tried before, too")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no case after that; call again to go on")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    results = {(row["family"], row["plan"]): row for row in read(Path(chosen.out))}
    helpers, last = Helpers(), time.monotonic() + chosen.seconds
    for family in chosen.families or FAMILIES:
        task = FAMILIES[family]
        plans = [plan for plan in chosen.plans or PLANS if task == "causal-lm" or not plan.startswith("slices")]
        plans = [plan for plan in plans if chosen.again or (family, plan) not in results]
        for row in outcomes(family, task, plans, chosen.limit, helpers):
            results[family, row["plan"]] = row
            report.write(Path(chosen.out), "robustness", {"limit": chosen.limit}, [*results.values()])
            if row.get("reason") != UNFINISHED:
                print(family, row["plan"], row["outcome"], row.get("reason", "")[:200], flush=True)
                if time.monotonic() > last:
                    break
        if time.monotonic() > last:
            break
    helpers.close()


if __name__ == "__main__":
    main()
