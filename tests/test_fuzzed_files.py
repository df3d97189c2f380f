"""Files that are damaged or made to do damage, thousands of them: each is read, or is one of our errors, and nothing
hangs. With the messages of tests/launch/test_store.py they are more than 10,000."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phalanx.config import RunConfig
from phalanx.data.sources import BrokenData, read_file
from phalanx.data.text import _fields
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import PhalanxError
from phalanx.model import capture
from phalanx.model.weights.weights import SafetensorsWeights
from phalanx.observe import requests
from phalanx.observe.runlog import read_log
from phalanx.observe.story import story
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.rates import Spread
from phalanx.planning.runs import COLUMNS, read_runs
from phalanx.predict.timeline import Timeline
from phalanx.profile.store import Row, Store, rates_from, read_profile
from phalanx.state import checkpoint
from phalanx.state.dcp import DcpWeights
from phalanx.state.lock import LOCK_FILE, RunLock, read_holder
from phalanx.state.tensor_files import checksum
from phalanx.tasks.base import BrokenRecord
from phalanx.tasks.causal_lm import CausalLM
from phalanx.tasks.conversations import encode_record
from phalanx.written import read_mapping, read_plan
from tests.test_hostile import dcp_folder, model

NUM_FUZZED = 200  # of each kind


def good_checkpoint(folder: Path) -> Path:
    return checkpoint.save(folder, 1, [("model/w", torch.ones(3, 2)), ("model/b", torch.ones(2))], {"a": 1}, keep=1)


def read_checkpoint(path: Path) -> None:
    found = checkpoint.open(path)
    for name in found.names():
        found.read(name)


def read_with_new_checksum(path: Path) -> None:
    """As after somebody who can write checksums, too."""
    state, marker = path / "state.json", json.loads((path / "COMPLETE").read_text())
    marker["files"]["state.json"] |= {"size": state.stat().st_size, "sha256": checksum(state)}
    (path / "COMPLETE").write_text(json.dumps(marker))
    read_checkpoint(path)


def weights_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(model().state_dict(), folder / "model-1.safetensors")
    names = dict.fromkeys(("weight", "bias"), "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def locked(folder: Path) -> Path:
    with RunLock(folder):
        text = (folder / LOCK_FILE).read_bytes()
    (folder / LOCK_FILE).write_bytes(text)
    return folder


def config_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    RunConfig().save(folder / "run.yaml")
    return folder


def written(name: str, text: str) -> Callable[[Path], Path]:
    """Makes a folder with one file."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        return folder

    return make


def answered(folder: Path) -> Path:
    folder.mkdir(parents=True)
    requests.Inbox(folder).answer(requests.Request("0", "pp=2"), requests.Answer("pp=2", 3, seconds=0.5, bytes=10))
    return folder


MEASURED = [
    Row(kind, {"device": "H", "ranks": 1, "devices": 1, "nodes": 1, "dtype": "f", "size": 8}, 2.0, "now")
    for kind in ("product", "memory")
]
LOG = [
    {"kind": "start", "time": 1.0, "header": {"plan": "mb=2: two"}, "first_step": 0, "total_steps": 3},
    {"kind": "step", "time": 2.0, "step": 1, "loss": 3.5, "step_seconds": 0.1},
    {
        "kind": "change",
        "time": 2.0,
        "step": 2,
        "plan": "pp=2",
        "old": "dp=2",
        "how": "asked for",
        "bytes": 5,
        "seconds": 0.1,
    },
    {"kind": "checkpoint", "time": 2.0, "path": "here"},
    {"kind": "finish", "time": 3.0, "loss": 3.0},
]
CHAT = [
    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "tools": "[]"},
    {"instruction": "say", "output": "so"},
    {"prompt": "a", "completion": "b"},
]
RUN = dict.fromkeys(COLUMNS, "1") | {"gpu": "A100", "recompute": "none", "dtype": "bf16", "hidden": "64", "layers": "2"}


def lines(records: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def profiled(folder: Path) -> Path:
    Store(folder / "profiles.sqlite").take(MEASURED)
    return folder


def exported(folder: Path) -> Path:
    folder.mkdir(parents=True)
    Store(folder / "unused").export(folder / "profile.json", MEASURED)
    return folder


def read_answer(folder: Path) -> None:
    (folder / "change-00.json").write_bytes((folder / "change-0.json").read_bytes())  # which is gone after it is read
    requests.wait_for(folder, requests.Request("00", "pp=2"), 0.0)


def encode_all(path: Path) -> None:
    for record in read_file(path, BrokenData("skip")):
        with contextlib.suppress(BrokenRecord):
            encode_record(_fields(record, CausalLM(), "text"), ByteTokenizer())


# What is made, which of its files is changed, how it is read.
FUZZED: dict[str, tuple[Callable[[Path], Path], str, Callable[[Path], object]]] = {
    "marker": (good_checkpoint, "COMPLETE", read_checkpoint),
    "index": (good_checkpoint, "state.json", read_with_new_checksum),
    "torch's index": (dcp_folder, ".metadata", lambda path: DcpWeights(path, model()).read("weight")),
    "weights' index": (weights_folder, "model.safetensors.index.json", lambda p: SafetensorsWeights(p, model())),
    "weights": (weights_folder, "model-1.safetensors", lambda p: SafetensorsWeights(p, model()).read("weight")),
    "lock": (locked, LOCK_FILE, read_holder),
    "options": (config_folder, "run.yaml", lambda path: RunConfig.load(path / "run.yaml")),
    "plan": (written("plan.json", Plan(pp=2, mb=4).to_json()), "plan.json", lambda path: read_plan(path / "plan.json")),
    "plan's text": (
        written("plan", "pp=2,tp=2,mb=4,schedule=1f1b,degrees=2*1+1*3,recompute=block*2+light*2"), "plan",
        lambda path: Plan.parse((path / "plan").read_bytes().decode(errors="replace")),
    ),
    "plan in a log": (
        written("p", Plan(tp=2).to_json()), "p", lambda path: Plan.from_json((path / "p").read_text(errors="replace"))
    ),
    "request": (
        written("change.json", '{"name": "ab12", "plan": "pp=2,mb=4"}'), "change.json",
        lambda path: requests.Inbox(path).take(),
    ),
    "answer": (answered, "change-0.json", read_answer),
    "log": (written("log", lines(LOG)), "log", lambda path: [*story(read_log(path / "log"))]),
    "profile": (
        exported, "profile.json",
        lambda path: rates_from(read_profile(path / "profile.json"), "H", "f", Spread()),
    ),
    "profiles": (profiled, "profiles.sqlite", lambda path: Store(path / "profiles.sqlite").rows()),
    "cluster": (
        written("c.json", '{"nodes": [{"count": 2, "devices": 8, "device": "H100", "network": 400e9}], "price": 2}'),
        "c.json", lambda path: Cluster.take(read_mapping(path / "c.json")),
    ),
    "runs": (
        written("runs.csv", f"{','.join(RUN)}\n{','.join(RUN.values())}\n"), "runs.csv",
        lambda path: read_runs(path / "runs.csv"),
    ),
    "timeline": (
        written("t", Timeline((), ({"a": 1},)).to_json()), "t",
        lambda path: Timeline.from_json((path / "t").read_text(errors="replace")),
    ),
    "conversations": (written("chat.jsonl", lines(CHAT)), "chat.jsonl", lambda path: encode_all(path / "chat.jsonl")),
    "records": (written("chat.json", json.dumps(CHAT)), "chat.json", lambda path: encode_all(path / "chat.json")),
    "captures": (
        written("c.json", '{"blocks": {"blocks": [], "templates": {}, "prologue": ""}, "notes": []}'), "c.json",
        lambda path: capture._read(path / "c.json"),
    ),
}  # fmt: skip


def mutated(source: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut off, doubled, or replaced by what breaks parsers."""
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8))):
        at = source.randrange(len(changed) + 1)
        kind = source.randrange(6)
        if kind == 0:
            changed[at : at + 1] = bytes([source.randrange(256)])
        elif kind == 1:
            del changed[at : at + source.randrange(1, 40)]
        elif kind == 2:
            changed[at:at] = changed[at : at + source.randrange(1, 40)]
        elif kind == 3:
            changed[at : at + 1] = source.choice((b"-1", b"9" * 30, b"null", b"[]", b"{", b'"', b"NaN", b"1e999"))
        elif kind == 4:
            changed[at:at] = b"[" * source.randrange(1, 2000)
        else:
            del changed[at:]
    return bytes(changed)


@pytest.mark.parametrize("kind", FUZZED)
def test_fuzzed_files_give_our_errors_only(tmp_path: Path, kind: str):
    make, name, read = FUZZED[kind]
    folder, source = make(tmp_path / "made"), random.Random(kind)
    good = (folder / name).read_bytes()
    for _ in range(NUM_FUZZED if kind != "options" else NUM_FUZZED // 2):  # YAML is slow
        (folder / name).write_bytes(mutated(source, good))
        with contextlib.suppress(PhalanxError):
            read(folder)
