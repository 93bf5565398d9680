"""Requests as large as the server's limits allow, and a little larger, to a server with real actors.

No process grows by more than 1 GiB, every trainer lives, and `/healthz` answers within half a second of the time that it takes while the
trainer is at ordinary work.
"""

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from program import Process
from serving import forward_backward_body
from test_fuzz import TEXT, mutated, with_another_value
from test_memory import resident_bytes

from controllers.tinker_server import codec, tinker_pb2

pytestmark = pytest.mark.slow
MOST_GROWTH = 1 << 30
HEALTH_SECONDS = 0.5
VOCABULARY = 256
LONGEST = 256
MIB = 1 << 20


class Watch:
    """Three threads: one asks for /healthz again and again, one reads the memory of the server's processes, and one only sleeps.

    How late the sleeper wakes tells how busy this machine and this process are. The server is not to blame for that part.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url, pid
        self.slowest = 0.0
        self.latest = 0.0
        self.largest: dict[str, int] = {}
        self.is_over = False
        self.threads = [threading.Thread(target=each) for each in (self._ask, self._read, self._sleep)]
        for thread in self.threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=600) as client:
            while not self.is_over:
                begin = time.perf_counter()
                assert client.get(f"{self.url}/healthz").status_code == 200
                self.slowest = max(self.slowest, time.perf_counter() - begin)
                time.sleep(0.01)

    def _read(self) -> None:
        while not self.is_over:
            for name, size in resident_bytes(self.pid).items():
                self.largest[name] = max(size, self.largest.get(name, 0))
            time.sleep(0.05)

    def _sleep(self) -> None:
        while not self.is_over:
            begin = time.perf_counter()
            time.sleep(0.01)
            self.latest = max(self.latest, time.perf_counter() - begin - 0.01)

    def take(self) -> tuple[float, dict[str, int]]:
        """(seconds of the slowest answer beyond the sleeper's delay, bytes of each process at most) since the last call."""
        found = max(0.0, self.slowest - self.latest), dict(self.largest)
        self.slowest, self.latest, self.largest = 0.0, 0.0, {}
        return found

    def end(self) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join()


class Client:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", timeout=600)
        self.session = self.http.post("/create_session", json={"tags": []}).json()["session_id"]
        self.numbers = itertools.count(1)
        new = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny_chat", "lora_config": {"rank": 4}}
        new["lora_config"]["train_unembed"] = False
        self.model = self.fetch(self.http.post("/create_model", json=new)).json()["model_id"]
        fields = {"session_id": self.session, "sampling_session_seq_id": 1, "base_model": "tiny_chat"}
        self.sampler = self.http.post("/create_sampling_session", json=fields).json()["sampling_session_id"]

    def seq(self) -> int:
        return next(self.numbers)

    def fetch(self, reply: httpx.Response) -> httpx.Response:
        """The answer to a request that was accepted, or the refusal."""
        assert reply.status_code < 500, reply.text[:1000]
        if reply.status_code != 200 or "request_id" not in reply.json():
            return reply
        while True:
            answer = self.http.post("/retrieve_future", json={"request_id": reply.json()["request_id"]})
            if answer.status_code != 408:
                return answer

    def train(self, body: bytes, *, busy: bool = False, **headers: str) -> httpx.Response:
        """busy: True if the server may refuse the request because it has too many."""
        headers = {"Content-Type": "application/x-protobuf"} | headers
        reply = self.http.post("/forward_backward", content=body, headers=headers)
        return reply if busy and reply.status_code in (429, 503) else self.fetch(reply)

    def json(self, route: str, text: str) -> httpx.Response:
        return self.fetch(
            self.http.post(f"/{route}", content=text.encode(), headers={"Content-Type": "application/json"})
        )

    def sample(self, **fields: object) -> httpx.Response:
        given = {"sampling_session_id": self.sampler, "seq_id": self.seq(), "sampling_params": {"max_tokens": 4}}
        return self.fetch(self.http.post("/asample", json=given | {"prompt": {"chunks": [{"tokens": [1]}]}} | fields))

    def require_alive(self) -> None:
        assert "error" not in self.train(forward_backward_body(self.model, self.seq(), TEXT, "cross_entropy")).text
        fields = {"model_id": self.model, "seq_id": self.seq(), "adam_params": {}}
        answer = self.fetch(self.http.post("/optim_step", json=fields)).json()
        assert "metrics" in answer or "not finite" in answer["error"], answer


def sparse(model: str, seq: int, num_datums: int, num_positions: int, width: int) -> bytes:
    """Datums whose targets and weights are sparse, with one value each."""
    message = tinker_pb2.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for _ in range(num_datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.ones(num_positions, "<i4").tobytes()
        for name, dtype in (("target_tokens", 2), ("weights", 1)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = dtype
            tensor.shape.extend([num_positions, width])
            tensor.sparse_csr.values = np.ones(1, codec.DTYPES[dtype]).tobytes()
            tensor.sparse_csr.crow_indices = np.asarray([0] + [1] * num_positions, "<i8").tobytes()
            tensor.sparse_csr.col_indices = np.zeros(1, "<i8").tobytes()
    return message.SerializeToString()


def large_requests(client: Client) -> dict[str, Callable[[], object]]:
    """{name: function that sends a request and waits for its answer}."""
    import zstandard

    def dense(num_datums: int, num_positions: int = LONGEST) -> bytes:
        ones = np.ones(num_positions, np.int64)
        inputs = {"target_tokens": ones, "logprobs": -ones.astype(float), "advantages": ones.astype(float)}
        return forward_backward_body(client.model, client.seq(), [(ones, inputs)] * num_datums, "ppo")

    def wide(num_datums: int) -> bytes:
        targets = np.zeros((LONGEST, VOCABULARY), np.int64)
        return forward_backward_body(
            client.model,
            client.seq(),
            [(np.ones(LONGEST), {"target_tokens": targets, "weights": targets.astype(float)})] * num_datums,
            "cross_entropy",
        )

    def asample(**fields: object) -> Callable[[], object]:
        return lambda: client.sample(**fields)

    def at_once(count: int, send: Callable[[], httpx.Response]) -> Callable[[], httpx.Response]:
        def send_all() -> httpx.Response:
            with ThreadPoolExecutor(count) as pool:
                return list(pool.map(lambda _: send(), range(count)))[-1]

        return send_all

    stop = {"max_tokens": 4}
    integers = [1] * MIB
    long_prompt = json.dumps(
        {
            "sampling_session_id": client.sampler,
            "seq_id": client.seq(),
            "sampling_params": stop,
            "prompt": {"chunks": [{"tokens": integers}]},
        }
    )
    bomb = zstandard.ZstdCompressor().compress(bytes(32 * MIB))
    many = "[" + ",".join(["[]"] * MIB) + "]"
    return {
        "sparse, 2**24 cells": lambda: client.train(sparse(client.model, client.seq(), 128, LONGEST, VOCABULARY)),
        "sparse, four times 2**24 cells": lambda: client.train(sparse(client.model, client.seq(), 4, 1, 1 << 24)),
        "dense targets, 30 MiB": lambda: client.train(wide(40)),
        "65,536 positions": lambda: client.train(dense(256)),
        "one datum of a million positions": lambda: client.train(dense(1, 1 << 20)),
        "two million empty datums": lambda: client.train(b"\x1a\x00" * (2 * MIB)),
        "as many empty datums as are allowed": lambda: client.train(b"\x1a\x00" * (1 << 18)),
        "as many empty chunks as are allowed": lambda: client.train(b"\x1a\x80\x80\x10" + b"\x0a\x00" * (1 << 17)),
        "a string of 30 MiB as model": lambda: client.train(b"\x0a\x80\x80\x80\x0f" + b"x" * (30 * MIB)),
        "zeros, compressed": lambda: client.train(bomb, **{"Content-Encoding": "zstd"}),
        "16 of these at once": at_once(16, lambda: client.train(bomb, **{"Content-Encoding": "zstd"})),
        "16 sparse requests at once": at_once(
            16, lambda: client.train(sparse(client.model, client.seq(), 64, LONGEST, VOCABULARY), busy=True)
        ),
        # The text is ready before, because encoding it would keep this process from asking for /healthz.
        "24 prompts of a million tokens at once": at_once(24, lambda: client.json("asample", long_prompt)),
        "one stop of 3 MiB": asample(sampling_params=stop | {"stop": "x" * (3 * MIB)}),
        "200,000 stops": asample(sampling_params=stop | {"stop": ["x"] * 200_000}),
        "256 stops of 1,024 characters": asample(sampling_params=stop | {"stop": ["xy" * 512] * 256}, num_samples=64),
        "a prompt of a million tokens": asample(prompt={"chunks": [{"tokens": integers}]}),
        "a million texts as tokens": asample(prompt={"chunks": [{"tokens": ["a"] * (900_000)}]}),
        "target logprobs of a million cells": asample(
            target_prompt_logprobs={"data": integers, "dtype": "int64", "shape": [1, MIB]}
        ),
        "target logprobs of 2**40 columns": asample(
            prompt={"chunks": [{"tokens": [1, 1]}]},
            target_prompt_logprobs={"data": [1], "dtype": "int64", "shape": [1, 1 << 40]},
        ),
        "the largest answer": asample(
            num_samples=1024,
            topk_sample_logprobs=20,
            sampling_params={"max_tokens": 100, "stop": []},
        ),
        "a million lists": lambda: client.json("create_session", f'{{"tags": {many}}}'),
        "a million lists as metadata": lambda: client.json("create_session", f'{{"user_metadata": {{"a": {many}}}}}'),
        "unknown fields": lambda: client.json(
            "create_session", "{" + ",".join(f'"{number}":1' for number in range(350_000)) + "}"
        ),
        "telemetry of 30 MiB": lambda: client.json("telemetry", f'"{"x" * (30 * MIB)}"'),
        "deep lists": lambda: client.json("create_session", "[" * (3 * MIB)),
    }


def grown_by(largest: dict[str, int], before: dict[str, int]) -> int:
    """The most bytes by which a process has grown; 0 if no reading came."""
    return max((size - before.get(process, size) for process, size in largest.items()), default=0)


def test_large_and_random_requests_take_little_memory_and_end_no_trainer(tmp_path):
    server = Process(tmp_path / "state")
    try:
        client = Client(server.url)
        client.require_alive()
        trainers = server.trainers()
        watch = Watch(server.url, server.process.pid)
        try:
            ones = np.ones(LONGEST, np.int64)
            ordinary = [(ones, {"target_tokens": ones})] * 64
            for _ in range(2):
                client.train(forward_backward_body(client.model, client.seq(), ordinary, "cross_entropy"))
            time.sleep(1)
            ordinary_seconds, before = watch.take()
            print(f"\n/healthz took at most {ordinary_seconds:.2f} s during ordinary training")
            results = {}
            for name, send in large_requests(client).items():
                answer = send()
                client.require_alive()
                seconds, largest = watch.take()
                growth = grown_by(largest, before)
                results[name] = seconds, growth
                text = answer.text[:100] if "json" in answer.headers.get("content-type", "") else "a result"
                print(
                    f"{name:<40} /healthz {seconds:5.2f} s   +{growth >> 20:>5} MiB   {answer.status_code} {text}",
                    flush=True,
                )
            draw = random.Random(0)
            for _ in range(200):
                body = forward_backward_body(client.model, client.seq(), TEXT, "cross_entropy")
                client.train(
                    mutated(body, draw) if draw.random() < 0.5 else with_another_value(body, client.model, draw)
                )
            client.require_alive()
            seconds, largest = watch.take()
            results["200 random requests"] = seconds, grown_by(largest, before)
        finally:
            watch.end()
        assert server.trainers() == trainers
        grown = {name: growth >> 20 for name, (_, growth) in results.items() if growth > MOST_GROWTH}
        assert not grown
        limit = HEALTH_SECONDS + ordinary_seconds
        slow = {name: seconds for name, (seconds, _) in results.items() if seconds > limit}
        assert not slow
    finally:
        status = server.end()
    assert status == 0
