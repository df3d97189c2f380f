"""Measurements of devices: what is asked, how it is kept, what becomes of broken or foreign files, and what planning
makes of it."""

from __future__ import annotations

import json
import sqlite3
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.lab.run import Lab
from phalanx.launch.context import RankContext
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.devices import DEVICES
from phalanx.planning.rates import COLLECTIVES, Spread, Talk, is_of, on_cluster, saturation
from phalanx.prepare.here import planned_here
from phalanx.profile import hardware
from phalanx.profile.hardware import (
    BRIEF,
    CAREFUL,
    Keep,
    Kept,
    answer_all,
    key_of,
    measure,
    measure_joined,
    questions,
    rates_of,
    team_of,
)
from phalanx.profile.on_rank import Question, Team
from phalanx.profile.store import Row, Store, of_newest_graphs, profiles_path, rates_from, read_profile
from tests.planning.test_rates import rates

CPU = torch.device("cpu")


# The store.


def test_a_measurement_is_found_by_all_that_it_depends_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "p.sqlite")
    store.put("product", {"size": 4, "device": "A"}, 1.5)
    assert store.get("product", {"device": "A", "size": 4}) == 1.5
    assert store.get("product", {"device": "B", "size": 4}) is None and store.get("memory", {"size": 4}) is None
    store.put("product", {"size": 4, "device": "A"}, 2.5)
    (row,) = store.rows("product")
    assert row.value == 2.5 and " UTC on " in row.made
    store.forget("product", {"size": 4, "device": "A"})
    assert not store.rows()


def test_a_file_that_is_no_store_is_put_aside_and_that_is_said(tmp_path: Path) -> None:
    path, said = tmp_path / "p.sqlite", list[str]()
    path.write_text("no database " * 100)
    store = Store(path, said.append)
    store.put("memory", {"size": 1}, 3.0)
    assert store.get("memory", {"size": 1}) == 3.0 and (tmp_path / "p.broken").read_text().startswith("no database")
    assert len(said) == 1 and "cannot be read" in said[0] and "measured anew" in said[0]


def test_a_plan_and_a_run_say_that_a_damaged_store_was_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    for planned in (
        lambda: main(["plan", "--model", "gpt2", "--cluster", "2 A100", "--batch-size", "4"]),
        lambda: planned_here(RankContext.alone(), None, "float32"),
    ):
        profiles_path().write_text("no database at all, but long enough to be looked at as one" * 20)
        planned()
        assert "put aside as profiles.broken, what it held is measured anew" in capsys.readouterr().err


def test_a_damaged_row_of_a_store_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path / "p.sqlite")
    store.put("memory", {"size": 1}, 3.0)
    with sqlite3.connect(store.path) as database:
        database.execute("INSERT INTO measurements VALUES ('memory', NULL, 1.0, 'now'), ('memory', '[[', 1.0, 'now')")
        database.execute("INSERT INTO measurements VALUES ('memory', '{}', 'x', 'now')")
    assert [row.value for row in store.rows()] == [3.0]


def test_a_store_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    path, said = tmp_path / "p.sqlite", list[str]()
    Store(path).put("memory", {"size": 1}, 3.0)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    assert Store(path, said.append).get("memory", {"size": 1}) is None and "another version" in said[0]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="measurements cannot be kept in") as caught:
        Store(tmp_path / "file" / "p.sqlite").rows()
    assert "PHALANX_CACHE" in caught.value.hint


def test_a_profile_travels_as_one_file(tmp_path: Path) -> None:
    store, other, file = Store(tmp_path / "a.sqlite"), Store(tmp_path / "b.sqlite"), tmp_path / "p.json"
    store.put("memory", {"size": 1, "device": "A"}, 3.0)
    store.export(file, store.rows())
    other.take(read_profile(file))
    assert other.rows() == store.rows()
    with pytest.raises(ConfigError, match=r"option out = .* cannot be written"):
        store.export(tmp_path / "no" / "p.json", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not one: "),
        ('{"format": "phalanx profile", "version": 1, "rows": [{"kind": 1}]}', "is not one: rows.0.kind"),
        ('{"format": "phalanx profile", "version": 9, "rows": []}', "version 9"),
        ('{"format": "recipe", "version": 1, "rows": []}', "is 'recipe'"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_profile(tmp_path / "p.json")
    assert caught.value.hint
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_profile(tmp_path / "none.json")


# Measuring.


def test_what_is_known_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def measured(team: Team, links: Any, question: Question, *given: Any) -> float:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((question.kind, question.size))
        return 1e9

    monkeypatch.setattr(hardware, "answer", measured)
    store, progress = Store(tmp_path / "p.sqlite"), list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        measure(store, "cpu", "float32", 1)
    asked_before, asked[:] = list(asked), []
    rates = measure(store, "cpu", "float32", 1, lambda done, of: progress.append((done, of)))
    assert [*asked_before, *asked] == [(q.kind, q.size) for q in questions("cpu", Spread())]
    assert progress[0] == (3, 5) and progress[-1] == (5, 5) and rates.bandwidth == 1e9
    assert rates_of(store.rows(), rates.device, "float64", Spread()) is None


def answers(context: RankContext, *asked: Question) -> dict[str, float]:
    """On a rank; what rank 0 keeps."""
    found: dict[str, float] = {}
    keep: Keep = lambda question, value: found.setdefault(question.kind, value)  # type: ignore[assignment]  # noqa: E731
    answer_all(team_of(context), asked, "float32", BRIEF, keep)
    return found


def test_a_rank_alone_measures_rates_and_draws_no_random_number() -> None:
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    found = answers(RankContext.alone(), Question("product", 32), Question("memory", 2**16))
    assert set(found) == {"product", "memory"} and min(found.values()) > 0 and torch.rand(1) == first


def test_ranks_measure_collectives_together(pool: Any) -> None:
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "product")
    kept, nothing = pool.run(answers, *(Question(kind, 64) for kind in kinds), world=2)
    assert set(kept) == set(kinds) and min(kept.values()) > 0 and not nothing


def test_questions_are_of_what_there_is() -> None:
    assert {q.kind for q in questions("cpu", Spread())} == {"product", "memory"}
    assert {q.kind for q in questions("cuda", Spread(2, 2))} == {
        "product", "memory", "host", "all_reduce", "all_gather", "reduce_scatter", "send", "computing",
        "listening", "computing beneath", "all_reduce beneath",
    }  # fmt: skip
    assert Question("listening", 1) in questions("cuda", Spread(4, 4), BRIEF)
    assert [q.size for q in questions("cpu", Spread(4, 4)) if q.kind == "computing"] == [2, 3, 4]
    assert not any(q.kind == "computing" for q in questions("cpu", Spread(1, 1, 4), BRIEF))
    assert Question("computing", 4, is_far=True) in questions("cpu", Spread(1, 1, 4), BRIEF, one_machine=True)


def test_ranks_measure_what_they_do_to_each_other(pool: Any) -> None:
    kinds = ("computing", "listening", "computing beneath", "all_reduce beneath")
    found = pool.run(answers, *(Question(kind, 2) for kind in kinds), world=2)[0]
    assert set(found) == set(kinds) and all(0 < speed <= 1 for speed in found.values())


def test_computation_loses_to_communication_what_was_measured() -> None:
    slowed = rates(near=Talk(Spread(4, 4), {}, {"computing beneath": ((4.0, 0.85),)}))
    assert on_cluster(Cluster.read("4 A100"), Software(), slowed)[1].contention == pytest.approx(0.15)
    assert on_cluster(Cluster.read("4 A100"), Software(), rates())[1].contention == Software().contention


# Ranks of a job that a launcher started.


def joined(context: RankContext, folder: str, nodes: int) -> tuple[bool, list[str]]:
    """On a rank, as if those of the job were on so many nodes."""
    context = replace(context, node=context.rank // (context.world // nodes))
    store = Store(Path(folder) / "p.sqlite")
    rates = measure_joined(context, store if context.rank == 0 else None, "float32", BRIEF)
    return rates is not None, [] if rates is None or rates.far is None else sorted(rates.far.collectives)


def test_ranks_of_several_nodes_measure_each_class_of_their_groups_and_one_process_keeps_it(
    pool: Any, tmp_path: Path
) -> None:
    """Four ranks of two nodes, then, with nothing left to measure, the same again; then of one node."""
    found = pool.run(joined, str(tmp_path), 2, world=4)
    assert found == [(True, ["all_gather", "all_reduce", "reduce_scatter", "send"])] + 3 * [(False, [])]
    rows = Store(tmp_path / "p.sqlite").rows()
    classes = {(row.kind, row.key["ranks"], row.key["devices"], row.key["nodes"]) for row in rows}
    of_node, of_nodes = (2, 2, 1), (2, 2, 2)
    every = ("product", "memory", "computing", *COLLECTIVES)
    both = ("computing", *COLLECTIVES)  # these nodes are parts of one machine
    assert classes == {(kind, *of_node) for kind in every} | {(kind, *of_nodes) for kind in both}
    pool.run(joined, str(tmp_path), 2, world=4)
    assert Store(tmp_path / "p.sqlite").rows() == rows
    pool.run(joined, str(tmp_path), 1, world=4)
    assert len(Store(tmp_path / "p.sqlite").rows()) > len(rows)


class Keys(dict[str, str]):
    """As a job's store, for one process."""

    def set(self, key: str, text: str) -> None:
        self[key] = text


def placed(*places: tuple[int, str]) -> Any:
    """Rank 0 of a job whose other ranks have said that they are on these nodes, with these devices."""
    store = Keys({
        f"measured rank {rank}": json.dumps(
            {"node": node, "where": f"{node}/{rank}", "name": name, "machine": f"of {name}"}
        )
        for rank, (node, name) in enumerate(places, 1)
    })  # fmt: skip
    return SimpleNamespace(rank=0, world=1 + len(places), node=0, device="cpu", store=store)


def test_ranks_that_are_not_alike_are_told_to_be_measured_apart() -> None:
    own = hardware.device_name(CPU)
    team = team_of(placed((0, own), (1, own), (1, own)))
    assert team.spread == Spread(2, 2, 2) and not team.one_machine
    with pytest.raises(ConfigError, match=r"have several kinds of devices \(.*NVIDIA T4\)") as caught:
        team_of(placed((1, "NVIDIA T4")))
    assert "a job with nodes of one kind" in caught.value.hint
    with pytest.raises(ConfigError, match=r"different numbers of ranks \(2 on node 0, 1 on node 1\)") as caught:
        team_of(placed((0, own), (1, own)))
    assert caught.value.hint == "start as many on each"


def test_of_an_odd_number_the_last_has_nobody_to_send_to() -> None:
    team = Team(RankContext.alone(), Spread(3, 3, 3), ((0, 1, 2), (3, 4, 5), (6, 7, 8)))
    peers = [replace(team, context=replace(team.context, rank=rank)) for rank in range(9)]
    assert [own.peer(is_far=False) for own in peers] == [1, 0, None, 4, 3, None, 7, 6, None]
    assert [own.peer(is_far=True) for own in peers] == [3, 4, 5, 0, 1, 2, None, None, None]


def test_a_run_asks_briefly_and_nothing_that_was_measured_carefully_or_takes_long(tmp_path: Path) -> None:
    kept = Kept(Store(tmp_path / "p.sqlite"), CPU, "float32", Spread(2, 2), BRIEF)
    assert kept.missing() == kept.asked
    assert [own.size for own in kept.asked if own.kind == "computing"] == [2]  # of ranks that share cores, all
    assert "computing" not in {own.kind for own in questions("cuda", Spread(2, 2), BRIEF)}
    assert "computing" in {own.kind for own in questions("cuda", Spread(2, 1), BRIEF)}
    kept.store.put("product", key_of(kept.asked[0], kept.name, "float32", Spread(2, 2), CAREFUL), 1e9)
    kept.store.put("all_reduce", kept.key(Question("all_reduce", 2**14)), 0.5)
    missing = [(own.kind, own.size) for own in kept.missing()]
    assert not {"product", "all_reduce"} & {kind for kind, _ in missing} and ("all_gather", 2**14) in missing
    kept.store.put("product", kept.key(Question("product", 512)), 9e9)
    kept.store.put("memory", kept.key(Question("memory", 2**24)), 2e9)
    rates = kept.rates()
    assert rates is not None and rates.products == ((128.0, 1e9),) and rates.bandwidth == 2e9


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("option", ["--ranks=2", "--model=gpt2", "--import=p.json"])
def test_what_one_process_does_is_refused_to_several_of_a_launcher(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert main(["profile", "--device", "cpu", option]) == 2
    said, name = " ".join(capsys.readouterr().err.split()), option[2:].partition("=")[0]
    assert f"option {name} = " in said and "has started several, which measure devices together" in said
    assert f"leave --{name} out, or run it by itself: sbatch --ntasks=1" in said


def test_the_command_joins_the_ranks_that_a_launcher_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts none of its own, which would measure each other."""
    for name, value in {**LAUNCHED, "PHALANX_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("phalanx.launch.join.join", lambda device, folder: RankContext.alone())
    monkeypatch.setattr("phalanx.launch.join.run_joined", lambda context, target, *given: target(context, *given))
    monkeypatch.setattr(hardware, "WorkerPool", None)
    monkeypatch.setattr(hardware, "answer", lambda *given: 3e9)
    assert main(["profile", "--device", "cpu", "--out", str(tmp_path / "p.json")]) == 0
    said = capsys.readouterr().out
    assert "memory: 3.0 GB/s" in said and "5 measurements written" in said


@pytest.mark.long
def test_in_a_lab_ranks_measure_the_links_between_its_nodes(tmp_path: Path) -> None:
    with Lab("nodes=2,link=1gbit,device=cpu:1thread", logs=tmp_path) as lab:
        assert lab.run([sys.executable, "-m", "phalanx", "profile", "--out", str(tmp_path / "p.json")]) == 0
        limited = lab.effective.link is not None
    rows = read_profile(tmp_path / "p.json")
    (sent,) = [row for row in rows if row.kind == "send" and row.key["size"] == 2**22 and row.key["nodes"] == 2]
    assert sent.value > 2**22 / 125e6 * 0.8 if limited else sent.value > 0
    if limited:
        assert sent.key["network"] == "0.125GB/s"


# What planning makes of it.


def test_rates_that_follow_a_curve_give_it_back() -> None:
    points = [(side, 5e12 * side / (side + 300)) for side in (128, 512, 2048, 8192)]
    assert saturation(points) == (pytest.approx(5e12), pytest.approx(300))
    assert saturation([(256, 1e9)]) == (1e9, 0.0)
    # The larger is the slower: no such curve.
    assert saturation([(128, 2e9), (1024, 1e9)])[0] == 2e9


def test_a_cluster_takes_what_was_measured_in_the_place_of_what_is_published() -> None:
    cluster, software = on_cluster(Cluster.read("4 A100"), Software(), rates())
    (kind,) = cluster.nodes
    assert kind.device.flops.value == pytest.approx(5e12) and kind.device.flops.known == "measured"
    assert kind.device.bandwidth.value == 1e12 and kind.link == pytest.approx(2e9)
    assert software.products == software.memory == software.link == 1
    assert software.small == pytest.approx(150)  # a square is narrow both ways
    assert software.link_latency == pytest.approx(1e-5)
    alone, shares = on_cluster(Cluster.read("4 A100"), Software(), rates(near=Talk(Spread())))
    assert alone.nodes[0].link == DEVICES["A100"].link.value and shares.link == Software().link


def test_devices_are_known_by_their_names() -> None:
    assert is_of("NVIDIA A100-SXM4-80GB", DEVICES["A100"]) and is_of("NVIDIA GeForce RTX 4090", DEVICES["RTX 4090"])
    assert not is_of("NVIDIA A10", DEVICES["A100"]) and not is_of("CPU aarch64, 2 cores", DEVICES["L4"])
    assert is_of("CPU aarch64, 2 cores", DEVICES["CPU"])


def rows_of(device: str, ranks: int, dtype: str = "float32") -> list[Row]:
    asked = [Question("product", 128), Question("product", 512), Question("memory", 64)]
    return [Row(q.kind, key_of(q, device, dtype, Spread(ranks, ranks)), 4e9, "today") for q in asked]


def test_a_run_plans_with_what_was_measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    alone = RankContext.alone()
    assert planned_here(alone, 2**30, "float32")[0].nodes[0].device.flops.known == "assumed"
    Store(profiles_path()).take(rows_of("another CPU", 1) + rows_of(hardware.device_name(CPU), 2))
    assert planned_here(alone, 2**30, "float32")[0].nodes[0].device.flops.known == "assumed"
    Store(profiles_path()).take(rows_of(hardware.device_name(CPU), 1))
    cluster, software = planned_here(alone, 2**30, "float32")
    assert cluster.nodes[0].device.flops.known == "measured" and software.products == 1
    assert planned_here(alone, 2**30, "float64")[0].nodes[0].device.flops.known == "assumed"


# The command.


def test_the_command_measures_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    monkeypatch.setattr(hardware, "answer", lambda *arguments: 3e9)
    file = tmp_path / "p.json"
    assert main(["profile", "--device", "cpu", "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "products in float32" in said and "memory: 3.0 GB/s" in said and "5 measurements written" in said
    foreign = json.loads(file.read_text().replace(hardware.device_name(CPU), "NVIDIA H100"))
    file.write_text(json.dumps(foreign))
    assert main(["profile", "--device", "cpu", "--import", str(file)]) == 0
    assert "not used for it: NVIDIA H100" in capsys.readouterr().out
    assert main(["profile", "--device", "gpu"]) == 2 and "'gpu' is not one of auto" in capsys.readouterr().err
    assert main(["profile", "--device", "cpu", "--fresh"]) == 0


def test_a_plan_for_a_cluster_takes_a_profile_of_its_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    Store(tmp_path / "s").export(file, rows_of("NVIDIA H100 80GB HBM3", 1, "bfloat16"))
    line = ["estimate", "--model", "gpt2", "--plan", "mb=2", "--batch-size", "8", "--json", "--cluster"]
    seconds = []
    for given in (["H100"], ["H100", "--profile", str(file)]):
        assert main([*line, *given]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step_seconds"])
    assert seconds[1] > 1000 * seconds[0]  # 4 GFLOP/s
    assert main([*line, "A100", "--profile", str(file)]) == 2
    assert "is about NVIDIA H100 80GB HBM3 in bfloat16, and the cluster has A100" in capsys.readouterr().err
    Store(tmp_path / "s").export(file, rows_of("NVIDIA H100", 1, "bfloat16")[:2])
    assert main([*line, "H100", "--profile", str(file)]) == 2 and "lacks products or memory" in capsys.readouterr().err
    assert rates_from([], "H100", "bfloat16", Spread()) is None


def test_a_plan_for_devices_that_were_measured_here_takes_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    Store(profiles_path()).take(rows_of("NVIDIA H100 80GB HBM3", 1, "bfloat16"))
    line = ["estimate", "--model", "gpt2", "--plan", "mb=2", "--batch-size", "8", "--json", "--cluster"]
    seconds: dict[str, float] = {}
    for name, given in {"here": ["H100"], "published": ["H100", "--profile", "none"], "other": ["A100"]}.items():
        assert main([*line, *given]) == 0
        said = capsys.readouterr()
        assert ("rates as measured here" in said.err) == (name == "here")
        seconds[name] = json.loads(said.out)["step_seconds"]
    assert seconds["here"] > 1000 * seconds["published"] and seconds["here"] > 1000 * seconds["other"]


ESTIMATE = ("estimate", "--model", "gpt2", "--plan", "dp=8", "--batch-size", "8", "--json", "--cluster")


def estimated(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*ESTIMATE, *given]) == 0
    return json.loads(capsys.readouterr().out)


def made_with(version: str, rows: list[Row], **changes: Any) -> list[Row]:
    return [replace(row, key={**row.key, "torch": version}, **changes) for row in rows]


def test_rows_of_another_version_of_torch_are_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    own, file, given = rows_of("NVIDIA H100 80GB HBM3", 1, "bfloat16"), tmp_path / "p.json", []
    for rows in (own, made_with("2.9.0", own, value=9e9) + own, made_with("2.9.0", own), made_with("2.10.0", own)):
        Store(tmp_path / "s").export(file, rows)
        given.append(estimated(capsys, "8 H100", "--profile", str(file))["step_seconds"])
    assert len(set(given)) == 1
    Store(tmp_path / "s").export(file, made_with("2.9.0", own, value=9e9) + made_with("2.10.0", own))
    assert main([*ESTIMATE, "8 H100", "--profile", str(file)]) == 0
    said = capsys.readouterr()
    assert "rates as measured with torch 2.10.0" in said.err and json.loads(said.out)["step_seconds"] == given[0]
    Store(profiles_path()).take(made_with("2.9.0", own))
    assert main([*ESTIMATE, "8 H100"]) == 0 and "as measured here" not in capsys.readouterr().err


def test_rates_beside_the_nearest_number_of_ranks_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, name = tmp_path / "p.json", "NVIDIA H100"
    seconds = {}
    for ranks in ((4,), (4, 1), (4, 64)):
        rows = [replace(r, value=1e9 * n) for n in ranks for r in rows_of(name, n, "bfloat16")]
        Store(tmp_path / "s").export(file, rows)
        seconds[ranks] = estimated(capsys, "8 H100", "--profile", str(file))["step_seconds"]
    assert len(set(seconds.values())) == 1


def test_an_answer_says_what_of_its_rates_was_measured_and_what_was_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, calibration = tmp_path / "p.json", tmp_path / "c.json"
    Store(tmp_path / "s").export(file, rows_of("NVIDIA H100", 8, "bfloat16"))
    calibration.write_text('{"devices": {"H100": {"software": {"link": 0.5}}}}')
    plan = ("plan", "--model", "gpt2", "--batch-size", "8", "--json", "--cluster", "8 H100")
    said = {}
    for name, given in {"measured": [file], "calibrated": [None, calibration], "both": [file, calibration]}.items():
        options = [word for option, path in zip(("--profile", "--calibration"), given, strict=False)
                   for word in (option, str(path or "none"))]  # fmt: skip
        assert main([*plan, *options]) == 0
        said[name] = json.loads(capsys.readouterr().out)["rates"]
    assert said["measured"].startswith("measured today: products, memory of H100; what was not measured is as")
    assert "assumed shares" in said["measured"] and said["calibrated"] == "calibrated"
    assert said["both"].endswith("times calibrated shares")


def test_of_a_block_that_was_measured_as_two_graphs_the_last_counts() -> None:
    def row(graph: str, made: str, block: str = "layer") -> Row:
        return Row("block forward", {"block": block, "graph": graph}, 1.0, made)

    rows = [row("old", "2026-01-01"), row("new", "2026-02-01"), row("head", "2025-01-01", "head")]
    assert of_newest_graphs(rows) == rows[1:]


def test_float32_is_planned_at_the_rate_of_float32(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["estimate", "--model", "phalanx-demo", "--plan", "mb=1", "--batch-size", "8", "--json", "--cluster"]
    offered: list[float] = []
    for dtype in ("bfloat16", "float32"):
        assert main([*line, "H100", "--profile", "none", "--dtype", dtype]) == 0
        own = json.loads(capsys.readouterr().out)
        offered.append(1 / own["mfu"] / own["step_seconds"])
    assert offered[0] / offered[1] == pytest.approx(DEVICES["H100"].flops.value / 67e12)
