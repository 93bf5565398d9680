"""Opens a page in headless Chromium, in a frame, because a browser's window is never as narrow as a phone."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

from waiting import GUARD

# `look` is the body of a function of (page, found) that adds what it finds in the page's document. PROBE uses the first chart as a reader does.
FRAME = """<!doctype html><iframe src="{page}" style="border:0;width:{width}px;height:3000px"></iframe><pre id="found"></pre>
<script>
const page = () => document.querySelector("iframe").contentDocument;
function probe(figure) {{
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect(), view = page().defaultView;
  const send = (type, part) => svg.dispatchEvent(new view.PointerEvent(type, {{
    clientX: box.left + part * box.width, clientY: box.top + 60, bubbles: true, button: 0, pointerId: 1}}));
  const axis = (name) => [...svg.querySelectorAll("text." + name)].map((text) => text.textContent);
  const before = axis("x"), values = axis("y");
  send("pointermove", 0.5);
  const tip = figure.querySelector(".tip"), hover = tip.hidden ? "" : tip.textContent;
  const {{left, right}} = tip.getBoundingClientRect(), inside = left >= 0 && right <= page().documentElement.clientWidth;
  for (const [type, part] of [["pointerdown", 0.6], ["pointermove", 0.9], ["pointerup", 0.9]]) send(type, part);
  const zoomed = axis("x");
  svg.dispatchEvent(new view.MouseEvent("dblclick", {{bubbles: true}}));
  return {{before, values, hover, inside, zoomed, reset: axis("x")}};
}}
function inspect() {{
  const root = page().documentElement, figures = [...page().querySelectorAll(".chart:not([hidden])")];
  const texts = figures.flatMap((figure) => [...figure.querySelectorAll("svg text")]);
  const found = {{width: root.clientWidth, needed: root.scrollWidth, titles: figures.map((figure) => figure.querySelector("b").textContent)}};
  found.heights = texts.map((text) => text.getBoundingClientRect().height);
  found.boxes = [...page().querySelectorAll("body *")].filter((each) => each.scrollWidth > each.clientWidth + 1
    && ["auto", "scroll"].includes(getComputedStyle(each).overflowX)).map((each) => each.className || each.tagName);
  found.charts = figures.map(probe);
  (function (page, found) {{ {look} }})(page(), found);
  document.getElementById("found").textContent = JSON.stringify(found);
}}
let left = 50;
function wait() {{
  if (page().querySelector(".chart path.line") || left-- === 0) inspect();
  else setTimeout(wait, 50);
}}
addEventListener("load", wait);
</script>"""


def frame(page: str, width: int, look: str = "") -> str:
    return FRAME.format(page=page, width=width, look=look)


def browse(url: str, width: int, folder: Path, *flags: str) -> dict:
    """Open the address of a frame and return what its script finds. Fails if the page writes anything to the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "this test needs a browser: apt-get install -y chromium"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, 500)},3000", *flags]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    [found] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(unescape(found))


def require_readable(found: dict, width: int) -> None:
    """The page fits the width without a horizontal scroll, and each chart has numbers at its axes, shows values and can be zoomed."""
    assert found["width"] == width and found["needed"] <= width, "the page is wider than the screen"
    assert found["boxes"] == [], "a box scrolls horizontally"
    assert found["charts"] and min(found["heights"]) >= 8, "a text in a chart is missing or less than 8 pixels high"
    for title, chart in zip(found["titles"], found["charts"], strict=True):
        assert len(chart["before"]) > 0 and len(chart["values"]) > 1, title
        assert chart["reset"] == chart["before"] != chart["zoomed"], title
