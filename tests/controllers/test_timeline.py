"""The timeline of a step says when the trainer and the generator work. Tests of its spans, its busy shares, its record and two charts."""

import asyncio

import pytest

from controllers.observe import charts, timeline
from controllers.observe.logger import Timer
from controllers.observe.timeline import Span, StepTimeline, Timeline
from controllers.rollouts.groups import Generating


class Clock:
    """A fake clock. The timeline reads `now` instead of time.perf_counter, and a test sets `now`."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: clock.now)
    return clock


def test_the_phase_sync_is_work_of_both_actors_and_the_phase_generate_is_work_of_neither(clock):
    spans = Timeline()
    with spans.span("generate"):
        clock.now += 1
    with spans.span("sync"):
        clock.now += 2
    step = spans.end_step()
    assert step.seconds == 3 and step.busy() == pytest.approx({"trainer": 2 / 3, "generator": 2 / 3})


def test_a_span_that_outlasts_its_step_is_divided_between_two_steps(clock):
    spans = Timeline()
    with spans.span("generating"):
        clock.now += 4
        first = spans.end_step()
        clock.now += 1
    clock.now += 1
    second = spans.end_step()
    assert first.spans == [Span(actor="generator", phase="generating", start=0.0, end=4.0)]
    assert second.spans == [Span(actor="generator", phase="generating", start=0.0, end=1.0)]
    assert first.busy() == {"generator": 1.0} and second.busy() == {"generator": 0.5}


def test_overlapping_calls_count_once_in_the_busy_share():
    rows = [(0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 7.0)]
    spans = [Span(actor="generator", phase="generating", start=start, end=end) for start, end in rows]
    assert StepTimeline(seconds=10.0, spans=spans).busy() == {"generator": 0.5}


def test_a_timer_and_the_calls_of_the_generator_fill_one_timeline(clock):
    timer = Timer()

    async def generate() -> None:
        async with Generating(timer.timeline).call():
            clock.now += 1

    asyncio.run(generate())
    with timer("train"):
        clock.now += 3
    step = timer.timeline.end_step()
    assert step.record() == {
        "seconds": 4.0,
        "spans": [["generator", "generating", 0.0, 1.0], ["trainer", "train", 1.0, 4.0]],
    }


def test_the_timeline_chart_shows_the_step_of_median_duration_in_the_second_half_of_the_run():
    lines = []
    for step, seconds in enumerate((50.0, 60.0, 3.0, 9.0, 5.0), start=1):
        lines.append({"step": step, "seconds": seconds, "spans": [["trainer", "train", 0.0, seconds]]})
    chart = charts.timeline_chart(lines)
    assert chart["title"] == "Step 5: who works when"
    assert chart["spans"] == [{"row": "trainer", "name": "train", "color": "blue", "from": 0.0, "to": 5.0}]
    assert charts.timeline_chart([]) is charts.timeline_chart([{"step": 1, "seconds": 1.0, "spans": []}]) is None


def test_the_ages_chart_is_drawn_only_if_a_group_has_an_age_above_0():
    fresh = {"step": 1, "phase": "grpo", "age/max": 0, "age/0": 4}
    old = {"step": 2, "phase": "grpo", "age/max": 2, "age/2": 3, "age/0": 1}
    assert charts.run_charts([fresh]) == []
    [chart] = charts.run_charts([fresh, old])
    assert [(curve["name"], curve["y"]) for curve in chart["curves"]] == [("age 0", [4, 1]), ("age 2", [3])]
    assert all(curve["stacked"] for curve in chart["curves"])
