"""Runs that others measured: what is read of a row, and what is fitted to runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planning.calibrate import fit, step_seconds
from phalanx.planning.cost import Software, machines
from phalanx.planning.footprint import place_blocks
from phalanx.planning.runs import COLUMNS, Run, read_run

ROW = dict.fromkeys(COLUMNS, "") | {
    "source": "here", "model": "gpt", "layers": "24", "hidden": "2048", "heads": "16", "vocab": "51200",
    "seq_len": "1024", "gpu": "A100-80GB", "n_gpus": "8", "gpus_per_node": "8", "tp": "1", "pp": "1", "cp": "1",
    "dp": "8", "micro_batch": "4", "global_batch": "64", "recompute": "full", "measured_iter_s": "0.6",
}  # fmt: skip


def run(**given: object) -> Run:
    return read_run(ROW | {name: str(value) for name, value in given.items()})


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_run_has_embedding_layers_and_head_with_and_without_a_pipeline(pp: int) -> None:
    own = run(pp=pp, dp=8 // pp)
    assert sum(own.plan.stages) == len(own.work.blocks) == 26
    assert [block for place in range(pp) for block in place_blocks(own.plan, place)] == list(range(26))


def test_scores_that_are_written_are_moved_and_more_where_some_are_dropped() -> None:
    layers = [run(notes=f"kernel={kernel}").work.classes[1] for kernel in ("flash_attention2", "fused", "torch")]
    assert layers[0].scores == 0 < layers[1].scores < layers[2].scores
    fused = run(model="llama", notes="kernel=fused").work.classes[1]
    assert fused.scores < layers[1].scores  # without dropout


def test_a_fit_finds_what_runs_were_made_with_whatever_one_of_them_says() -> None:
    made = Software(products=0.6, small=250.0, micro_batch=1e-3)
    meshes = [(1, 1, 8), (1, 2, 4), (2, 1, 4), (1, 8, 1), (4, 2, 1)]
    runs = [run(pp=pp, tp=tp, dp=dp, micro_batch=size) for pp, tp, dp in meshes for size in (1, 2, 4)]
    timed = [replace(own, seconds=step_seconds(own, made)) for own in runs]
    wrong = [replace(timed[0], seconds=3 * (timed[0].seconds or 0.0)), *timed[1:]]
    for given in (timed, wrong):
        found = fit(given)
        errors = [abs(step_seconds(own, found) / (own.seconds or 1.0) - 1) for own in timed[1:]]
        assert max(errors) < 0.03


def test_a_fused_softmax_takes_heads_in_fours_and_others_are_started_kernel_by_kernel() -> None:
    split = {"tp": 8, "dp": 1, "notes": "kernel=fused"}
    two, four = (run(**split, micro_batch=samples).work.classes[1] for samples in (1, 2))
    assert (two.apart, four.apart) == (1.0, 0.0)
    assert two.scores > four.scores


def test_products_in_eight_bits_are_half_the_work_of_layers_alone() -> None:
    wide, narrow = run(dtype="bf16"), run(dtype="FP8-CS")
    assert (wide.bits, narrow.bits) == (16, 8)
    embedding, layer, head = (narrow.work.classes[i].products / (wide.work.classes[i].products or 1) for i in range(3))
    assert (embedding, layer, head) == (0, 0.5, 1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dtype": "NVFP4"}, "products in other than 16 or 8 bits"),
        ({"notes": "LoRA, packed sequences"}, "adapters of which more is not known"),
        *(
            ({"measured_iter_s": own}, "a measured_iter_s that is no number above 0")
            for own in ("0", "-3", "nan", "2,5 s")
        ),
        ({"measured_iter_s": "", "measured_tokens_per_s": "0"}, "a measured_tokens_per_s that is no number above 0"),
        ({"gpu": "GB300"}, r"a device that is not known \(GB300\)"),
    ],
)
def test_rows_that_are_left_out_say_why(given: dict[str, str], why: str) -> None:
    with pytest.raises(Exception, match=f"^{why}$"):
        run(**given)


def test_ranks_that_meet_at_sums_wait_for_kernels_that_ranks_alone_do_not() -> None:
    """Where a host takes as long to start kernels as a device to run them."""
    alone, meeting = run(), run(tp=2, dp=4, micro_batch=8)
    for own, more in ((alone, 2 ** (1 / 6)), (meeting, 2**0.4)):
        layer = own.work.classes[1]
        still = replace(Software(), launch=0.0, call=0.0)
        busy = machines(own.cluster, still, own.plan, 4)[0].seconds(layer, "none").forward
        alike = replace(still, launch=busy / layer.units)
        found = machines(own.cluster, alike, own.plan, 4)[0].seconds(layer, "none").forward
        assert found == pytest.approx(more * busy)
