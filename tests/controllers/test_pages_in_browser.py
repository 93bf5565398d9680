"""Tests of the report of a run and of the comparison of runs in a real browser. Headless Chromium opens each page in a frame as wide as a
phone, and in a frame as wide as a large screen."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from test_report import episodes, whole_run
from waiting import GUARD

from controllers.observe.compare import write_comparison
from controllers.observe.report import write_report

# The page is in a frame, because a browser's window is never as narrow as a phone. A group is a prompt with its completions. The script filters
# the page's groups as a user does, and writes its findings into the element `found`, which is outside the frame.
FRAME = """<!doctype html><iframe src="{page}" style="border:0;width:{width}px;height:3000px"></iframe><pre id="found"></pre>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const shown = () => [...page.querySelectorAll(".group")].filter((group) => !group.hidden).map((group) => group.dataset.step);
  const found = {{width: root.clientWidth, needed: root.scrollWidth, groups: [shown()], charts: []}};
  const form = page.getElementById("filter");
  const choose = (name, value) => {{
    form.elements[name].value = value;
    form.dispatchEvent(new page.defaultView.Event("input"));
    found.groups.push(shown());
  }};
  found.turns = [...page.querySelectorAll(".turn")].map((turn) => {{
    const {{left, right}} = turn.querySelector("span").getBoundingClientRect(), cell = turn.parentElement.getBoundingClientRect();
    return [turn.className, turn.textContent, Math.round(left - cell.left), Math.round(cell.right - right)];
  }});
  if (form) {{
    choose("step", "");
    choose("rewards", "equal");
    choose("rewards", "");
    choose("text", "D5");
  }}
  for (const text of page.querySelectorAll("svg text")) found.charts.push(text.getBoundingClientRect().height);
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


def open_page(page: Path, width: int, folder: Path) -> dict:
    """Open a page at this width and return the script's findings. Fails if the page writes anything to the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "this test needs a browser: apt-get install -y chromium"
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(page=page.resolve().as_uri(), width=width))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += [f"--window-size={max(width, 500)},3000", "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(unescape(found))


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1400])
def test_a_report_fits_a_phone_and_a_wide_screen_and_its_groups_can_be_filtered(tmp_path, width):
    folder = whole_run(tmp_path / "run")
    write_report(folder.path)
    found = open_page(folder.report, width, tmp_path)
    assert found["width"] == width and found["needed"] <= width, "the page is wider than the screen"
    # Each list has the steps of the groups that the page shows. At first these are the groups of the last step. The script then chooses all
    # groups, the groups with equal rewards, all groups again, and the groups with the text "d5" in small or capital letters.
    assert found["groups"] == [["6"], ["3", "4", "5", "6"], ["4"], ["3", "4", "5", "6"], ["5"]]
    assert len(found["charts"]) > 100 and min(found["charts"]) >= 8, (
        "a text in a chart is missing or less than 8 pixels high"
    )


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1400])
def test_an_episode_is_drawn_as_a_conversation_with_the_rewarded_turns_of_the_policy_at_the_right(tmp_path, width):
    folder = whole_run(tmp_path / "run")
    folder.rollouts.write_text(json.dumps(episodes(6)) + "\n")
    write_report(folder.path)
    found = open_page(folder.report, width, tmp_path)
    assert found["width"] == width and found["needed"] <= width, "the page is wider than the screen"
    texts = [(name, text) for name, text, _, _ in found["turns"]]
    assert texts[:4] == [
        ("turn environment", "?"),
        ("turn policy", "05"),  # the reward 0, and then the text "5" of the turn
        ("turn environment", "+"),
        ("turn policy", "1<7>"),
    ]
    for name, _, to_left, to_right in found["turns"]:
        assert (to_right < to_left) == (name == "turn policy"), "only the policy's turns stand at the right"


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1400])
def test_a_comparison_of_runs_fits_a_phone_and_a_wide_screen(tmp_path, width):
    folders = [whole_run(tmp_path / name).path for name in ("first", "second")]
    write_comparison(folders, tmp_path / "compare.html")
    found = open_page(tmp_path / "compare.html", width, tmp_path)
    assert found["width"] == width and found["needed"] <= width, "the page is wider than the screen"
    assert len(found["charts"]) > 100 and min(found["charts"]) >= 8, (
        "a text in a chart is missing or less than 8 pixels high"
    )
