"""Pictures of timelines: bars, text, SVG and PNG."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.observe.program_files import svg, ticks, write_png
from phalanx.observe.program_text import MOST_STRIPS, bars_of, chart, duration_text, lanes_of
from phalanx.plan.plan import Plan
from phalanx.predict.costs import uniform
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Event, Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import from_text
from phalanx.program.shape import ModelShape

SVG = "{http://www.w3.org/2000/svg}"


def simulated(plan: Plan, send: float = 0.0) -> Timeline:
    n = sum(plan.stages)
    shape = ModelShape(n, (), (True,) * n, (True,) * n)
    return simulate(compile_plan(plan, shape), uniform(shape, send=send))


def lines(timeline: Timeline, width: int = 80) -> list[str]:
    return [line.plain for line in chart(timeline, timeline.ranks, width)]


TWO = Plan(pp=2, mb=2, stages=(1, 1))


def test_the_blocks_of_a_stage_are_one_bar_and_instant_events_none():
    bars = bars_of(simulated(Plan(mb=2, schedule="gpipe", stages=(3,))))
    assert [(bar.title, bar.start, bar.end) for bar in bars] == [
        ("F0.0", 0, 3), ("F0.1", 3, 6), *[(f"BW0.{i}", 6 + 6 * n, 12 + 6 * n) for n, i in enumerate(_backwards(bars))],
    ]  # fmt: skip
    assert lanes_of(bars) == ("compute",)


def _backwards(bars) -> list[str]:
    return [bar.label for bar in bars if bar.op == "BW"]


def test_bars_that_are_apart_in_time_stay_apart():
    (first,) = from_text("F0.0/0")
    (second,) = from_text("F0.0/1")
    timeline = Timeline((Event(0, first, 5, 6), Event(0, second, 8, 9)))
    assert [(bar.start, bar.end) for bar in bars_of(timeline)] == [(0, 1), (3, 4)]


def test_messages_have_a_lane_of_their_own_when_they_take_time():
    assert lanes_of(bars_of(simulated(TWO, send=0.5))) == ("compute", "messages")


def test_the_chart_shows_each_rank_over_time():
    assert lines(simulated(TWO)) == [
        "rank 0 F0-F1-······B0----···B1----",
        "rank 1 ···F0-B0----F1-B1----······",
        "F forward, B backward, · idle",
    ]


def test_the_chart_names_stages_where_a_rank_has_several():
    rows = lines(simulated(Plan(pp=2, mb=2, schedule="interleaved", stages=(1,) * 4)), width=160)
    assert rows[0].startswith("rank 0 F0.0-F0.1-F2.0-F2.1-")
    assert rows[1].startswith("rank 1 ·····F1.0-F1.1-F3.0-")


def test_the_chart_goes_on_in_the_next_strip_and_never_past_the_width():
    assert lines(simulated(TWO), width=21)[:-1] == [
        "rank 0 F0-F1-······B0",
        "rank 1 ···F0-B0----F1",
        "",
        "rank 0 ----···B1----",
        "rank 1 -B1----······",
    ]


def test_a_long_step_is_squeezed_into_so_many_strips():
    rows = lines(simulated(Plan(pp=2, mb=64, stages=(1, 1))), width=40)
    assert len([row for row in rows if row.startswith("rank 0")]) == MOST_STRIPS


def test_a_timeline_without_computations_has_no_chart():
    assert chart(Timeline(()), (), 80) == []


def test_the_svg_has_a_bar_for_each_instruction_below_a_title_for_each_timeline():
    timeline = simulated(TWO, send=0.25)
    root = ElementTree.fromstring(svg({"predicted": timeline, "measured <1>": timeline}))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) == 2 * len(bars_of(timeline))
    assert "F0.1  1 s + 1 s" in titles and "SF0.0>1  1 s + 250 ms" in titles
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert f"predicted: {timeline.makespan:g} s, bubble {timeline.mean_bubble:.1%}" in texts
    assert any(text and text.startswith("measured <1>: ") for text in texts)
    assert {"rank 0", "rank 1", "forward", "weight gradients"} <= set(texts)


def test_the_timelines_of_one_picture_share_a_scale():
    slow = Timeline(
        tuple(Event(e.rank, e.instruction, 2 * e.start, 2 * e.end, e.resource) for e in simulated(TWO).events)
    )
    root = ElementTree.fromstring(svg({"predicted": simulated(TWO), "measured": slow}))
    widths = [float(bar.get("width", "0")) for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    half = len(widths) // 2
    assert widths[half:] == pytest.approx([2 * width for width in widths[:half]], abs=0.02)


def test_an_empty_timeline_is_an_empty_picture():
    assert ElementTree.fromstring(svg({"measured": Timeline(())})).tag == f"{SVG}svg"


@given(st.floats(1e-7, 1e7))
def test_ticks_are_few_and_reach_the_end(makespan: float):
    marks = ticks(makespan)
    step = marks[1] - marks[0]
    assert 3 <= len(marks) <= 11
    assert marks[0] == 0 and makespan - step * 1.001 <= marks[-1] <= makespan * 1.001


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 µs"), (4.8e-4, "480 µs"), (0.0312, "31.2 ms"), (1.25, "1.25 s"), (86.712, "86.71 s")]
)
def test_durations_have_the_digits_that_one_step_needs(seconds: float, text: str):
    assert duration_text(seconds) == text


def test_a_png_needs_matplotlib_and_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError) as error:
        write_png({"predicted": simulated(TWO)}, tmp_path / "step.png")
    assert error.value.message == "option png needs matplotlib, which is not installed"
    assert error.value.hint == f"{sys.executable} -m pip install matplotlib, or use --svg"


def test_the_png_is_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    timeline = simulated(TWO, send=0.25)
    write_png({"predicted": timeline, "measured": timeline}, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
