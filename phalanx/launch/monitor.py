"""How ranks without a supervisor notice each other's failure: signs of life and one notice, both in the store.

Every rank shows what it does once a second and watches its left neighbour. The first notice of a failure is the one
that counts; who reads it sets its abort event, and leaves the process if the main thread does not. On a slow link signs
of life come late; silence is therefore counted in looks (RunningClock), which then come late as well. Looks from where
the store is do not: so that they find life, ranks show it beside their own looks and not between them. A look may wait
long for a slow link, but not for a store that stands still (Host).
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.errors import LinkError, PhalanxError
from phalanx.launch.abort import Late, StackFile, background_thread, read_stack, within
from phalanx.launch.context import RankContext
from phalanx.launch.status_board import LONG_SILENCE, SILENCE, RunningClock, SilenceWatch, StatusView
from phalanx.launch.store import ForgedValue, JobStore
from phalanx.records import read_record

_TICK_SECONDS = 1.0
_STORE_SECONDS = 5.0  # for the store to answer who is about to leave
_SUSPECT_SECONDS = 5.0  # that a neighbour may be silent once a rank has lost a connection
_SEARCH_SECONDS = 9.0  # for the others to find out who was lost: longer than that
_PROMPT_SECONDS = 1.0  # in which a connection is taken over a link that is not slow
_NO_STORE = "the store of this job does not answer: rank 0 or its launcher is gone or stands still"
_LEAVE_SECONDS = 8.0  # for the main thread to come back after the abort event was set
_ANEW_SECONDS = 600.0  # the same, where ranks begin anew: a compiler may be at work


@dataclass(frozen=True)
class Notice:
    """Why the job is over. `lost`: the rank is gone or silent, it did not say so itself. `again`: what ranks have to
    know that begin anew after it; "" where they do not."""

    rank: int
    message: str
    hint: str = ""
    lost: bool = False
    again: str = ""


@dataclass(frozen=True)
class Life:
    """A rank's sign of life: what it does, and where the file is that says where its threads stand."""

    view: StatusView
    host: str
    stack: str

    @classmethod
    def from_json(cls, text: str | bytes) -> Life:
        record = json.loads(text)
        return cls(StatusView(**record["view"]), record["host"], record["stack"])


class Host:
    """Whether the process that hosts the store stands still while an answer of it is awaited, in a `with` statement.

    Where it runs, connections are taken also for a process that stands still, over the link that the answer comes by.
    As long as they are taken promptly the link does not explain that there is none. What was lost on a link before that
    is sent again after at most as long as it has been missed, so that much more is allowed.
    """

    def __init__(self, address: tuple[str, int] | None, silence: float) -> None:
        self._address, self._silence, self._clock = address, silence, RunningClock()
        self._began = self._since = self._clock.read()  # since: when connections began to be taken promptly
        self._prompt, self._ended = False, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def stands_still(self) -> bool:
        """To be asked every moment."""
        now = self._clock.read()
        if self._address is None or now - self._began < _TICK_SECONDS:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._connect, name="phalanx-connect", daemon=True)
            self._thread.start()
        if not self._prompt:
            self._since = now
        return now - self._since > self._silence + (self._since - self._began)

    def _connect(self) -> None:
        assert self._address is not None
        while not self._ended.wait(_PROMPT_SECONDS / 2):
            try:
                with socket.create_connection(self._address, _PROMPT_SECONDS):
                    self._prompt = True
            except OSError:
                self._prompt = False


class Monitor:
    """Runs beside one rank's job, in a `with` statement."""

    def __init__(self, context: RankContext, silence: float = SILENCE) -> None:
        # Connections of its own: the main thread's may be busy with a long wait, and a look with several short ones.
        self._context = context
        self._store: JobStore = context.store.clone()
        self._shows: JobStore = context.store.clone()
        self._left, self._silence = (context.rank - 1) % context.world, SilenceWatch(RunningClock(), silence)
        self._host, self._host_silence = context.store.address, silence
        descriptor, self._stack_path = tempfile.mkstemp(prefix="phalanx-stack-")
        os.close(descriptor)
        self._stack = StackFile(Path(self._stack_path), 0.75 * silence)
        self._notice: Notice | None = None
        self._finished = False
        self._ended = threading.Event()
        self._thread = background_thread(self._run, "phalanx-monitor")
        self._heart = background_thread(self._beat, "phalanx-heart")

    def __enter__(self) -> Monitor:
        self._safely(self._show_life)
        self._thread.start()
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(_STORE_SECONDS + 1.0)
        self._stack.close()
        Path(self._stack_path).unlink(missing_ok=True)

    def finish(self) -> None:
        """This rank has done its part; its silence from now on means nothing."""
        self._context.slot.enter("finished")
        self._finished = True
        self._safely(self._show_life)
        self._safely(lambda: self._store.set(f"finished/{self._context.rank}", ""))

    def wait_for_all(self) -> bool:
        """Wait until every rank has finished (the store may live here); False when one failed instead."""
        while self._context.abort.reason is None:
            if self._safely(lambda: self._num_reports("finished")) == self._context.world:
                return True
            time.sleep(0.05)
        return False

    def heard(self) -> Notice:
        assert self._notice is not None
        return self._notice

    def tell(self, error: Exception) -> Notice:
        """Tell the others why this rank cannot go on, unless one told first; the notice that counts."""
        if isinstance(error, LinkError):
            self._safely(lambda: self._store.set("search", "yes"))
            self._context.abort.wait(_SEARCH_SECONDS)
        notice = self._post(_notice(self._context, error))
        self._linger(self._context.world - notice.lost)
        return notice

    def _post(self, notice: Notice) -> Notice:
        if self._notice is not None:
            return self._notice
        text = json.dumps(dataclasses.asdict(notice))
        found = self._safely(lambda: self._store.set_once("notice", text))
        self._notice = read_record(Notice, found) if found else notice
        return self._notice

    def _linger(self, num_listeners: int) -> None:
        """Launchers kill the others as soon as one rank leaves: let them read the notice, and rank 0 print it."""
        self._safely(lambda: self._store.set(f"heard/{self._context.rank}", ""))
        deadline = time.monotonic() + 2 * _TICK_SECONDS + 1.0
        while time.monotonic() < deadline:
            count = self._safely(lambda: self._num_reports("heard"))
            if count is None or count >= num_listeners:
                break
            time.sleep(0.05)
        if self._context.rank != 0:
            time.sleep(1.0)

    def _beat(self) -> None:
        while not self._ended.wait(_TICK_SECONDS) and not self._finished:
            try:
                self._show_life()
            except RuntimeError:  # the store is gone, which the next look finds out
                return

    def _run(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            try:
                with Host(self._host, self._host_silence) as host:
                    notice = within(LONG_SILENCE, self._look, unless=host.stands_still)
            except (Late, RuntimeError):
                notice = Notice(0, _NO_STORE, lost=True)
            if notice is not None and not self._ended.is_set():
                self._leave(notice)
                return

    def _look(self) -> Notice | None:
        if told := self._read("notice"):
            return read_record(Notice, told)
        shown = self._read(f"life/{self._left}") if self._left != self._context.rank else None
        if shown is None:
            return None
        life = read_record(Life, shown)
        suspect = _SUSPECT_SECONDS if self._store.check(["search"]) else None
        seconds = self._silence.silent_for(life.view, suspect=suspect)
        if seconds is None or life.view.phase == "finished":
            return None
        return self._post(Notice(self._left, self._found_silent(life, seconds), lost=True))

    def _found_silent(self, life: Life, seconds: float) -> str:
        view, here = life.view, self._context.slot.read()
        name = f"rank {self._left} ({view.place})" if view.place else f"rank {self._left}"
        # Signs of life are a moment old: where the others are by then shows how far it may have come since.
        message = f"{name} stopped answering for {seconds:.0f} s {view.where()}"
        message += f" (seen from {self._context.name} {here.where()})"
        if life.host != socket.gethostname():
            return f"{message}\n  if it still runs, {life.stack} on {life.host} says where its threads stand"
        lines = read_stack(Path(life.stack))
        return "\n    ".join([f"{message}\n  where it stands, the innermost call first:", *lines]) if lines else message

    def _num_reports(self, kind: str) -> int:
        return sum(self._read(f"{kind}/{rank}") is not None for rank in range(self._context.world))

    def _read(self, key: str) -> str | None:
        """What a rank left under a key; what a stranger left there is nothing."""
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except ForgedValue:
            return None

    def _show_life(self) -> None:
        self._context.slot.beat()
        self._stack.beat()
        life = Life(self._context.slot.read(), socket.gethostname(), self._stack_path)
        self._shows.set(f"life/{self._context.rank}", json.dumps(dataclasses.asdict(life)))

    def _leave(self, notice: Notice) -> None:
        self._notice = notice
        self._context.abort.set(notice.message)
        if self._ended.wait(_ANEW_SECONDS if notice.again else _LEAVE_SECONDS):
            return
        if self._context.rank == 0 or (notice.rank == 0 and notice.lost):
            sys.stderr.write(f"error: {notice.message}\n" + (f"  → {notice.hint}\n" if notice.hint else ""))
            sys.stderr.flush()
        Path(self._stack_path).unlink(missing_ok=True)
        os._exit(1)

    def _safely(self, call: Callable[[], Any]) -> Any:
        """The store's answer, None when it gives none."""
        try:
            return within(_STORE_SECONDS, call)
        except (Late, RuntimeError):
            return None


def _notice(context: RankContext, error: Exception) -> Notice:
    message = error.message if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, PhalanxError) else "PHALANX_DEBUG=1 shows the traceback"
    if not isinstance(error, LinkError):
        message = f"{context.name} failed {context.slot.read().where()}: {message}"
    return Notice(context.rank, message, hint, again=error.again if isinstance(error, PhalanxError) else "")
