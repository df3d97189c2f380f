from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.observe.runlog import RunLog, json_line, read_log
from phalanx.observe.story import story


def test_records_carry_time_and_kind_and_read_back_in_order(tmp_path: Path):
    before = time.time()
    with RunLog(tmp_path / "run", rank=3) as log:
        log.write("start", model="gpt2", data=("a", "b"))
        log.write("step", step=1, loss=2.5)
    records = read_log(tmp_path / "run" / "log-rank3.jsonl")
    assert [record["kind"] for record in records] == ["start", "step"]
    assert records[0]["data"] == ["a", "b"] and records[1]["loss"] == 2.5
    assert all(before - 0.01 <= record["time"] <= time.time() + 0.01 for record in records)


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path):
    log = RunLog(tmp_path, rank=0)
    log.write("step", step=1)
    assert read_log(log.path)[0]["step"] == 1
    log.close()


def test_a_killed_process_loses_nothing(tmp_path: Path):
    code = (
        "import os, signal; from phalanx.observe.runlog import RunLog\n"
        f"log = RunLog({str(tmp_path)!r}, 0)\n"
        "for step in range(50): log.write('step', step=step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60)
    assert [record["step"] for record in read_log(tmp_path / "log-rank0.jsonl")] == list(range(50))


@given(cut=st.integers(1, 60))
def test_appending_after_a_torn_line_keeps_all_whole_records(tmp_path_factory: pytest.TempPathFactory, cut: int):
    folder = tmp_path_factory.mktemp("log")
    with RunLog(folder, rank=0) as log:
        log.write("first")
        whole = log.path.stat().st_size
        log.write("torn", text="é" * 40)
    os.truncate(log.path, whole + cut)
    with RunLog(folder, rank=0) as log:
        log.write("after")
    assert [record["kind"] for record in read_log(log.path)] == ["first", "after"]


def test_a_line_that_lost_only_its_newline_is_kept(tmp_path: Path):
    with RunLog(tmp_path, rank=0) as log:
        log.write("first")
    os.truncate(log.path, log.path.stat().st_size - 1)
    with RunLog(tmp_path, rank=0) as log:
        log.write("second")
    assert [record["kind"] for record in read_log(log.path)] == ["first", "second"]


def test_a_number_left_of_a_torn_line_is_not_a_record(tmp_path: Path):
    (tmp_path / "log.jsonl").write_text('12\n{"kind": "step"}\n')
    assert read_log(tmp_path / "log.jsonl") == [{"kind": "step"}]


def test_numbers_json_lacks_are_texts_that_float_reads():
    line = json_line({"loss": math.nan, "inner": {"values": [math.inf, -math.inf, 1.5]}})
    record = json.loads(line, parse_constant=pytest.fail)
    assert math.isnan(float(record["loss"]))
    assert [float(value) for value in record["inner"]["values"]] == [math.inf, -math.inf, 1.5]


# What ends lines somewhere, or looks as if; the tables of all that there is take seconds to make.
TEXT = st.text(st.sampled_from("aé\\\"'\n\r\t\v\f\x00\x1c\x1d\x1e\x85\u2028\u2029𝄞\ud800"))


@given(st.dictionaries(TEXT, st.none() | st.booleans() | st.integers() | TEXT | st.floats(allow_nan=False)))
def test_a_json_line_is_one_line(record: dict[str, object]):
    assert len(json_line(record).splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run log .*log-rank0.jsonl cannot be written: ") as caught:
        RunLog(tmp_path / "file" / "run", rank=0)
    assert "option out" in caught.value.hint


def test_a_story_leaves_damaged_records_out_and_says_so() -> None:
    finish = {"kind": "finish", "time": 3.0, "loss": 3.0}
    *told, last = story([{"kind": "step", "time": "x"}, {"kind": "finish", "time": 1e300, "loss": 1.0}, finish])
    assert len(told) == 1 and told[0].endswith("the run ended with loss 3.0000")
    assert last == "2 damaged records left out"
