"""Metrics for Prometheus: their text format, and the HTTP port from which Prometheus reads the text."""

import asyncio
import contextlib
import socket
import urllib.error
import urllib.request

import pytest
from waiting import GUARD

from controllers.observe.prometheus import CONTENT_TYPE, Family, MetricsPort, address_of, text
from controllers.service.numbers import prometheus
from controllers.service.open_step import OpenStep
from controllers.service.service import Service


def test_a_name_that_ends_in_total_is_a_counter_and_labels_are_escaped():
    families = [
        Family(name="open", about="open things", numbers={(): 2}),
        Family(name="calls_total", numbers={(("call", 'a"b\\c\n'), ("outcome", "failed")): 0.25}),
    ]
    assert text(families).splitlines() == [
        "# HELP open open things",
        "# TYPE open gauge",
        "open 2.0",
        "# HELP calls_total ",
        "# TYPE calls_total counter",
        r'calls_total{call="a\"b\\c\n",outcome="failed"} 0.25',
    ]


def get(url: str) -> tuple[int, str, str]:
    """(status, content type, body) of a page."""
    try:
        with urllib.request.urlopen(url, timeout=GUARD) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_port_answers_with_the_text_and_survives_an_error():
    texts = iter(["open 1\n", None, "open 2\n"])

    def read() -> str:
        if (found := next(texts)) is None:
            raise RuntimeError("not now")
        return found

    port = MetricsPort("127.0.0.1", 0, read)
    with contextlib.closing(port):
        assert port.url.startswith("http://127.0.0.1:") and port.url.endswith("/metrics")
        assert get(port.url) == (200, CONTENT_TYPE, "open 1\n")
        assert get(port.url)[0] == 503
        assert get(port.url + "?again")[2] == "open 2\n"
        assert get(port.url.replace("/metrics", "/"))[0] == 404
    with pytest.raises(urllib.error.URLError):
        get(port.url)


def test_the_error_of_a_taken_port_names_the_address():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"metrics cannot be served at 127.0.0.1:{port}"):
            MetricsPort("127.0.0.1", port, str)


def test_an_address_is_a_host_and_a_port():
    assert address_of("127.0.0.1:9400") == ("127.0.0.1", 9400)
    assert address_of("[::1]:0") == ("::1", 0)
    for wrong in ("9400", ":9400", "host:", "host:70000", "host:-1", "http://host"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not HOST:PORT"):
            address_of(wrong)


class FakeClient:
    def __init__(self, policy_version: int | None, silent: dict[str, float]) -> None:
        self.policy_version = policy_version
        self.seconds_silent = lambda: silent


class FakeMember:
    def __init__(self, client: FakeClient, *, num_restarts: int = 0, step: OpenStep | None = None) -> None:
        self.client, self.num_restarts, self.step = client, num_restarts, step

    async def leave(self, client) -> None: ...


async def shown_metrics() -> set[str]:
    """The lines of the metrics after calls with every outcome and one open step."""
    step = OpenStep()
    trainer = FakeMember(FakeClient(7, {"trainer-0": 0.5}), step=step)
    service = Service({"trainer": trainer, "generator": FakeMember(FakeClient(None, {}), num_restarts=2)})
    client, gone, waiting = (service.attach("a program", "trainer") for _ in range(3))
    with service.calls.call(client, "forward"):
        pass
    with contextlib.suppress(ValueError), service.calls.call(client, "forward"):
        raise ValueError
    with contextlib.suppress(RuntimeError), service.calls.call(gone, "optim_step"):
        service.leave(gone)
        raise RuntimeError
    await step.enter(client, "forward_backward", 0.0)
    other = asyncio.ensure_future(step.enter(waiting, "forward_backward", GUARD))
    await asyncio.sleep(0)
    with service.calls.call(service.attach("a program", "generator"), "info"):
        lines = (await prometheus(service)).splitlines()
    step.leave(client)
    await other
    return {line.removeprefix("rl_actors_service_") for line in lines if not line.startswith("#")}


def test_the_metrics_of_a_service_count_calls_by_outcome_and_show_the_state_of_each_actor():
    shown = asyncio.run(shown_metrics())
    assert {
        'clients{actor="trainer"} 2.0',
        'calls_total{actor="trainer",call="forward",outcome="answered"} 1.0',
        'calls_total{actor="trainer",call="forward",outcome="failed"} 1.0',
        'calls_total{actor="trainer",call="optim_step",outcome="left"} 1.0',
        'calls_running{actor="generator"} 1.0',
        'calls_running{actor="trainer"} 0.0',
        'calls_waiting{actor="trainer"} 1.0',
        'policy_version{actor="trainer"} 7.0',
        'restarts_total{actor="generator"} 2.0',
        'step_open_seconds{actor="generator"} 0.0',
        'silent_seconds{actor="trainer",process="trainer-0"} 0.5',
    } <= shown
    names = {line.split("{")[0].split(" ")[0] for line in shown}
    assert {"up_seconds", "call_seconds_total", "step_open_seconds"} <= names
    assert not any(line.startswith('policy_version{actor="generator') for line in shown)
    assert 'step_open_seconds{actor="trainer"} 0.0' not in shown
