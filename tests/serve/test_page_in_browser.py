"""The status page of the Tinker server in a real browser. Headless Chromium opens the page of a server whose actors are fakes."""

import asyncio
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from waiting import GUARD

pytestmark = pytest.mark.slow
DATUM = ([1, 2], {"target_tokens": [2, 3]})


class Tables(HTMLParser):
    """Reads a page. `texts` is {id of a table body: [texts of the cells of each row]}. `curves` is {id of an element:
    [number of points of each curve in the element]}.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: dict[str, list[list[str]]] = {}
        self.curves: dict[str, list[int]] = {}
        self.within, self.in_cell = "", False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.within = "" if tag == "thead" else found.get("id", self.within)
        if tag == "tr" and self.within:
            self.texts.setdefault(self.within, []).append([])
        if tag == "td":
            self.in_cell = True
            self.texts[self.within][-1].append("")
        if tag == "polyline":
            self.curves.setdefault(self.within, []).append(len(found["points"].split()))

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag != "td"

    def handle_data(self, data):
        if self.in_cell:
            self.texts[self.within][-1][-1] += data


def browse(url: str, folder: Path, width: int) -> tuple[str, set[str]]:
    """Open a page. Returns the HTML after the page's JavaScript has run, and the hosts to which the page sent requests.

    Requests that the browser makes for itself, for example for updates, do not count. Fails if the page writes to the
    console. The browser can reach only this machine.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium, "this test needs a browser: apt-get install -y chromium"
    log = folder / "net.json"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=3000", f"--window-size={width},1400"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", f"--screenshot={folder / 'page.png'}"]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=GUARD)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    requests = [each["url"] for each in events if str(each.get("initiator", "")).startswith(url.rstrip("/"))]
    return done.stdout, {urlsplit(each).netloc for each in requests}


async def busy(api):
    """Make two runs on the server, train the first run, sample from its weights, and send a request of the second run.

    The second run's fake trainer does not answer, so this request stays in the queue. Returns the runs' ids.
    """
    first, second = await api.create_model(0), await api.create_model(1, rank=4)
    for step in range(3):
        api.server.measure(5.0 * step)
        await api.forward_backward(first, 2 * step + 1, [DATUM])
        await api.optim_step(first, 2 * step + 2)
    promise = await api.post("save_weights_for_sampler", model_id=first, path="seven", seq_id=7)
    path = (await api.answer(promise))["path"]
    await api.sample(await api.sampler(model_path=path), 1, params={"max_tokens": 4, "stop": []})
    api.server.curves[first].losses.append(float("-inf"))  # a loss that is not finite breaks no other number
    api.trainers[1].gate.clear()
    await api.send_forward_backward(second, 1, [DATUM])
    return first, second


@pytest.mark.parametrize("width", [500, 1400])
def test_the_page_shows_models_queue_versions_speeds_and_curves(api, tmp_path, width):
    async def use(api):
        first, second = await busy(api)
        http = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="warning"))
        serving = asyncio.create_task(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        [socket] = http.servers[0].sockets
        address = f"127.0.0.1:{socket.getsockname()[1]}"
        page, hosts = await asyncio.to_thread(browse, f"http://{address}/", tmp_path, width)
        policy = (await httpx.AsyncClient().get(f"http://{address}/")).headers["content-security-policy"]
        http.should_exit = True
        await serving
        api.trainers[1].gate.set()

        assert hosts == {address} and "default-src 'none'" in policy
        tables = Tables(page)
        assert ["name", "letters"] in tables.texts["model"] and ["vocabulary", "16"] in tables.texts["model"]
        [queue] = tables.texts["queue"]
        assert queue[:2] == ["forward_backward", "1"]
        runs = {row[0]: row for row in tables.texts["runs"]}
        assert runs[first][2:5] == ["0", "in memory", "3"] and runs[second][2:5] == ["4", "in memory", "0"]
        # The first run has a curve of losses and a curve of gradient norms. A curve of rates has a point for each interval between two
        # measurements.
        assert tables.curves["runs"] == [3, 3] and tables.curves["sampled"] == tables.curves["trained"] == [2]
        versions = tables.texts["versions"]
        assert [row[1:] for row in versions] == [
            [f"tinker://{first}/sampler_weights/seven", "in the generator"],
            ["the base model", ""],
        ]
        assert ["sampled tokens total", "4"] in tables.texts["numbers"]
        assert (tmp_path / "page.png").stat().st_size > 10_000

    api(use)
