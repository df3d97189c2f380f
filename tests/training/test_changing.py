"""A plan that a run is asked for is taken once, whoever is lost meanwhile, and whoever is rank 0 then."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.config import RunConfig
from phalanx.observe.requests import Answer, Request, ask, wait_for
from phalanx.training import changing
from phalanx.training.changing import Changes, Wanted


class Store(dict[str, str]):
    """As a job's store, for one process."""

    set = dict[str, str].__setitem__

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Ranks:
    """Those of a run, by number: what each knows of changes, in one process."""

    def __init__(self, folder: Path, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._config = folder, RunConfig(plan=f"dp={world}", batch_size=12, steps=50, ranks=world)
        self.all = [Changes(self._config, self._context(rank, world), folder, 1) for rank in range(world)]
        monkeypatch.setattr(changing, "everyone", lambda said: SimpleNamespace(texts=lambda _: [said]))

    def _context(self, rank: int, world: int, is_fresh: bool = False) -> Any:
        self._store = Store() if rank == 0 else self._store
        membership = SimpleNamespace(is_fresh=is_fresh, is_invited=False, gets=lambda _: False)
        return SimpleNamespace(rank=rank, world=world, store=self._store, membership=membership)

    def at(self, step: int) -> list[Wanted]:
        """What all of them want before a step, which is the same."""
        asked = self.all[0].is_asked()
        said: Any = self.all[0]._found() if asked else ""
        found = [list(each.at(step, said, asked)) for each in self.all]
        assert all(each == found[0] for each in found)
        return found[0]

    def make(self, wanted: Wanted, step: int) -> None:
        for each in self.all:
            each.answer(wanted, Answer(wanted.plans[0], step))

    def lose(self, rank: int, replaced: bool) -> None:
        kept = [each for number, each in enumerate(self.all) if number != rank]
        told = json.loads(json.dumps([kept[0].since, kept[0].pending and vars(kept[0].pending)]))
        if replaced:
            kept.insert(rank, Changes(self._config, self._context(rank, len(self.all), is_fresh=True), self._folder, 1))
        self.all = kept
        for number, each in enumerate(self.all):
            each.stay_in(told[0], told[1] and Request(**told[1]))
            each.enter(self._context(number, len(self.all)))


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_what_was_being_made_ready_for_is_made_once(
    lost: int, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 4, monkeypatch)
    request = ask(tmp_path, "dp=2")
    (wanted,) = ranks.at(5)
    assert wanted.later and wanted.request == request
    ranks.lose(lost, replaced)
    (again,) = ranks.at(6)
    assert again.later and again.request == request
    for each in ranks.all:
        each.tell_ready()
    (now,) = ranks.at(7)
    assert not now.later and now.request == request
    ranks.make(now, 7)
    answer = wait_for(tmp_path, request, 0.0)
    assert answer is not None and answer.step == 7
    while len(ranks.all) > 1:
        ranks.lose(0, replaced=False)
        assert not ranks.all[0].is_asked() and ranks.at(20) == []


def test_who_comes_as_rank_0_takes_what_nobody_has_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(tmp_path, 2, monkeypatch)
    request = ask(tmp_path, "mb=2")
    ranks.lose(0, replaced=True)
    (wanted,) = ranks.at(5)
    assert wanted.request == request


def test_what_rank_0_took_when_the_others_were_lost_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path, 2, monkeypatch)
    request = ask(tmp_path, "mb=2")
    assert cast(Any, ranks.all[0])._found()
    ranks.lose(1, replaced=True)
    (wanted,) = ranks.at(5)
    assert wanted.request == request


def test_what_an_earlier_run_was_asked_for_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path, "mb=2")
    ranks = Ranks(tmp_path, 2, monkeypatch)
    assert not ranks.all[0].is_asked() and ranks.at(1) == []
