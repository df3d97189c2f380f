"""Measurements of devices: what is asked, how it is kept, what becomes of broken or foreign files, and what planning
makes of it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.planning.cluster import Cluster
from phalanx.planning.collectives import Links, all_reduce, consecutive
from phalanx.planning.cost import Software
from phalanx.planning.devices import DEVICES
from phalanx.planning.rates import Rates, is_of, on_cluster, saturation
from phalanx.prepare.here import planned_here
from phalanx.profile import hardware
from phalanx.profile.hardware import Question, key_of, measure, measure_on_rank, questions, rates_of
from phalanx.profile.store import Row, Store, profiles_path, rates_from, read_profile

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

    def measured(context: RankContext, kind: str, size: int, dtype: str) -> float:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((kind, size))
        return 1e9

    monkeypatch.setattr(hardware, "measure_on_rank", measured)
    store, progress = Store(tmp_path / "p.sqlite"), list[tuple[int, int]]()
    with pytest.raises(KeyboardInterrupt):
        measure(store, "cpu", "float32", 1)
    asked_before, asked[:] = list(asked), []
    rates = measure(store, "cpu", "float32", 1, lambda done, of: progress.append((done, of)))
    assert [*asked_before, *asked] == [(q.kind, q.size) for q in questions("cpu", 1)]
    assert progress[0] == (3, 5) and progress[-1] == (5, 5) and rates.bandwidth == 1e9
    assert rates_of(store.rows(), rates.device, "float64", 1) is None


@pytest.mark.parametrize(("kind", "size"), [("product", 32), ("memory", 2**16)])
def test_a_rank_alone_measures_rates(kind: str, size: int) -> None:
    assert measure_on_rank(RankContext.alone(), kind, size, "float32") > 0


def test_ranks_measure_collectives_together(pool: Any) -> None:
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send", "product"):
        found = pool.run(measure_on_rank, kind, 64, "float32", world=2)
        assert len(found) == 2 and min(found) > 0


def test_questions_are_of_what_there_is() -> None:
    assert {q.kind for q in questions("cpu", 1)} == {"product", "memory"}
    assert {q.kind for q in questions("cuda", 2)} == {
        "product", "memory", "host", "all_reduce", "all_gather", "reduce_scatter", "send", "computing",
        "computing beneath", "all_reduce beneath",
    }  # fmt: skip
    assert [q.size for q in questions("cpu", 4) if q.kind == "computing"] == [2, 3, 4]


def test_ranks_measure_what_they_do_to_each_other(pool: Any) -> None:
    for kind in ("computing", "computing beneath", "all_reduce beneath"):
        found = pool.run(measure_on_rank, kind, 2, "float32", world=2)
        assert all(0 < speed <= 1 for speed in found), kind


def test_computation_loses_to_communication_what_was_measured() -> None:
    slowed = rates(speeds={"computing beneath": ((4.0, 0.85),)})
    assert on_cluster(Cluster.read("4 A100"), Software(), slowed)[1].contention == pytest.approx(0.15)
    assert on_cluster(Cluster.read("4 A100"), Software(), rates())[1].contention == Software().contention


# What planning makes of it.


def test_rates_that_follow_a_curve_give_it_back() -> None:
    points = [(side, 5e12 * side / (side + 300)) for side in (128, 512, 2048, 8192)]
    assert saturation(points) == (pytest.approx(5e12), pytest.approx(300))
    assert saturation([(256, 1e9)]) == (1e9, 0.0)
    # The larger is the slower: no such curve.
    assert saturation([(128, 2e9), (1024, 1e9)])[0] == 2e9


def rates(**changes: Any) -> Rates:
    links = Links(2e9, 1e9, 4, 1e-5)
    sums = tuple((size, all_reduce(links, consecutive(4, 1, 4), size)) for size in (1e5, 1e6, 1e7))
    products = tuple((side, 5e12 * side / (side + 300)) for side in (128, 512, 2048))
    given: dict[str, Any] = {"device": "NVIDIA A100-SXM4-80GB", "dtype": "bfloat16", "ranks": 4, "products": products,
                             "bandwidth": 1e12, "collectives": {"all_reduce": sums}}  # fmt: skip
    return Rates(**given | changes)


def test_a_cluster_takes_what_was_measured_in_the_place_of_what_is_published() -> None:
    cluster, software = on_cluster(Cluster.read("4 A100"), Software(), rates())
    (kind,) = cluster.nodes
    assert kind.device.flops.value == pytest.approx(5e12) and kind.device.flops.known == "measured"
    assert kind.device.bandwidth.value == 1e12 and kind.link == pytest.approx(2e9)
    assert software.products == software.memory == software.link == 1
    assert software.small == pytest.approx(150)  # a square is narrow both ways
    assert software.link_latency == pytest.approx(1e-5)
    alone, shares = on_cluster(Cluster.read("4 A100"), Software(), rates(ranks=1, collectives={}))
    assert alone.nodes[0].link == DEVICES["A100"].link.value and shares.link == Software().link


def test_devices_are_known_by_their_names() -> None:
    assert is_of("NVIDIA A100-SXM4-80GB", DEVICES["A100"]) and is_of("NVIDIA GeForce RTX 4090", DEVICES["RTX 4090"])
    assert not is_of("NVIDIA A10", DEVICES["A100"]) and not is_of("CPU aarch64, 2 cores", DEVICES["L4"])
    assert is_of("CPU aarch64, 2 cores", DEVICES["CPU"])


def rows_of(device: str, ranks: int, dtype: str = "float32") -> list[Row]:
    asked = [Question("product", 128), Question("product", 512), Question("memory", 64)]
    return [Row(q.kind, key_of(q, device, dtype, ranks), 4e9, "today") for q in asked]


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
    monkeypatch.setattr(hardware, "measure_on_rank", lambda *arguments: 3e9)
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
    assert rates_from([], "H100", "bfloat16", 1) is None


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
