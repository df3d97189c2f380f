"""Watching one job: who is done, who left, who is in trouble, when it is over, and one error that says why.

The first trouble ends the job: everyone is told, gets a moment to say what happened there, and the verdict is drawn.
When one rank fails, the others fail too a moment later because they waited for it; only the first cause is worth a
user's attention.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from phalanx.errors import RankError
from phalanx.launch.abort import read_stack
from phalanx.launch.laggards import Laggards
from phalanx.launch.memory_kills import memory_kills, who_kills
from phalanx.launch.process import Process
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Done, Event, Failed, Job, Left
from phalanx.launch.renewal import Renewal
from phalanx.launch.status_board import RunningClock, SilenceWatch, StatusBoard, StatusView
from phalanx.launch.stillness import LONGEST_LOOK, STILL_SECONDS, Stillness, activity, activity_with_children
from phalanx.launch.trouble import Trouble, loss_words, stalled, verdict

_LAST_WORDS_SECONDS = 2.0  # for ranks to end by themselves when another one failed
_PATIENCE_SECONDS = 1.0  # for a lost rank to be noticed, once others have lost their connections
_COME_SILENCES, _UNHURRIED = 4.0, ("start", "capture", "compile", "finished")  # for ranks to meet after a loss
_WAITING = (
    "fewer ranks are left than min_ranks: they keep what they have and wait for others; Ctrl-C ends the run, saved"
)
_SIGNALLED = "left because of a signal"
_WAITED_FOR = "a call keeps its main thread waiting, though not its heart; a larger silence waits longer"
_FOLLOW_SECONDS = 10.0  # for ranks to follow one that left because of a signal; saving does not count


class Watch:
    """Over the ranks of one job. renewal: what makes the others go on when one is lost, where that was asked for."""

    def __init__(self, processes: Processes, board: StatusBoard, job: Job, renewal: Renewal | None = None) -> None:
        self._processes, self._board, self._job, self._renewal = processes, board, job, renewal
        self._clock = RunningClock()
        self._silence = {number: SilenceWatch(self._clock, job.silence) for number in job.members.members}
        self._looks, self._stillness = RunningClock(LONGEST_LOOK), dict[int, Stillness]()  # by process
        self._laggards = Laggards(self._looks, job.silence, activity_with_children)
        self._memory_kills = memory_kills()
        self._done: set[int] = set()
        self._left: dict[int, Left] = {}
        self._troubles: dict[int, Trouble] = {}
        self._deadline: float | None = None
        self._views: dict[int, StatusView] = {}
        self._waiting: dict[int, float] = {}  # since when processes wait for a generation that nobody has published
        self._fresh: list[int] = []
        self._late: dict[int, float] = {}  # since when processes are not in the generation that was published
        self._not_renewed = ""

    @property
    def members(self) -> tuple[int, ...]:
        """The processes of the job, by rank."""
        return self._job.members.members if self._renewal is None else self._renewal.generation.members

    def take_fresh(self) -> list[int]:
        """The processes that were started since this was last asked."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def hear(self, process: Process, on_event: Callable[[str, Any], None] | None) -> bool:
        """Take what a process says; whether it has hung up."""
        rank, wire = process.rank, process.wire
        for message in wire.take():
            if isinstance(message, Event):
                if on_event is not None:
                    on_event(message.name, message.payload)
            elif self._processes.alive.get(rank) is not process:
                continue  # one that was given up
            elif isinstance(message, Done):
                self._done.add(rank)
                self._board.slots[rank].enter("finished")
            elif isinstance(message, Left | Failed) and self._is_coming(rank):
                assert self._renewal is not None
                how = _SIGNALLED if isinstance(message, Left) else f"failed ({message.message})"
                self._renewal.newcomers.give_up(rank, how)
            elif isinstance(message, Left) and self._is_unready(rank):
                self._add(Trouble(rank, self._view(rank), _SIGNALLED))
            elif isinstance(message, Left):
                self._left[rank] = message
                self._board.slots[rank].enter("finished")
            elif isinstance(message, Failed):
                self._add(Trouble(rank, self._view(rank), failed=message, output=self._output(rank)))
        return wire.closed

    def look(self) -> None:
        """Find those who can no longer say anything."""
        self._processes.note_ended()
        for trouble in self._troubles_seen():
            if self._add(trouble):
                return  # the ranks are others now
        self._look_for_store()
        self._look_for_broken_links()
        self._tend()

    def _look_for_store(self) -> None:
        """Ranks whose store is gone meet at another."""
        if not self._processes.lost_store:
            return
        if not self._troubles and (self._done or self._left):
            return  # who still needs it says so
        if not all(trouble.is_consequence for trouble in self._troubles.values()):
            return  # the job ends for another reason
        if self._renewal is None or self._troubles or not self._renewed([]):
            why = f"\n  the others did not go on without it: {self._not_renewed}" if self._not_renewed else ""
            raise RankError(f"the process that holds the store of the ranks was ended, and the ranks with it{why}")

    def _troubles_seen(self) -> Iterator[Trouble]:
        """Of those that ended or are silent first: that is quickly seen."""
        for rank in self._expected():
            if (trouble := self._trouble_of(rank)) is not None:
                yield trouble
        yield from self._still_ranks().values()
        yield from self._laggards_found()

    def _trouble_of(self, rank: int) -> Trouble | None:
        process = self._processes.alive[rank]
        if process.cause:
            return Trouble(rank, self._view(rank), process.cause)
        if process.code is not None:
            hint = who_kills(self._memory_kills, memory_kills()) if process.code == -signal.SIGKILL else ""
            return Trouble(rank, self._view(rank), process.how_ended, hint, output=self._output(rank))
        if not self._processes.hears_of(rank):
            return None
        suspect = self._job.silence if process.stopped else None
        if (seconds := self._silence[rank].silent_for(self._glance(rank), suspect=suspect)) is None:
            return self._trouble_of_late(rank)
        stack = read_stack(self._job.stack_file(rank))
        return stalled(process, self._view(rank), seconds, self._output(rank), stack)

    def _trouble_of_late(self, rank: int) -> Trouble | None:
        """One that lives, was told that another is lost, and does not come to meet the rest."""
        if self._renewal is None or self._board.slots[rank].entered >= self._renewal.generation.number:
            self._late.pop(rank, None)
            return None
        waited = self._clock.read() - self._late.setdefault(rank, self._clock.read())
        if waited < _COME_SILENCES * self._job.silence or self._glance(rank).phase in _UNHURRIED:
            return None
        cause = f"did not leave what it was at in {waited:.0f} s, to go on with the others,"
        hint = "a call keeps its main thread waiting, though not the others; a larger silence waits longer"
        return Trouble(rank, self._view(rank), cause, hint, output=self._output(rank))

    def _still_ranks(self) -> dict[int, Trouble]:
        """Those that stand still while others do not, where losing one costs little."""
        if self._renewal is None or self._troubles:
            return {}
        expected = {rank: self._processes.alive[rank].pid for rank in self._expected()}
        now = {rank: self._still_seconds(pid, self._glance(rank)) for rank, pid in expected.items()}
        still = {rank: seconds for rank, seconds in now.items() if seconds > STILL_SECONDS}
        if all(seconds > LONGEST_LOOK for seconds in now.values()):
            return {}  # somebody stopped all of them
        return {rank: self._stands_still(rank, seconds) for rank, seconds in still.items()}

    def _still_seconds(self, pid: int, view: StatusView) -> float:
        if pid not in self._stillness:
            self._stillness[pid] = Stillness(self._looks, lambda: activity(pid))
        return self._stillness[pid].seconds(view)

    def _stands_still(self, rank: int, seconds: float) -> Trouble:
        stack = read_stack(self._job.stack_file(rank))
        return stalled(self._processes.alive[rank], self._view(rank), seconds, self._output(rank), stack)

    def _laggards_found(self) -> Iterator[Trouble]:
        """Those for which the others wait for too long, where losing one costs little."""
        if self._renewal is None or self._troubles or self._left or self._done or self._processes.in_doubt:
            return
        slots = {rank: self._board.slots[rank] for rank in self._expected()}
        number = self._renewal.generation.number
        if not all(slot.guarded and slot.entered == number and slot.awaited <= number for slot in slots.values()):
            return  # they meet
        with_pids = {rank: (slot, self._processes.alive[rank].pid) for rank, slot in slots.items()}
        for rank, seconds in self._laggards.found(with_pids).items():
            cause = f"did not go on for {seconds:.0f} s, in which the others waited for it,"
            stack = read_stack(self._job.stack_file(rank))
            yield Trouble(rank, self._view(rank), cause, _WAITED_FOR, output=self._output(rank), stack=stack)

    def _is_unready(self, rank: int) -> bool:
        return self._renewal is not None and rank in self._renewal.unready()

    def _is_coming(self, rank: int) -> bool:
        return self._renewal is not None and self._renewal.newcomers.is_coming(rank)

    def _tend(self) -> None:
        """Processes come to the job, and are taken in once all ranks wait for them."""
        if self._renewal is None or self._troubles or self._left or self._done:
            return
        self._fresh += self._renewal.tend()
        if self._renewal.all_wait():
            self._renewed([])

    def _look_for_broken_links(self) -> None:
        """Ranks that lost each other, and of which none is lost, meet again."""
        if self._renewal is None or self._troubles or self._processes.in_doubt or self._renewal.generation.waits:
            return
        now, newest = self._clock.read(), self._board.generation
        waiting = [rank for rank in self._expected() if self._board.slots[rank].awaited > newest]
        self._waiting = {rank: self._waiting.get(rank, now) for rank in waiting}
        if waiting and now - min(self._waiting.values()) > _PATIENCE_SECONDS:
            names = ", ".join(map(str, sorted(waiting)))
            broke = f"connections between ranks broke (told by {names}), and no rank was lost"
            # Where newcomers are ready, ranks wait for each other to meet them; one that does not come waits elsewhere.
            self._renewed([], *([] if self._board.invited else [broke]))
            self._waiting.clear()

    def stop(self, number: int) -> None:
        """This signal asks the ranks to end, and is passed on to those that hold something: the others follow them.
        Ranks that wait for processes to come go on without these, to save."""
        for rank in [rank for rank in self.members if not self._is_unready(rank)]:
            self._processes.alive[rank].send(number)
        if self._renewal is not None and self._renewal.wind_down() and not self._troubles:
            self._renewed([])

    def over(self) -> bool:
        """Whether nothing more is to be expected."""
        expected = self._expected()
        if self._left and not self._troubles and any(self._glance(rank).phase == "save" for rank in expected):
            self._deadline = None
        elif self._left and self._deadline is None:
            self._deadline = self._clock.read() + _FOLLOW_SECONDS
        return not expected or (self._deadline is not None and self._clock.read() > self._deadline)

    def conclude(self) -> None:
        """Raise what the job ended with, if that is not success."""
        if self._troubles:
            raise verdict(list(self._troubles.values()), self._views, self._not_renewed)
        if self._left:
            code = self._left[min(self._left)].code
            raise KeyboardInterrupt if code is None else SystemExit(code)

    def _add(self, trouble: Trouble) -> bool:
        """Takes note of what ends the job; or, where the others go on, returns True."""
        if not self._troubles and self._survives(trouble):
            return True
        if not self._troubles:
            # Where the others were when it happened; what they show later is how they ended.
            self._views = {rank: self._view(rank) for rank in self.members}
            self._deadline = self._clock.read() + _LAST_WORDS_SECONDS
            self._board.abort()
        self._troubles[trouble.rank] = trouble
        return False

    def _survives(self, trouble: Trouble) -> bool:
        """Whether the job goes on without this process. What a rank refuses is refused; so is what all of them meet.
        One that just came and could not begin, or lost the others before it held anything, is only lost."""
        if self._renewal is None or self._left:
            return False
        is_told = trouble.failed is not None and trouble.failed.error is not None
        is_unready = self._is_unready(trouble.rank)
        if is_told and not is_unready:
            return False
        if self.members[0] in self._done:
            self._done.add(trouble.rank)  # everything is saved and told: nobody needs it any more
            return True
        if self._done:
            self._not_renewed = "others had ended already"
            return False
        words = loss_words(trouble, self.members.index(trouble.rank), is_unready)
        # Whoever lost the others before it held anything is started again with them.
        return self._renewed([] if is_unready and trouble.is_consequence else [trouble.rank], words)

    def _renewed(self, lost: Sequence[int], *words: str) -> bool:
        assert self._renewal is not None
        came = set(self._renewal.newcomers.ready())
        self._not_renewed = self._renewal.renew(lost, words) or ""
        if self._not_renewed:
            return False
        now = self._renewal.generation
        self._late.clear()  # all have as long to come to this one
        if now.waits:
            print(f"{'; '.join(now.lost)}; {_WAITING}", file=sys.stderr, flush=True)
        fresh = [now.members[rank] for rank in now.fresh]
        self._fresh += [number for number in fresh if number not in came]  # newcomers are heard already
        self._silence = {
            number: SilenceWatch(self._clock, self._job.silence) if number in fresh else self._silence[number]
            for number in now.members
        }
        return True

    def _expected(self) -> list[int]:
        ended = self._done | self._left.keys() | self._troubles.keys()
        return [rank for rank in self.members if rank not in ended]

    def _view(self, rank: int) -> Any:
        return self._board.slots[rank].read()

    def _glance(self, rank: int) -> StatusView:
        return self._board.slots[rank].read(with_recent=False)

    def _output(self, rank: int) -> list[str]:
        return self._processes.alive[rank].last_output()
