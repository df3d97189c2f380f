"""What a run of the soak is held against: the run of one process that nothing happened to, and what it may leave
behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.observe.runlog import read_log
from phalanx.state import checkpoint

LOG = "log-rank0.jsonl"
_PARENT, _SESSION = 1, 3  # where they stand in /proc/…/stat, after the name
_BITS, _STEP = 1e-7, 1e-9  # how far parameters and losses may differ: other plans add in another order


class Followed:
    """The log of a run, read as it grows."""

    def __init__(self, out: Path) -> None:
        self._path, self._at, self.records = out / LOG, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._at += len(whole) + 1
                self.records += [json.loads(line) for line in whole.splitlines() if line]
        return self.records

    @property
    def num_losses(self) -> int:
        return sum(record["kind"] == "loss" for record in self.read())

    def num_steps(self, since: float) -> int:
        """That were told of since a moment, and since the newest loss or start."""
        count = 0
        for record in reversed(self.read()):
            if record["kind"] in ("loss", "start") or record["time"] < since:
                break
            count += record["kind"] == "step"
        return count


def ledger(folder: Path) -> list[tuple[int, int, float]]:
    """Step, samples consumed and loss of every step that counts."""
    found: list[tuple[int, int, float]] = []
    for record in read_log(folder / LOG):
        if record["kind"] in ("loss", "start") and "step" in record:
            found = [each for each in found if each[0] < record["step"]]
        elif record["kind"] == "step":
            found = [each for each in found if each[0] != record["step"]]
            found.append((record["step"], record["samples"], record["loss"]))
    return found


def differences(out: Path, expected: Path) -> list[str]:
    """In words: samples, losses or parameters that are not those of the run that nothing happened to."""
    mine, theirs = ledger(out), ledger(expected)
    if [each[:2] for each in mine] != [each[:2] for each in theirs]:
        return [f"the log tells of steps {[each[0] for each in mine]} and samples {[each[1] for each in mine]}"]
    for one, other in zip(mine, theirs, strict=True):
        if not math.isclose(one[2], other[2], rel_tol=_STEP):
            return [f"the loss of step {one[0]} is {one[2]!r} instead of {other[2]!r}"]
    found, wanted = _stored(out), _stored(expected)
    if found.keys() != wanted.keys():
        return [f"other tensors were saved: {sorted(found.keys() ^ wanted.keys())[:3]}"]
    wrong = [n for n in wanted if not torch.allclose(found[n], wanted[n], rtol=_BITS, atol=1e-10)]
    return [f"{len(wrong)} tensors differ, such as {wrong[0]}"] if wrong else []


def _stored(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None, f"{folder} has no checkpoint"
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names()}


def made_too_often(records: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Iterator[str]:
    """records: all of a log. From ranks that are left, and mirrors, nothing is made again; from copies as many steps as
    lie between them. A checkpoint is complete when the one after the next is begun, so that less than two distances
    between them are made again, and one more for each that the disk refused or that was given up with a loss."""
    every, mirrors = options["checkpoint_every"], options.get("mirror_every", 1)
    for place, loss in enumerate(records):
        if loss["kind"] != "loss":
            continue
        source, repeated = loss["source"], loss["repeated"]
        if source.startswith("the ranks"):
            most = 0
        elif source.startswith("copies") and isinstance(mirrors, int):
            most = mirrors
        else:  # also copies that are as far apart as they had better be: an older one than the checkpoint is not used
            most = every * (2 + _num_given_up(records[:place], _step_of(source)))
        if repeated > most:
            yield f"{repeated} steps were made again from {source} (at most {most})"


def _step_of(source: str) -> int:
    """After which copies or a checkpoint were made; 0 for the beginning."""
    found = re.search(r"(?:copies of step |step-)(\d+)", source)
    return int(found[1]) if found else 0


def _num_given_up(records: Sequence[Mapping[str, Any]], step: int) -> int:
    """Since a step was told of: losses, refusals and new attempts, each of which may have cost a checkpoint."""
    since = max((n for n, it in enumerate(records) if it["kind"] == "step" and it["step"] == step), default=0)
    return sum(record["kind"] in ("loss", "not_saved", "start") for record in records[since:])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    own = _with(_PARENT, pid)
    return [*own, *(each for child in own for each in descendants(child))]


def session_of(pid: int) -> set[int]:
    """The processes of the session that one leads, whoever is their parent by now."""
    return set(_with(_SESSION, pid))


def _with(place: int, value: int) -> list[int]:
    """Processes that have a number at a place of what the kernel says of them."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[place]) == value:
                found.append(int(path.parent.name))
    return found


def end_with_children(pid: int) -> None:
    """A process of ours, and those that it started."""
    for each in (*descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
