"""Phalanx beside its peers: sides train alike, and what a peer cannot do is reported as such."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import peers
import peers_page
from compare_setting import Setting
from peer_cases import OURS, PACKAGES, TINY_SIZES, entrants
from peer_rounds import Rounds
from peer_workers import Entrant, Workers, WorkersError

from phalanx.errors import ConfigError
from phalanx.lab.network import NoNetworkError
from phalanx.lab.run import Lab

BENCHMARKS = Path(peers.__file__).parent
LLAMA = Setting("llama", TINY_SIZES["llama"], "float32", True)
OUR_PLAN = Entrant(OURS, "dp=2", "peer_phalanx.phalanx", "dp=2")
DDP = Entrant("DDP", "25 MiB buckets", "torch_data_parallel.ddp", "dp=2", {"bucket_mib": 25})


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab("ranks=2,device=cpu:1thread", say=lambda text: None) as opened:
        yield opened


def ratio(low: float, median: float, high: float) -> dict[str, float]:
    return {"low": low, "median": median, "high": high, "repeats": 3}


def result(*peers: dict[str, Any]) -> dict[str, Any]:
    times = ratio(0.9, 1.0, 1.1)
    ours = {"plan": "dp=2", "tried": [], "peak_bytes": 2**30, "seconds": times}
    return {
        "model": "llama",
        "title": "A llama",
        "size": {"samples": 4, "tokens": 8},
        "ours": ours,
        "peers": list(peers),
    }


def peer(found: dict[str, float]) -> dict[str, Any]:
    times = ratio(1.9, 2.0, 2.1)
    return {"peer": "DDP", "variant": "plain", "tried": [], "peak_bytes": 2**29, "seconds": times, "ratio": found}


@pytest.mark.long  # starts four ranks; test_compare.py holds the same of the pipelines that are compared
def test_a_round_compares_sides_that_train_alike(lab: Lab) -> None:
    said: list[str] = []
    with Rounds(lab, LLAMA, rounds=2, steps=1, say=said.append) as rounds:
        rounds.choose_ours([OUR_PLAN])
        found = rounds.meet("DDP", [DDP])
        ours = rounds.ours()
    assert found["losses"] == pytest.approx(ours["losses"], rel=2e-4)
    assert found["ratio"]["repeats"] == found["seconds"]["repeats"] == ours["seconds"]["repeats"] == 2
    assert found["peak_bytes"] > 2**26 and ours["peak_bytes"] > 2**26
    assert any(line.startswith("DDP, 25 MiB buckets: ") for line in said)


def test_what_a_side_cannot_do_comes_back_in_one_line() -> None:
    wrong = Entrant("DDP", "nothing", "torch_data_parallel.no_such_thing", "dp=1")
    lab = Lab("ranks=1,device=cpu:1thread", say=lambda text: None)
    with lab, pytest.raises(WorkersError, match=r"^AttributeError: module 'torch_data_parallel' has no attribute"):
        Workers(lab, wrong, LLAMA, seconds=60).__enter__()


def test_a_side_that_does_not_answer_is_given_up(lab: Lab) -> None:
    with pytest.raises(WorkersError, match=r"did not start within 0 s|no answer within 0 s"):
        Workers(lab, OUR_PLAN, LLAMA, seconds=0.05).__enter__()


def test_peers_that_are_not_installed_or_lack_the_model_are_reported(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2 = Setting("gpt2", TINY_SIZES["gpt2"], "float32", True)
    rounds = Rounds(lab, gpt2, rounds=1, steps=1, say=lambda text: None)
    monkeypatch.setitem(PACKAGES, "Accelerate", "no_such_package.at_all")
    assert rounds.meet("Accelerate", []) == {"peer": "Accelerate", "error": "not installed", "tried": []}
    monkeypatch.setitem(PACKAGES, "torchtitan", "json")
    assert rounds.meet("torchtitan", [])["error"] == "has no such model"


def test_every_peer_has_settings_and_ours_come_first() -> None:
    found = entrants(2, 4)
    assert found[0].peer == OURS
    assert set(PACKAGES) <= {entrant.peer for entrant in found}
    names = [(entrant.peer, entrant.variant) for entrant in found]
    assert len(set(names)) == len(names)
    for entrant in found:
        assert (BENCHMARKS / f"{entrant.build.partition('.')[0]}.py").exists()


def test_one_sequence_per_step_cannot_be_divided_among_replicas() -> None:
    setting = Setting("llama", replace(TINY_SIZES["llama"], samples=1), "float32", True)
    with pytest.raises(ValueError, match="1 sequence per step cannot be divided among 2 ranks"):
        setting.share(0, 2, "cpu")
    assert {entrant.plan for entrant in entrants(2, 1) if entrant.peer == OURS} >= {"pp=2,mb=1,schedule=1f1b,slices=2"}


def test_rows_show_speed_memory_and_what_cannot_run() -> None:
    ours, theirs, failed = peers_page.rows(
        result(peer(ratio(1.9, 2.0, 2.1)), {"peer": "X", "error": "no|way", "tried": []})
    )
    assert ours == ["A llama", "**Phalanx**", "dp=2", "32", "1.00", "", ""]
    assert theirs == ["A llama", "DDP", "plain", "16", "0.50", "2.00× (1.90–2.10)", "faster"]
    assert failed == ["A llama", "X", "", "", "", "", "cannot run: no/way"]


def test_the_page_says_by_how_much_we_are_behind() -> None:
    assert peers_page.behind(result(peer(ratio(0.85, 0.9, 0.95)))) == ["A llama, DDP (plain): we are 10% behind."]
    within = peers_page.behind(result(peer(ratio(0.85, 0.9, 1.05))))
    assert within == ["A llama, DDP (plain): we are 10% behind, within the spread."]
    assert peers_page.behind(result(peer(ratio(0.95, 0.99, 1.05)))) == []


def test_a_peer_that_failed_is_shown_as_it_went_when_it_was_met_again() -> None:
    failed, good = {"peer": "DDP", "error": "no way", "tried": []}, peer(ratio(1.9, 2.0, 2.1))
    first, second = result(failed), result(good)
    assert [run["peers"] for run in peers_page.settled([first, second])] == [[], [good]]
    assert [run["peers"] for run in peers_page.settled([first, {**second, "model": "gpt2"}])] == [[failed], [good]]
    assert [run["peers"] for run in peers_page.settled([second, first])] == [[good], [failed]]


def test_a_gpu_that_is_shared_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "--gpu", "--link", "1gbit"])
    with pytest.raises(SystemExit, match="--gpu and --link cannot be combined: ranks that share a GPU are on one node"):
        peers.main()


def test_a_link_that_is_no_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", "--link", "fast"])
    with pytest.raises(ConfigError, match="lab: link"):
        peers.main()


def test_links_that_cannot_be_limited_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*arguments: object) -> None:
        raise NoNetworkError("no privilege")

    monkeypatch.setattr("phalanx.lab.run.Network", cannot)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--link", "1gbit"])
    with pytest.raises(SystemExit, match=r"--link 1gbit: .*no network namespaces \(no privilege\)"):
        peers.main()


def test_the_results_page_shows_what_was_measured() -> None:
    files = [name for names in peers_page.SECTIONS for name in names]
    measured = [name for name in files if (peers_page.RESULTS / name).exists()]
    written = peers_page.RESULTS / "peers.md"
    assert written.exists() == bool(measured), "the page and the result files come together"
    for name in measured:
        data = json.loads((peers_page.RESULTS / name).read_text())
        assert not data["setting"]["quick"] and data["results"], f"{name}: nothing was measured"
        assert written.read_text(encoding="utf-8") == peers_page.page()
