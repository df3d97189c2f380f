"""Processes that try the cases of `robustness.py` beside each other, one family at a time each.

A worker reads cases from its input and answers each with its result, as JSON in lines. What ends a worker, or keeps it
longer than its own alarm allows, is a result like any other; the next case gets a fresh one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

Case = dict[str, Any]  # family, task, plan, limit
Row = dict[str, Any]

ROOT = Path(__file__).parent.parent
UNFINISHED = "the process ended"
GRACE = 60.0  # seconds beyond its limit until a case that its alarm does not end takes its process with it
_END = object()


class Worker:
    """A process that is started for the first case it gets, and again after one that ended it."""

    def __init__(self, command: Sequence[str] = (sys.executable, str(Path(__file__)))) -> None:
        self._command, self._process = command, None

    def result(self, case: Case) -> Row:
        process = self._process = self._process or self._start()
        end = threading.Timer(case["limit"] + GRACE, process.kill)
        end.start()
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            end.cancel()
        if answer:
            return json.loads(answer)
        self.close()
        return {name: case[name] for name in ("family", "task", "plan")} | {"outcome": "crash", "reason": UNFINISHED}

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )  # fmt: skip

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):  # what was not sent to one that is gone
                process.stdin.close()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def results(families: Mapping[str, Sequence[Case]], jobs: int, stop: threading.Event) -> Iterator[Row]:
    """Of all cases, as they come; no case begins once `stop` is set."""
    waiting: queue.SimpleQueue[Sequence[Case]] = queue.SimpleQueue()
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for cases in families.values():
        waiting.put(cases)
    threads = [threading.Thread(target=_work, args=(waiting, found, stop), daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    left = jobs
    while left:
        row = found.get()
        if row is _END:
            left -= 1
        else:
            yield row


def _work(waiting: queue.SimpleQueue[Sequence[Case]], found: queue.SimpleQueue[Any], stop: threading.Event) -> None:
    worker = Worker()
    try:
        while not stop.is_set():
            for case in waiting.get_nowait():
                if not stop.is_set():
                    found.put(worker.result(case))
    except queue.Empty:
        pass
    finally:
        worker.close()
        found.put(_END)


def main() -> None:
    import robustness

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one ends it, by closing its input
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    logging.disable(logging.WARNING)
    helpers = robustness.Helpers()
    for line in sys.stdin:
        print(json.dumps(robustness.outcome(**json.loads(line), helpers=helpers)), file=answers, flush=True)
    helpers.close()


if __name__ == "__main__":
    main()
