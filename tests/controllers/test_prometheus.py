"""Metrics for Prometheus: their text format, and the HTTP port from which Prometheus reads the text."""

import contextlib
import socket
import urllib.error
import urllib.request

import pytest
from waiting import GUARD

from controllers.observe.prometheus import CONTENT_TYPE, Family, MetricsPort, address_of, text
from controllers.service.counts import CallCounts, MemberNumbers, ServiceNumbers
from controllers.service.numbers import prometheus
from controllers.service.open_step import AttachedClient


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


def test_the_metrics_of_a_service_count_calls_by_outcome_and_show_the_state_of_each_actor():
    calls = CallCounts()
    client, gone = (AttachedClient(number=number, name="a program", member="trainer") for number in (1, 2))
    with calls.call(client, "forward"):
        pass
    with contextlib.suppress(ValueError), calls.call(client, "forward"):
        raise ValueError
    with contextlib.suppress(RuntimeError), calls.call(gone, "optim_step"):
        gone.has_left = True
        raise RuntimeError
    members = {
        "trainer": MemberNumbers(policy_version=7, step_open_for=1.5, silent={"trainer-0": 0.5}),
        "generator": MemberNumbers(policy_version=None, restarts=2),
    }
    with calls.call(AttachedClient(number=3, name="a program", member="generator"), "info"):
        numbers = ServiceNumbers(
            up_for=60.0,
            clients={"trainer": 3, "generator": 0},
            waiting={"trainer": 1, "generator": 0},
            calls=calls,
            members=members,
        )
        lines = prometheus(numbers).splitlines()
    shown = {line.removeprefix("rl_actors_service_") for line in lines if not line.startswith("#")}
    assert {
        "up_seconds 60.0",
        'clients{actor="trainer"} 3.0',
        'calls_total{actor="trainer",call="forward",outcome="answered"} 1.0',
        'calls_total{actor="trainer",call="forward",outcome="failed"} 1.0',
        'calls_total{actor="trainer",call="optim_step",outcome="left"} 1.0',
        'calls_running{actor="generator"} 1.0',
        'calls_running{actor="trainer"} 0.0',
        'calls_waiting{actor="trainer"} 1.0',
        'policy_version{actor="trainer"} 7.0',
        'restarts_total{actor="generator"} 2.0',
        'step_open_seconds{actor="trainer"} 1.5',
        'silent_seconds{actor="trainer",process="trainer-0"} 0.5',
    } <= shown
    assert not any(line.startswith('policy_version{actor="generator') for line in shown)
