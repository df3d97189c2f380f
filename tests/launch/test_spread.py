"""Supervisors of two nodes, here in one process: what the first one orders, and what becomes of one that is silent."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import BeginAnew, ConfigError, LateError, LinkError, PhalanxError
from phalanx.launch.follower import Follower, Survival
from phalanx.launch.lifeline import Lifeline
from phalanx.launch.membership import Generation
from phalanx.launch.rank_main import Done, Failed, Left
from phalanx.launch.remote import SpreadProcesses
from phalanx.launch.renewal import OnLoss, Renewal
from phalanx.launch.spread import Orders, Spread, orders_key, outcome_of, send, told
from phalanx.launch.status_board import SilenceWatch, StatusBoard
from phalanx.launch.store import JobStore, host_store
from phalanx.launch.succession import Succession, newest_claim
from phalanx.launch.trouble import Trouble
from phalanx.launch.watch import Watch
from phalanx.launch.worker_pool import WorkerPool
from phalanx.prepare.did_not_fit import DoesNotFit, as_on_every_rank
from tests.launch import jobs


@pytest.fixture(scope="module")
def store() -> JobStore:
    return JobStore(host_store("127.0.0.1", 0, timedelta(seconds=30)), b"secret" * 4, "two nodes")


def spread(store: JobStore, name: str, node: int, silence: float = 20.0) -> Spread:
    """Node 0 leads."""
    succession = Succession(Path(tempfile.mkdtemp(prefix=f"phalanx-{name}-")), node, {})
    return Spread(store.part(name).clone(), node, {0: (0, 0), 1: (1, 0)}, silence, node == 0, succession)


def ignored(name: str, given: Any) -> None:
    """What rank 0 tells."""


def pool(where: Spread) -> WorkerPool:
    return WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT, spread=where)


def report(where: Spread, count: int, has_begun: bool = True) -> None:
    """Of node 1, whose process has ended long ago, or which has not begun one."""
    starts, slots = ({"1": 0}, {"1": ""}) if has_begun else ({}, {})
    said = {"incarnation": "a", "count": count, "starts": starts, "slots": slots, "ended": {}, "said": {}}
    where.store.set("report/1", json.dumps(said))


def test_each_node_has_its_ranks_and_the_first_one_hears_of_all(store: JobStore) -> None:
    first, second, found = spread(store, "both", 0), spread(store, "both", 1), list[Any]()

    def follow() -> None:
        with pool(second) as theirs:
            found.extend(Follower(theirs, second).run(ignored, Survival("shrink"), jobs.describe, "there"))

    thread = threading.Thread(target=follow)
    thread.start()
    with pool(first) as ours:
        mine, other = ours.run(jobs.describe, "here")
    thread.join(30)
    assert other is None and mine[:4] == (0, 2, 0, "cpu") and mine[-1] == ("here",)
    ((rank, world, local_rank, device, *_, given),) = found
    assert (rank, world, local_rank, device, given) == (1, 2, 0, "cpu", ("there",))


def attempts(run: Callable[[int], Any]) -> tuple[Any, list[str]]:
    """As often as all begin anew: what came of it, and what the attempts before ended with."""
    said = list[str]()
    while True:
        try:
            return run(len(said)), said
        except BeginAnew as anew:
            said.append(anew.again)


def test_all_nodes_begin_anew_when_a_rank_says_that_they_may(store: JobStore) -> None:
    first, second, found = spread(store, "anew", 0), spread(store, "anew", 1), list[Any]()

    def follow() -> None:
        with pool(second) as theirs:
            follower = Follower(theirs, second)
            found.append(attempts(lambda n: follower.run(ignored, Survival("shrink"), jobs.hungry, n)))

    thread = threading.Thread(target=follow)
    thread.start()
    with pool(first) as ours:
        (mine, other), heard = attempts(lambda n: ours.run(jobs.hungry, n, on_loss="shrink"))
    thread.join(30)
    assert mine == (0, 2, 2) and other is None
    assert heard == ["attempt 0 did not fit", "attempt 1 did not fit"] and found == [([(1, 2, 2)], heard)]


def test_processes_of_a_node_that_is_lost_are_not_waited_for_in_another_attempt(
    store: JobStore, tmp_path: Path
) -> None:
    where, board = spread(store, "lost before", 0, silence=0.5), StatusBoard.create(tmp_path / "board", 2)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    try:
        report(where, 1)
        while processes.can_start(1):
            processes.note_ended()
        processes.start_one(1)
        assert processes.alive[1].gone
        assert processes.alive[1].cause == "could not be started: node 1 is lost,"
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("trains", "what"), [(True, "ended its ranks"), (False, "has no rank that could go on by itself")]
)
def test_a_supervisor_that_hears_nothing_any_more_ends_its_ranks_and_says_so(
    trains: bool, what: str, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they train it would lead, but for the claim of one that goes on without it, and cannot be reached."""
    where = spread(store, f"silent {trains}", 1, silence=0.5)
    assert Succession(where.succession.folder, 0, {}).affirm(where.root, 1, without=1)
    monkeypatch.setattr("phalanx.launch.follower.reach", lambda claim: None)
    monkeypatch.setattr(Follower, "_trains", lambda follower: trains)
    send(where.store, orders_key(1), Orders(1))
    with pool(where) as theirs, pytest.raises(LinkError) as ended:
        Follower(theirs, where).run(ignored, Survival("shrink"), jobs.describe)
    words = rf"node 1 heard nothing of the supervisor that leads for \d s; node 1 {what}"
    assert re.fullmatch(words, ended.value.message) and "can be started again and is taken in" in ended.value.hint


def test_a_generation_that_lies_in_a_lost_store_is_not_waited_for_by_another_node(store: JobStore) -> None:
    """Its supervisor would say nothing meanwhile, and be taken for lost."""
    before, after = Generation(1, (0, 1)), Generation(2, (0,))
    told = SimpleNamespace(_orders=SimpleNamespace(generation=2), _newest=before)
    told.spread = SimpleNamespace(ranks_store=store)
    assert Follower._read_generation(told) is before  # pyright: ignore[reportArgumentType, reportPrivateUsage]
    store.set(after.key, after.to_json())
    assert Follower._read_generation(told) == after  # pyright: ignore[reportArgumentType, reportPrivateUsage]


def test_a_supervisor_passes_over_one_that_claimed_the_run_and_ended_before_it_was_heard_of(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 2 led after node 0, and is gone as well."""
    where, taken = spread(store, "passed over", 1, silence=0.5), list[Any]()
    where = dataclasses.replace(where, places={0: (0, 0), 1: (1, 0), 2: (2, 0)})
    hosted = host_store("127.0.0.1", 0, timedelta(seconds=30))
    assert Succession(where.succession.folder, 2, {}).affirm(where.root.at(hosted), 1, without=0)
    monkeypatch.setattr("phalanx.launch.follower.reach", lambda claim: None)
    monkeypatch.setattr("phalanx.launch.follower.is_gone", lambda claim: True)
    monkeypatch.setattr(Follower, "_trains", lambda follower: True)
    monkeypatch.setattr(WorkerPool, "take_over", lambda pool, *given: taken.append(given) or [])
    send(where.store, orders_key(1), Orders(1))
    with pool(where) as theirs:
        Follower(theirs, where).run(ignored, Survival("shrink"), jobs.describe)
    ((now, lost, *_),) = taken
    claim = newest_claim(where.succession.folder)
    assert (now.leads, now.term, lost) == (True, 2, [0, 2])
    assert claim is not None and (claim.term, claim.node, claim.without) == (2, 1, 2)


def test_who_leads_finds_that_one_that_left_it_leads_now(store: JobStore, tmp_path: Path) -> None:
    """It stood still for long, and its connection to the other was closed."""
    where, board = spread(store, "left", 0, silence=1000.0), StatusBoard.create(tmp_path / "board", 2)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    try:
        line = Lifeline(where.store, "a")
        report(where, 1)
        while "a" not in processes._lifelines._open:  # pyright: ignore[reportOptionalMemberAccess]
            line.hold()
            processes.note_ended()
        assert Succession(where.succession.folder, 1, {}).succeed(where.root, 1, without=0) is not None
        line.close()
        with pytest.raises(LinkError, match="node 0 does not hear of node 1, and another node leads the run now"):
            while True:
                processes.note_ended()
    finally:
        processes.close()


def test_a_node_whose_supervisor_ends_is_lost_before_its_silence_is(store: JobStore, tmp_path: Path) -> None:
    where, board = spread(store, "ends", 0, silence=1000.0), StatusBoard.create(tmp_path / "board", 2)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    try:
        processes.start_one(1)
        line = Lifeline(where.store, "a")
        report(where, 1)
        while "a" not in processes._lifelines._open:  # pyright: ignore[reportOptionalMemberAccess]
            line.hold()
            processes.note_ended()
        line.close()
        while not processes.alive[1].gone:
            processes.note_ended()
        assert processes.alive[1].cause == "was lost with node 1, whose supervisor ended,"
    finally:
        processes.close()


def test_who_leads_ends_when_another_has_claimed_the_run(store: JobStore, tmp_path: Path) -> None:
    where, board = spread(store, "deposed", 0, silence=0.5), StatusBoard.create(tmp_path / "board", 2)
    assert Succession(where.succession.folder, 1, {}).affirm(where.root, 1, without=0)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    report(where, 1)
    try:
        with pytest.raises(LinkError) as ended:
            while True:
                processes.note_ended()
        words = "node 0 does not hear of node 1, and another node leads the run now"
        assert ended.value.message == words and "the run goes on there" in ended.value.hint
    finally:
        processes.close()


def test_processes_of_a_node_that_says_nothing_are_lost_and_come_back_with_it(store: JobStore, tmp_path: Path) -> None:
    where, board = spread(store, "lost", 0, silence=0.5), StatusBoard.create(tmp_path / "board", 2)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    try:
        processes.start_one(1)
        remote = processes.alive[1]
        report(where, 1)
        assert processes.can_start(1) and not remote.gone
        while not remote.gone:
            processes.note_ended()
        assert remote.cause == "was lost with node 1, of which nothing was heard for 1 s," and not processes.can_start(
            1
        )
        report(where, 2)
        processes.note_ended()
        assert processes.can_start(1)
    finally:
        processes.close()


def test_a_node_is_waited_for_longer_while_it_starts_its_first_process(store: JobStore, tmp_path: Path) -> None:
    where, board = spread(store, "slow", 0, silence=0.2), StatusBoard.create(tmp_path / "board", 2)
    processes = SpreadProcesses(tmp_path, jobs.LIGHT, where, board)
    try:
        processes.start_one(1)
        (node,) = processes._nodes
        report(where, 1, has_begun=False)
        processes.note_ended()
        assert processes._patience(node) == 2.0
        report(where, 2)
        processes.note_ended()
        assert processes._patience(node) == 0.2
    finally:
        processes.close()


@pytest.mark.parametrize("error", [None, LinkError("lost", "look"), LateError("late"), ConfigError("no", "yes")])
def test_what_a_process_said_is_the_same_on_the_other_side(error: Any) -> None:
    for said in (Done(), Left(None), Left(143)):
        assert outcome_of(told(said)) == said
    failed = outcome_of(told(Failed(error, "text", "traceback")))
    assert isinstance(failed, Failed) and (failed.text, failed.traceback) == ("text", "traceback")
    assert type(failed.error) is type(error) and str(failed.error) == str(error)


def test_of_a_long_failure_the_beginning_and_the_end_cross_to_the_other_side() -> None:
    """All of it would have to be read by the thread that writes it."""
    text = "first " + "x" * 1_000_000 + " last"
    failed = outcome_of(told(Failed(LinkError(text), text, text)))
    assert isinstance(failed, Failed) and failed.error is not None
    for own in (failed.text, failed.traceback, failed.error.message):
        assert own.startswith("first x") and own.endswith("x last") and len(own) < 25_000
        assert "… 980,011 characters …" in own


def test_that_all_may_begin_anew_after_an_error_is_known_on_the_other_side() -> None:
    failed = outcome_of(told(Failed(DoesNotFit("no", "yes", "dp=2", 0.9), "text", "")))
    assert isinstance(failed, Failed) and failed.error is not None
    with pytest.raises(DoesNotFit, match="no") as raised, as_on_every_rank():
        raise failed.error
    assert (raised.value.hint, raised.value.plan, raised.value.share) == ("yes", "dp=2", 0.9)


class Machine:
    """One that has room, or has not; processes that are buried are gone at once."""

    in_doubt = lost_store = False

    def __init__(self, number: int, room: bool) -> None:
        self.sent = list[tuple[int, int]]()
        self.alive = {process: self._process(process) for process in range(number)}
        self.room = room

    def _process(self, number: int) -> Any:
        return SimpleNamespace(gone=False, send=lambda signalled: self.sent.append((number, signalled)))

    def hears_of(self, rank: int) -> bool:
        return True

    def can_start(self, rank: int) -> bool:
        return self.room

    def start_one(self, rank: int) -> None:
        self.alive[rank] = self._process(rank)

    def bury(self, rank: int) -> None:
        del self.alive[rank]


def test_losses_in_a_row_are_those_without_a_finished_step_between_them(tmp_path: Path) -> None:
    """Also where ranks go back, and make the same step again."""
    board = StatusBoard.create(tmp_path / "board", 3)
    job = SimpleNamespace(members=Generation(0, (0, 1, 2)), silence=15.0)
    store = SimpleNamespace(set=lambda key, text: None, check=lambda keys: True)
    renewal = Renewal(Machine(3, room=True), board, job, store, "replace", lambda *_: None)  # pyright: ignore

    def lose() -> str | None:
        for slot in board.slots:
            slot.at_step(7)
            slot.guard(True)
        return renewal.renew([], ["connections broke"])

    for _ in range(6):
        board.slots[0].finish_step()
        assert lose() is None
    assert [lose(), lose()] == [None, None]
    assert lose() == "it was the 4th loss in a row without a finished step"


def test_a_rank_that_just_came_and_loses_the_others_is_lost_and_does_not_end_the_job(tmp_path: Path) -> None:
    """Its links break while all of them meet, and it holds nothing that it could go on with."""
    board = StatusBoard.create(tmp_path / "board", 3)
    job = SimpleNamespace(members=Generation(0, (0, 1, 2)), silence=15.0)
    store, machine = SimpleNamespace(set=lambda key, text: None, check=lambda keys: True), Machine(3, room=True)
    renewal = Renewal(machine, board, job, store, "replace", lambda *_: None)  # pyright: ignore
    watch = Watch(machine, board, job, renewal)  # pyright: ignore[reportArgumentType]
    for slot in board.slots:
        slot.guard(True)
    assert renewal.renew([1], ["rank 1 was lost"]) is None  # a fresh process is in its place
    failed = Failed(LinkError("lost the connection"), "lost the connection", "")
    assert watch._add(Trouble(1, board.slots[1].read(), failed=failed)) and renewal.generation.number == 2
    assert not watch._add(Trouble(0, board.slots[0].read(), failed=failed)) and board.aborted  # it holds state


class Few:
    """Ranks of which some are lost, and that are not to go on with fewer than `least`."""

    def __init__(self, folder: Path, on_loss: OnLoss, room: bool, number: int = 2, least: int = 2) -> None:
        folder.mkdir(exist_ok=True)
        self.board, self.told = StatusBoard.create(folder / "board", number), list[str]()
        job = SimpleNamespace(members=Generation(0, tuple(range(number))), silence=15.0)
        self.machine = Machine(number, room)
        store = SimpleNamespace(set=lambda key, text: self.told.append(text), check=lambda keys: True)
        given = (self.machine, self.board, job, store, on_loss, lambda *_: None, least)
        self.renewal = Renewal(*given)  # pyright: ignore[reportArgumentType]
        self.watch = Watch(self.machine, self.board, job, self.renewal)  # pyright: ignore[reportArgumentType]
        for slot in self.board.slots:
            slot.guard(True)

    def lose(self, process: int = 1, error: PhalanxError | None = None) -> Generation:
        failed = None if error is None else Failed(error, error.message, "")
        trouble = Trouble(process, self.board.slots[process].read(), "was killed", failed=failed)
        assert self.watch._add(trouble), "the job ended"
        return self.renewal.generation

    def go_on(self) -> None:
        """The ranks of the newest generation train again, and have told what happened."""
        for process in self.renewal.generation.members:
            self.board.slots[process].enter_generation(self.renewal.generation.number)
            self.board.slots[process].went_on()

    def hear(self, process: int, message: Any) -> None:
        said = self.machine.alive[process]
        said.rank, said.wire = process, SimpleNamespace(take=lambda: [message], closed=True)
        said.last_output = list
        self.watch.hear(said, None)

    def come(self, process: int) -> None:
        """A process that was started is ready, and the ranks are where they meet newcomers."""
        for number in (process, *self.renewal.generation.members):
            self.board.slots[number].await_generation(self.renewal.generation.number + 1)


@pytest.mark.parametrize("on_loss", ["shrink", "regrow", "replace"])
def test_too_few_ranks_wait_for_a_place_to_start_others(
    on_loss: OnLoss, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes are all of one machine here, and it says at first that it has no room."""
    few = Few(tmp_path, on_loss, room=False)
    now = few.lose()
    assert (now.members, now.fresh, now.waits) == ((0,), (), True)
    assert "rank 1 was killed during start; fewer ranks are left than min_ranks" in capsys.readouterr().err
    few.watch._tend()
    few.come(0)
    few.watch._look_for_broken_links()
    assert not few.renewal.newcomers.is_coming(1) and few.renewal.generation is now
    few.machine.room = True
    few.watch._tend()
    assert few.renewal.newcomers.is_coming(1)
    few.come(1)
    few.watch._tend()
    then = few.renewal.generation
    assert (then.members, then.fresh, then.waits) == ((0, 1), (1,), False)
    assert then.lost == ("rank 1 was killed during start", "a process came to be rank 1")


def test_ranks_that_wait_go_on_only_with_as_many_as_they_need(tmp_path: Path) -> None:
    few = Few(tmp_path, "replace", room=False, number=4, least=3)
    assert not few.lose(3).waits and few.lose(2).waits and few.lose(1).waits
    few.machine.room = True
    few.watch._tend()
    few.come(1)
    few.watch._tend()
    assert few.renewal.generation.waits and not few.board.invited
    few.come(2)
    few.watch._tend()
    assert few.renewal.generation.members[0] == 0 and len(few.renewal.generation.members) == 3


def test_ranks_that_wait_go_on_without_others_once_a_signal_asks_them_to_end(tmp_path: Path) -> None:
    few = Few(tmp_path, "replace", room=False)
    assert few.lose().waits
    few.watch.stop(signal.SIGTERM)
    now = few.renewal.generation
    assert (now.number, now.members, now.waits, now.lost) == (2, (0,), False, ("rank 1 was killed during start",))
    assert few.machine.sent == [(0, signal.SIGTERM)]


def test_a_signal_is_not_for_processes_that_hold_nothing_yet(tmp_path: Path) -> None:
    """They would leave at once, and all others a moment later. Those that come are not needed any more."""
    replaced = Few(tmp_path / "replace", "replace", room=True, number=3, least=1)
    assert replaced.lose().fresh == (1,)
    replaced.watch.stop(signal.SIGINT)
    assert replaced.machine.sent == [(0, signal.SIGINT), (2, signal.SIGINT)]
    grown = Few(tmp_path / "regrow", "regrow", room=True, number=3, least=1)
    assert grown.lose().members == (0, 2)
    grown.go_on()
    grown.watch._tend()
    assert grown.renewal.newcomers.is_coming(1)
    grown.watch.stop(signal.SIGINT)
    grown.watch._tend()
    assert grown.machine.sent == [(0, signal.SIGINT), (2, signal.SIGINT)] and 1 not in grown.machine.alive


def test_a_process_that_holds_nothing_yet_and_leaves_does_not_end_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = Few(tmp_path / "replace", "replace", room=True, number=3, least=1)
    assert few.lose().fresh == (1,)
    few.hear(1, Left(143))
    assert few.renewal.generation.number == 2 and not few.watch.over()
    grown = Few(tmp_path / "regrow", "regrow", room=True, number=3, least=1)
    grown.lose()
    grown.watch._tend()
    assert not grown.renewal.newcomers.is_coming(1)  # the others have not said what it is to prepare itself for
    grown.go_on()
    grown.watch._tend()
    grown.hear(1, Left(143))
    assert not grown.watch.over() and not grown.renewal.newcomers.is_coming(1)
    assert "a process that was to take part left because of a signal; it is started" in capsys.readouterr().err


def test_a_process_that_comes_and_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Few(tmp_path, "regrow", room=True, number=3, least=1)
    few.lose()
    few.go_on()
    few.watch._tend()
    monkeypatch.setattr(SilenceWatch, "silent_for", lambda *_: 61.0)
    few.watch._tend()
    assert not few.renewal.newcomers.is_coming(1) and 1 not in few.machine.alive


def test_a_process_that_cannot_begin_is_tried_again_later_and_the_others_go_on_without_it(tmp_path: Path) -> None:
    few = Few(tmp_path, "replace", room=True, least=1)
    assert few.lose().fresh == (1,)  # in its place at once
    now = few.lose(1, ConfigError("no device", "look"))
    assert (now.members, now.fresh, now.waits) == ((0,), (), False)
    assert now.lost == (
        "rank 1 was killed during start", "the process that was to be rank 1 failed (no device) during start",
    )  # fmt: skip
    few.watch._tend()
    assert not few.renewal.newcomers.is_coming(1)  # it is waited with


def test_what_a_rank_refuses_that_holds_state_ends_the_job(tmp_path: Path) -> None:
    few = Few(tmp_path, "replace", room=True, least=1)
    failed = Failed(ConfigError("no", "look"), "no", "")
    assert not few.watch._add(Trouble(1, few.board.slots[1].read(), failed=failed)) and few.board.aborted


def test_a_rank_that_is_lost_again_soon_after_it_came_is_replaced_later(tmp_path: Path) -> None:
    few = Few(tmp_path, "replace", room=True, least=1)
    assert few.lose().members == (0, 1)
    few.board.slots[1].guard(True)
    few.watch._tend()
    assert few.lose().members == (0,)
