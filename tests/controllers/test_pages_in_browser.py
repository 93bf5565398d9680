"""The report of a run and the comparison of runs in a real browser, as wide as a phone and as a large screen."""

import json
from pathlib import Path

import pytest
from browser import browse, frame, require_readable
from test_report import episodes, grpo_record, whole_run, write_run

from controllers.observe.compare import write_comparison
from controllers.observe.report import write_report

# A group is a prompt with its completions. The script filters the page's groups as a user does.
LOOK = """
  const shown = () => [...page.querySelectorAll(".group")].filter((group) => !group.hidden).map((group) => group.dataset.step);
  const form = page.getElementById("filter");
  const choose = (name, value) => {
    form.elements[name].value = value;
    form.dispatchEvent(new page.defaultView.Event("input"));
    found.groups.push(shown());
  };
  found.groups = [shown()];
  found.turns = [...page.querySelectorAll(".turn")].map((turn) => {
    const {left, right} = turn.querySelector("span").getBoundingClientRect(), cell = turn.parentElement.getBoundingClientRect();
    return [turn.className, turn.textContent, Math.round(left - cell.left), Math.round(cell.right - right)];
  });
  const Chart = page.defaultView.eval("Chart"), drawn = new Chart(page.body.appendChild(page.createElement("figure")));
  const lengthen = (last) => {
    const x = [...Array(last + 1).keys()];
    drawn.show({title: "", unit: "", x: "step", scale: "linear", curves: [{name: "a", color: "blue", x, y: x}]});
    return [...drawn.svg.querySelectorAll("text.x")].map((text) => Number(text.textContent.replace(",", "")));
  };
  const whole = lengthen(10);
  drawn.zoom([2, 4]);
  found.growing = [whole, lengthen(1000)];
  drawn.reset.click();
  found.growing.push(lengthen(2000));
  if (form) for (const [name, value] of [["step", ""], ["rewards", "equal"], ["rewards", ""], ["text", "D5"]]) choose(name, value);
"""

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("width", [420, 1400])]


def open_page(page: Path, width: int, folder: Path) -> dict:
    file = folder / f"frame-{width}.html"
    file.write_text(frame(page.resolve().as_uri(), width, LOOK))
    return browse(file.as_uri(), width, folder, "--allow-file-access-from-files")


def test_a_report_fits_a_phone_and_a_wide_screen_and_its_groups_can_be_filtered(tmp_path, width):
    folder = whole_run(tmp_path / "run")
    write_report(folder.path)
    found = open_page(folder.report, width, tmp_path)
    require_readable(found, width)
    # Each list has the steps of the groups that the page shows. At first these are the groups of the last step. The script then chooses all
    # groups, the groups with equal rewards, all groups again, and the groups with the text "d5" in small or capital letters.
    assert found["groups"] == [["6"], ["3", "4", "5", "6"], ["4"], ["3", "4", "5", "6"], ["5"]]


def test_a_chart_has_axes_shows_the_values_under_the_pointer_and_is_zoomed_by_dragging(tmp_path, width):
    records = [grpo_record(step) | {"loss": step / 10, "phase": "grpo", "mine": 2000 * step} for step in range(1, 102)]
    folder = write_run(tmp_path / "run", records)
    write_report(folder.path)
    found = open_page(folder.report, width, tmp_path)
    require_readable(found, width)
    charts = dict(zip(found["titles"], found["charts"], strict=True))
    loss = charts["Loss, grpo"]
    assert loss["before"] == (["20", "40", "60", "80", "100"])
    assert loss["values"] == ["0", "2", "4", "6", "8", "10"]
    assert loss["hover"].startswith("step 4") and "loss 4." in loss["hover"] and loss["inside"]
    assert min(int(step) for step in loss["zoomed"]) >= 50 and len(loss["zoomed"]) >= 3
    assert "reward 0.5 ± 0.2" in charts["Reward"]["hover"]
    assert "low side 0.1" in charts["Clipped tokens"]["hover"] and "high side 0.2" in charts["Clipped tokens"]["hover"]
    assert charts["mine"]["values"][-1] == "200,000"
    assert charts["Logprob difference of trainer and generator"]["values"] == ["1e-6", "1e-5"]
    # A chart that gets new points keeps its zoomed range until the reset.
    first, zoomed, reset = found["growing"]
    assert first[-1] == 10 and set(zoomed) == {2, 3, 4} and reset[-1] == 2000
    assert {"generator", "trainer"} == set(charts["Step 76: who works when"]["values"])


def test_an_episode_is_drawn_as_a_conversation_with_the_rewarded_turns_of_the_policy_at_the_right(tmp_path, width):
    folder = whole_run(tmp_path / "run")
    folder.rollouts.write_text(json.dumps(episodes(6)) + "\n")
    write_report(folder.path)
    found = open_page(folder.report, width, tmp_path)
    require_readable(found, width)
    texts = [(name, text) for name, text, _, _ in found["turns"]]
    assert texts[:4] == [
        ("turn environment", "?"),
        ("turn policy", "05"),  # the reward 0, and then the text "5" of the turn
        ("turn environment", "+"),
        ("turn policy", "1<7>"),
    ]
    for name, _, to_left, to_right in found["turns"]:
        assert (to_right < to_left) == (name == "turn policy"), "only the policy's turns stand at the right"


def test_a_comparison_of_runs_fits_a_phone_and_a_wide_screen(tmp_path, width):
    folders = [whole_run(tmp_path / name).path for name in ("first", "second")]
    write_comparison(folders, tmp_path / "compare.html")
    found = open_page(tmp_path / "compare.html", width, tmp_path)
    require_readable(found, width)
    charts = dict(zip(found["titles"], found["charts"], strict=True))
    assert "first 0.5" in charts["Reward"]["hover"] and "second 0.5" in charts["Reward"]["hover"]
