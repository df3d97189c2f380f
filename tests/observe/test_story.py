"""What `phalanx history` says of each kind of record."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import counted
from phalanx.observe.story import loss_words, story

LOSS = {
    "step": 7, "lost": ["rank 1 (stage 1) was killed by signal SIGKILL in step 7 at F1.0"], "how": "shrink",
    "plan": "mb=2", "source": "copies of step 5 in the memory of the ranks that were left",
    "why": "nobody else held model/a", "bytes": 2048, "seconds": 0.25,
}  # fmt: skip
MIRROR = {"kind": "mirror", "step": 4, "every": 2, "bytes": 2**20, "moved": 5, "seconds": 0.1}
COPIED = "what one rank alone holds is copied into other ranks' memory every 2 steps (1.0 MiB on rank 0)"
SPIKE = "the loss of step 9 is a spike: going back to step-00000008, and leaving 1 batch out"


def told(*records: dict[str, Any]) -> list[str]:
    """Without the times."""
    return [line.partition("  ")[2] for line in story({"time": 1e9, **record} for record in records)]


def test_a_count_is_said_in_the_number_that_it_has() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(number, "batch", "batches") for number in (1, 3)] == ["1 batch", "3 batches"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kind": "start", "header": {"plan": "dp=2: two"}, "first_step": 0, "total_steps": 1},
         "the run began, 1 step, with plan dp=2"),
        ({"kind": "start", "header": {"plan": "dp=2: two"}, "first_step": 4, "total_steps": 9},
         "the run went on after step 4 of 9, with plan dp=2"),
        ({"kind": "plan", "plan": "dp=2,mb=1", "chosen": "auto", "reason": "dp=2: 0.1 s a step"},
         "why this plan (auto): dp=2: 0.1 s a step"),
        ({"kind": "ahead", "step": 5, "plan": "mb=2", "seconds": 1.25},
         "plan mb=2 made ready for the loss of ranks, in 1.2s"),
        (MIRROR, COPIED),
        ({"kind": "mirror", "step": 4, "none": "no rank holds anything alone"},
         "no copies in other ranks' memory: no rank holds anything alone"),
        ({"kind": "checkpoint", "path": "run/checkpoints/step-00000004"}, "saved in run/checkpoints/step-00000004"),
        ({"kind": "not_saved", "step": 4, "message": "the disk is full"},
         "step 4 could not be saved: the disk is full"),
        ({"kind": "stop", "signal": "SIGTERM", "step": 4}, "stopped by SIGTERM after step 4"),
        ({"kind": "ended", "step": 4, "reason": "asked for (stop)"}, "ended after step 4: asked for (stop)"),
        ({"kind": "rollback", "message": SPIKE, "checkpoint": "step-00000008", "passed_over": 4}, SPIKE),
        ({"kind": "error", "error": "DataError", "message": "sample 3 is broken"}, "failed: sample 3 is broken"),
        ({"kind": "lost", "records": 1}, "1 record could not be written here"),
        ({"kind": "finish", "loss": 3.5}, "the run ended with loss 3.5000"),
    ],
)  # fmt: skip
def test_a_record_has_its_words(record: dict[str, Any], words: str) -> None:
    assert told(record) == [words]


def test_a_change_of_plan_has_its_words_made_or_refused() -> None:
    change = {"kind": "change", "step": 5, "old": "dp=2", "plan": "pp=2", "how": "asked for while it ran"}
    refused = {**change, "refused": "pp=2 does not fit"}
    made = {**change, "batch_size": 8, "bytes": 2048, "seconds": 0.5, "bits": ["plan", "device"]}
    assert told(refused, made) == [
        "step 5: plan dp=2 → pp=2 (asked for while it ran) was refused and the old one stays: pp=2 does not fit",
        "step 5: plan dp=2 → pp=2 (asked for while it ran), batch_size 8: 2.0 KiB moved, a pause of 500ms; plan and "
        "device changed, so bits may differ from here on, within verify's tolerance",
    ]


def test_one_rank_goes_on_and_one_step_is_made_again() -> None:
    said = [loss_words({**LOSS, "ranks": number, "repeated": number}) for number in (1, 2)]
    assert said[0].startswith(
        "rank 1 (stage 1) was killed by signal SIGKILL in step 7 at F1.0; 1 rank goes on (shrink) before step 7 with "
        "plan mb=2: state from copies of step 5 in the memory of the ranks that were left (nobody else held model/a), "
        "1 step is made again, 2.0 KiB moved, 250ms after it was noticed"
    )
    assert "; 2 ranks go on (shrink) before" in said[1] and ", 2 steps are made again, " in said[1]
    assert "made again" not in loss_words({**LOSS, "ranks": 1, "repeated": 0})


def test_steps_that_updated_nothing_are_counted() -> None:
    lost, made = ({"kind": "step", "step": number, "loss": 4.0, "step_seconds": 0.1} for number in (1, 2))
    assert told(lost | {"skipped": True}) == ["step 1: loss 4.0000, 100ms, skipped"]
    assert told(lost | {"skipped": True}, made) == [
        "steps 1 to 2: loss 4.0000 to 4.0000, 100ms each, 1 of them skipped"
    ]


def test_copies_are_told_of_where_what_is_said_of_them_is_new() -> None:
    steps = [{"kind": "step", "step": number, "loss": 4.0 - number, "step_seconds": 0.1} for number in (1, 2, 3)]
    records = [steps[0], MIRROR, steps[1], {**MIRROR, "step": 6}, steps[2], {**MIRROR, "every": 1}]
    assert told(*records) == [
        "step 1: loss 3.0000, 100ms",
        COPIED,
        "steps 2 to 3: loss 2.0000 to 1.0000, 100ms each",
        COPIED.replace("every 2 steps", "every step"),
    ]


def test_what_ended_the_run_stands_for_what_rank_0_met_of_it() -> None:
    met = {"kind": "error", "error": "LinkError", "message": "rank 0 waits for rank 1"}
    ended = {"kind": "error", "error": "RankError", "message": "rank 1 was killed", "of_run": True}
    start = {"kind": "start", "header": {}, "first_step": 4, "total_steps": 9}
    assert told(met, ended) == ["failed: rank 1 was killed"]
    assert told(ended, {**ended, "message": "node 1 lost node 0"}) == [
        "failed: rank 1 was killed", "failed: node 1 lost node 0",
    ]  # fmt: skip
    assert told(met, start, ended)[0] == "failed: rank 0 waits for rank 1", "it was of another start of the run"
