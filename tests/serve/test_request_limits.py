"""Requests that are large, many or slow: their limits, and what they leave for other requests."""

import asyncio
import json
import threading
from functools import partial

import numpy as np
import pytest
import uvicorn
from serving import VOCABULARY, forward_backward_body

from controllers.serve import bodies, command, samples
from controllers.serve.beside import SMALL_BYTES

WIDE = [
    ([1, 2], {"target_tokens": [[2, 3, 4, 5], [3, 4, 5, 6]], "weights": [[1.0, 0.5, 0.25, 2.0]] * 2}),
    ([1], {"target_tokens": [[7]], "weights": [[0.5]]}),
    ([2, 3], {"target_tokens": [[7, 8, 9], [1, 2, 3]], "weights": [[0.5, 1.0, -1.0]] * 2}),
    ([1], {"target_tokens": [[9]], "weights": [[3.0]]}),
]
"""Datums with 4, 1, 3 and 1 targets for each position."""


def test_datums_of_many_widths_have_the_gradient_the_logprobs_and_the_metrics_of_requests_of_their_own(api):
    async def use(api):
        together, apart = await api.create_model(0), await api.create_model(1)
        rows, metrics = await api.forward_backward(together, 1, WIDE)
        single = [await api.forward_backward(apart, 1 + index, [datum]) for index, datum in enumerate(WIDE)]
        assert [row.shape for row in rows] == [(2, 4), (1, 1), (2, 3), (1, 1)]
        for row, (alone, _) in zip(rows, single, strict=True):
            assert np.array_equal(row, alone[0])
        assert metrics["loss:sum"] == pytest.approx(sum(each["loss:sum"] for _, each in single), rel=1e-6)
        positions = [2, 1, 2, 1]
        means = [each["logprob:mean"] * count for (_, each), count in zip(single, positions, strict=True)]
        assert metrics["logprob:mean"] == pytest.approx(sum(means) / 6, rel=1e-6)
        norms = [(await api.optim_step(model, 9))["metrics"]["unclipped_grad_l2:mean"] for model in (together, apart)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert [each.calls.count("forward_backward") for each in api.trainers] == [2, 4]

    api(use)


def test_a_wrong_datum_of_the_second_group_is_named_and_adds_no_gradient(api):
    async def use(api):
        model = await api.create_model()
        wrong = [*WIDE[:3], ([VOCABULARY], WIDE[3][1])]
        error = await api.error(await api.send_forward_backward(model, 1, wrong))
        assert "datum 3" in error and str(VOCABULARY) in error
        assert "forward_backward" not in api.trainers[0].calls
        await api.forward_backward(model, 2, WIDE[:1])
        answer = await api.optim_step(model, 3)
        other = await api.create_model(1)
        await api.forward_backward(other, 1, WIDE[:1])
        assert answer == await api.optim_step(other, 2)

    api(use)


def test_an_answer_that_could_be_too_large_is_refused_before_anything_is_sampled(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        params = {"max_tokens": 60}
        error = await api.error(await api.send_sample(sampler, 1, num_samples=21, params=params))
        assert "answer of 10080 bytes; it must have at most 10000 (max_answer_bytes)" in error
        error = await api.error(
            await api.send_sample(sampler, 2, topk_sample_logprobs=10, num_samples=3, params=params)
        )
        assert "answer of 15840 bytes" in error
        assert len((await api.sample(sampler, 3, num_samples=20, params=params)).sequences) == 20

    api(use, max_answer_bytes=10_000)


@pytest.mark.parametrize(
    ("stop", "place"),
    [
        ("x" * 2000, "at most 1024 characters"),
        (["x"] * 300, "at most 256 items"),
        (list(range(300)), "at most 256 items"),
        (["ok", "x" * 2000], "at most 1024 characters"),
    ],
)
def test_long_stops_and_many_stops_are_refused(api, stop, place):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        body = {
            "sampling_session_id": sampler,
            "seq_id": 1,
            "prompt": {"chunks": []},
            "sampling_params": {"stop": stop},
        }
        reply = await api.http.post("/asample", json=body)
        assert reply.status_code == 422 and place in reply.text and len(reply.content) < 5000

    api(use)


def test_a_body_with_many_faults_gets_a_short_answer(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        body = {"sampling_session_id": sampler, "seq_id": 1, "sampling_params": {}}
        for chunks in ([{"tokens": ["a"] * 100_000}], [{"tokens": 1}] * 100_000, [{}] * 100_000, ["x" * 1_000_000]):
            reply = await api.http.post("/asample", json=body | {"prompt": {"chunks": chunks}})
            assert reply.status_code == 422 and len(reply.content) < 5000, reply.text[:300]
        unknown = {f"field {index}": 1 for index in range(100_000)}
        reply = await api.http.post("/asample", json=unknown)
        assert reply.status_code == 422 and "the object has 100000 fields; at most 64" in reply.text
        reply = await api.http.post("/create_session", json={"user_metadata": {"note": "x" * 70_000}})
        assert reply.status_code == 422 and "user_metadata has 700" in reply.text and len(reply.content) < 5000

    api(use)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_with_a_number_that_is_not_finite_is_refused(api, number):
    async def use(api):
        text = f'{{"user_metadata": {{"a": {number}}}}}'
        reply = await api.http.post("/create_session", content=text, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400 and number in reply.text
        # The server goes on, and no list of sessions has such a number.
        json.loads((await api.http.get("/sessions")).text, parse_constant=pytest.fail)

    api(use)


def test_json_bodies_have_a_limit_of_their_own(api):
    async def use(api):
        body = json.dumps({"tags": ["x" * 3000]})
        reply = await api.http.post("/create_session", content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 413 and "max_json_bytes=2000" in reply.text

    api(use, max_json_bytes=2000)


def test_large_bodies_are_decoded_beside_the_event_loop_and_small_ones_at_once(api, monkeypatch):
    threads = []

    def noted(function):
        def call(*args):
            threads.append(threading.current_thread().name.partition("_")[0])
            return function(*args)

        return call

    monkeypatch.setattr(bodies, "_decoded", noted(bodies._decoded))
    monkeypatch.setattr("controllers.serve.routes.read_call", noted(samples.read_call))

    async def use(api):
        threads.clear()
        model, sampler = await api.create_model(), await api.sampler(base_model="letters")
        datum = ([1] * 60, {"target_tokens": [2] * 60})
        await api.forward_backward(model, 1, [datum])
        assert set(threads) == {"MainThread"}
        threads.clear()
        await api.forward_backward(model, 2, [datum] * 100)
        prompt = {"chunks": [{"tokens": [1] * SMALL_BYTES}]}
        fields = {"sampling_session_id": sampler, "seq_id": 1, "sampling_params": {}, "prompt": prompt}
        assert "tokens; max_model_len=64" in await api.error(await api.post("asample", **fields))
        assert threads.count("large requests") == 2

    api(use)


def test_training_data_that_waits_for_a_trainer_is_bounded_and_the_request_may_come_again(api):
    async def use(api):
        model = await api.create_model()
        api.trainers[0].gate.clear()
        datum = ([1] * 60, {"target_tokens": [2] * 60})
        first = await api.send_forward_backward(model, 1, [datum] * 60)  # 60 datums of 20 bytes for each position
        body = forward_backward_body(model, 2, [datum] * 60, "cross_entropy")
        headers = {"Content-Type": "application/x-protobuf"}
        reply = await api.http.post("/forward_backward", content=body, headers=headers)
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1" and "max_bytes_in_flight" in reply.text
        api.trainers[0].gate.set()
        await api.output(first)
        await api.output((await api.http.post("/forward_backward", content=body, headers=headers)).json())
        assert api.server.futures.waiting_bytes == 0

    api(use, max_bytes_in_flight=100_000, max_body_bytes=60_000)


# Connections


class Running:
    """A server with fake actors behind a real port."""

    def __init__(self, api) -> None:
        config = uvicorn.Config(api.app, port=0, log_level="warning", http=command.Connection)
        self.http = uvicorn.Server(config)

    async def __aenter__(self):
        self.serving = asyncio.create_task(self.http.serve())
        while not self.http.started:
            await asyncio.sleep(0.01)
        self.port = self.http.servers[0].sockets[0].getsockname()[1]
        return partial(asyncio.open_connection, "127.0.0.1", self.port)

    async def __aexit__(self, *_) -> None:
        self.http.should_exit = True
        await self.serving


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("begin", [b"", HEALTH, HEALTH + b"\r\n" + HEALTH])
def test_a_connection_whose_headers_stay_away_is_closed(api, monkeypatch, begin):
    monkeypatch.setattr(command, "HEADER_SECONDS", 0.2)

    async def use(api):
        async with Running(api) as connect:
            reader, writer = await connect()
            writer.write(begin)
            answer = await reader.read()  # ends when the server closes the connection
            assert answer.count(b"200 OK") == begin.count(b"\r\n\r\n")
            writer.close()

    api(use)


def test_headers_of_endless_length_close_their_connection(api):
    async def use(api):
        async with Running(api) as connect:
            reader, writer = await connect()
            writer.write(b"GET /healthz HTTP/1.1\r\nX: ")
            with pytest.raises(ConnectionError):
                for _ in range(10_000):
                    writer.write(b"x" * 10_000)
                    await writer.drain()
                    await asyncio.sleep(0)
                await reader.read()
            writer.close()

    api(use)


def test_a_body_that_stays_away_is_answered_with_408(api, monkeypatch):
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.2)

    async def use(api):
        async with Running(api) as connect:
            reader, writer = await connect()
            writer.write(BODY + b"half")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 408") and b"no byte of the body came for 0.2 seconds" in answer
            writer.close()

    api(use)


def test_a_slow_answer_is_no_slow_body(api, monkeypatch):
    """After the body, the server listens for the end of the connection for as long as the answer takes."""
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(command, "HEADER_SECONDS", 0.05)

    async def use(api):
        model = await api.create_model()
        api.trainers[0].gate.clear()
        promise = await api.send_forward_backward(model, 1, [([1], {"target_tokens": [2]})])
        body = json.dumps({"request_id": promise["request_id"]}).encode()
        async with Running(api) as connect:
            reader, writer = await connect()
            head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + body)
            assert (await reader.read()).startswith(b"HTTP/1.1 408")
            writer.close()
        api.trainers[0].gate.set()

    api(use, hold_seconds=0.5)


def test_bodies_under_way_are_bounded_together(api):
    async def use(api):
        async with Running(api) as connect:
            writers = []
            for _ in range(3):
                _, writer = await connect()
                writer.write(BODY.replace(b"100", b"6000") + b"x" * 4000)
                writers.append(writer)
            reader, writer = await connect()
            writer.write(BODY.replace(b"100", b"4000") + b"x" * 4000)
            writers.append(writer)
            answers = [asyncio.create_task(reader.readuntil(b"\r\n"))]
            assert b"503" in await answers[0]
            for writer in writers:
                writer.close()

    api(use, max_bytes_in_flight=15_000, max_body_bytes=10_000)
