"""Requests that are large, many or slow: their limits, and what they leave for other requests."""

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import uvicorn
from fastapi import HTTPException
from serving import VOCABULARY, forward_backward_body

from controllers.tinker_server import bodies, command, samples
from controllers.tinker_server.access import ANYONE
from controllers.tinker_server.beside import SMALL_BYTES

JSON = {"Content-Type": "application/json"}


def nested(depth: int) -> object:
    value: object = {}
    for _ in range(depth):
        value = [value]
    return {"a": value} if depth < 32 else value


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
        for chunks in ([{"tokens": ["a"] * 90_000}], [{"tokens": 1}] * 60_000, [{}] * 100_000, ["x" * 1_000_000]):
            reply = await api.http.post("/asample", json=body | {"prompt": {"chunks": chunks}})
            assert reply.status_code == 422 and len(reply.content) < 5000, reply.text[:300]
        unknown = {f"field {index}": 1 for index in range(90_000)}
        reply = await api.http.post("/asample", json=unknown)
        assert reply.status_code == 422 and "the object has 90000 fields; at most 64" in reply.text
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


def test_json_bodies_have_limits_of_their_own(api):
    async def use(api):
        for route, size, limit in (
            ("asample", 1 << 20, "max_json_bytes=600000"),
            ("create_session", 270_000, "262144"),
        ):
            body = json.dumps({"tags": ["x" * size]})
            reply = await api.http.post(f"/{route}", content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 413 and limit in reply.text

    api(use, max_json_bytes=600_000)


def test_json_of_very_many_objects_is_refused_before_it_is_decoded():
    for body in (b"[" + b"[]," * 250_000, b'{"a":' * 110_000):
        with pytest.raises(HTTPException, match="quotes and opening brackets; at most 200000"):
            bodies._decoded(body)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"a": "\ud800"}, "user_metadata has a lone surrogate"),
        ({"a": [[[]] * 2] * 2}, ""),
        (nested(29), ""),
        (nested(40), "user_metadata is nested more than 32 deep"),
    ],
)
def test_metadata_that_no_list_could_show_is_refused(api, value, fault):
    async def use(api):
        body = {"session_id": api.session, "model_seq_id": 0, "base_model": "letters", "lora_config": {"rank": 0}}
        reply = await api.http.post("/create_model", content=json.dumps(body | {"user_metadata": value}), headers=JSON)
        assert reply.status_code == (422 if fault else 200) and fault in reply.text
        if not fault:
            await api.answer(reply.json())
        runs = await api.http.get("/training_runs")
        assert runs.status_code == 200 and len(runs.json()["training_runs"]) == (0 if fault else 1)

    api(use)


def test_large_bodies_are_decoded_beside_the_event_loop_and_small_ones_at_once(api, monkeypatch):
    threads = []

    def noted(function):
        def call(*args):
            threads.append(threading.current_thread().name.partition("_")[0])
            return function(*args)

        return call

    monkeypatch.setattr(bodies, "_decoded", noted(bodies._decoded))
    monkeypatch.setattr("controllers.tinker_server.runs.read_call", noted(samples.read_call))

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
        assert api.server.futures.waiting_bytes[ANYONE] == 0

    api(use, max_bytes_in_flight=100_000, max_body_bytes=60_000)


def test_datums_without_targets_are_answered_with_none(api):
    async def use(api):
        model = await api.create_model()
        empty = ([1, 2], {"target_tokens": np.zeros((2, 0), np.int64), "weights": np.zeros((2, 0))})
        rows, metrics = await api.forward_backward(model, 1, [empty])
        assert rows[0].shape == (0, 0) and metrics["loss:sum"] == 0
        rows, _ = await api.forward_backward(model, 2, [empty, WIDE[0]])
        assert [row.shape for row in rows] == [(0, 0), (2, 4)]

    api(use)


def test_large_training_requests_are_read_one_after_the_other(api, monkeypatch):
    """Each may take many times the bytes of its body, and what waits is counted before the next one is read."""
    read, waiting = samples.read_call, []

    async def use(api):
        def noted(body, limits):
            waiting.append(api.server.futures.waiting_bytes[ANYONE])
            return read(body, limits)

        monkeypatch.setattr("controllers.tinker_server.runs.read_call", noted)
        model = await api.create_model()
        api.trainers[0].gate.clear()
        datum = ([1] * 60, {"target_tokens": [2] * 60})
        replies = await asyncio.gather(
            *[
                api.http.post(
                    "/forward_backward",
                    content=forward_backward_body(model, seq, [datum] * 100, "cross_entropy"),
                    headers={"Content-Type": "application/x-protobuf"},
                )
                for seq in range(1, 7)
            ]
        )
        assert sorted(reply.status_code for reply in replies) == [200, 200, 200, 429, 429, 429]
        assert waiting[0] == 0 and waiting[1] > 0
        api.trainers[0].gate.set()
        for reply in replies:
            if reply.status_code == 200:
                await api.output(reply.json())

    api(use, max_bytes_in_flight=470_000, max_body_bytes=250_000)


def test_a_prompt_that_is_too_long_is_not_kept_until_its_turn_comes(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        promise = await api.send_sample(sampler, 1, prompt=[1] * 100_000)
        assert api.server.futures.waiting_bytes[ANYONE] == 0
        assert "the prompt has 100000 tokens; max_model_len=64" in await api.error(promise)
        targets = {"data": [1] * 2000, "dtype": "int64", "shape": [1, 2000]}
        promise = await api.send_sample(sampler, 2, target_prompt_logprobs=targets)
        assert "target_prompt_logprobs has 2000 cells; at most 1280" in await api.error(promise)

    api(use)


# Connections


class Running:
    """A server with fake actors behind a real port."""

    def __init__(self, api) -> None:
        config = uvicorn.Config(api.app, port=0, log_level="warning", log_config=None, http=command.Connection)
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


async def write_until_closed(connect, head: bytes, piece: Callable[[int], bytes], *, pause: float = 0.0) -> None:
    """Write the head of a request and then piece(0), piece(1), … until the server closes the connection."""
    _, writer = await connect()
    writer.write(head)
    with pytest.raises(ConnectionError):
        for number in range(100_000):
            writer.write(piece(number))
            await writer.drain()
            await asyncio.sleep(pause)
    writer.close()


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
            await write_until_closed(connect, b"GET /healthz HTTP/1.1\r\nX: ", lambda number: b"x" * 10_000)

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


def test_bodies_under_way_are_bounded_together_but_a_small_one_always_has_room(api):
    async def use(api):
        async with Running(api) as connect:
            writers = []
            for _ in range(3):
                _, writer = await connect()
                writer.write(BODY.replace(b"100", b"600000") + b"x" * 400_000)
                writers.append(writer)
            reader, writer = await connect()
            writer.write(BODY.replace(b"100", b"400000") + b"x" * 400_000)
            writers.append(writer)
            assert b"503" in await reader.readuntil(b"\r\n")
            await api.post("session_heartbeat", session_id=api.session)
            for writer in writers:
                writer.close()

    api(use, max_bytes_in_flight=1_500_000, max_body_bytes=1_000_000)


CHUNKED = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"0\r\n", lambda number: b"X-%d: %s\r\n" % (number, b"x" * 1000)),
        (b"0\r\nX: ", lambda number: b"x" * 1000),
        (b"4\r\nbody\r\n5;x=", lambda number: b"x" * 1000),
    ],
    ids=["trailers", "value", "extension"],
)
def test_what_is_endless_beside_the_body_closes_its_connection(api, begin, piece):
    async def use(api):
        async with Running(api) as connect:
            await write_until_closed(connect, CHUNKED + begin, piece)

    api(use)


def test_a_body_of_many_small_chunks_is_read(api):
    async def use(api):
        async with Running(api) as connect:
            reader, writer = await connect()
            body = b"{" + b" " * 50_000 + b"}"
            writer.write(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            writer.close()

    api(use)


@pytest.mark.parametrize("route", ["asample", "forward_backward", "telemetry"])
def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_failure(api, caplog, route):
    async def use(api):
        async with Running(api) as connect:
            _, writer = await connect()
            writer.write(BODY.replace(b"telemetry", route.encode()) + b"half")
            await writer.drain()
            writer.close()  # the server waits for its requests before it stops

    api(use)
    # the SDK's clients of earlier tests may still look for their servers
    assert not [record for record in caplog.records if not record.name.startswith("tinker.")]


def test_a_body_that_drips_is_given_up(api, monkeypatch):
    monkeypatch.setattr(command, "BODY_SECONDS", 0.5)

    async def use(api):
        async with Running(api) as connect:
            head = BODY.replace(b"100", b"100000")
            await write_until_closed(connect, head, lambda number: b"x", pause=0.01)

    api(use)
