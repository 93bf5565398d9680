"""The status page of the Tinker server in a real browser, with actors that are fakes."""

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from browser import browse, frame, require_readable
from fastapi.responses import HTMLResponse

pytestmark = pytest.mark.slow
DATUM = ([1, 2], {"target_tokens": [2, 3]})
LOOK = """
  found.tables = {};
  for (const body of page.querySelectorAll("tbody")) found.tables[body.id] = [...body.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
  found.clock = page.getElementById("clock").textContent;
  found.error = page.getElementById("error").textContent;
  found.runs = {};
  for (const run of page.querySelectorAll(".run")) {
    const lines = [...run.querySelectorAll("path.line")].map((line) => line.getAttribute("d").split("L").length);
    found.runs[run.querySelector("h3").textContent] = {facts: run.querySelector("p").textContent, lines};
  }
"""


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


def requested_hosts(log: Path, address: str) -> set[str]:
    """The hosts to which the page sent requests. Requests that the browser makes for itself do not count."""
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    requests = [each["url"] for each in events if str(each.get("initiator", "")).startswith(f"http://{address}")]
    return {urlsplit(each).netloc for each in requests}


@pytest.mark.parametrize("width", [420, 1400])
def test_the_page_shows_models_queue_versions_speeds_and_curves(api, tmp_path, width):
    async def use(api):
        first, second = await busy(api)
        api.app.get("/frame")(lambda: HTMLResponse(frame("/", width, LOOK)))
        http = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="warning"))
        serving = asyncio.create_task(http.serve())
        while not http.started:
            await asyncio.sleep(0.01)
        [socket] = http.servers[0].sockets
        address, log = f"127.0.0.1:{socket.getsockname()[1]}", tmp_path / "net.json"
        flags = [f"--log-net-log={log}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        found = await asyncio.to_thread(browse, f"http://{address}/frame", width, tmp_path, *flags)
        policy = (await httpx.AsyncClient().get(f"http://{address}/")).headers["content-security-policy"]
        http.should_exit = True
        await serving
        api.trainers[1].gate.set()

        assert requested_hosts(log, address) == {address} and "default-src 'none'" in policy
        require_readable(found, width)
        assert re.fullmatch(r"updated \d\d:\d\d:\d\d", found["clock"]) and found["error"] == ""
        tables = found["tables"]
        assert ["name", "letters"] in tables["model"] and ["vocabulary", "16"] in tables["model"]
        [queue] = tables["queue"]
        assert queue[:2] == ["forward_backward", "1"]
        # The first run has a curve of losses and a curve of gradient norms.
        runs = found["runs"]
        assert runs[first]["lines"] == [3, 3] and runs[second]["lines"] == []
        assert runs[first]["facts"] == "letters · trains all weights · in memory · 3 steps · loss not finite"
        assert runs[second]["facts"] == "letters · trains LoRA adapters of rank 4 · in memory · 0 steps"
        assert [row[1:] for row in tables["versions"]] == [
            [f"tinker://{first}/sampler_weights/seven", "in the generator"],
            ["the base model", ""],
        ]
        assert ["sampled tokens since the start", "4"] in tables["numbers"]
        charts = dict(zip(found["titles"], found["charts"], strict=True))
        assert all(re.fullmatch(r"\d\d:\d\d:\d\d", text) for text in charts["Trained tokens"]["before"])
        assert "Trained tokens 0.4" in charts["Trained tokens"]["hover"]
        assert charts["Gradient norm, before clipping"]["before"] == ["1", "2", "3"]
        assert charts["Gradient norm, before clipping"]["hover"].startswith("optim_step 2Gradient norm")

    api(use)
