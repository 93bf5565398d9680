"""Helpers of slow tests: a Tinker server with real actors in a program of its own, and a proxy that loses some requests and answers.

Tests import this module before they check that Tinker's SDK is installed. So this module must not import the SDK.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
START_SECONDS = 900


class Process:
    """A server that runs as another program. state: the folder of the server's state. url: the server's address."""

    def __init__(self, state: Path, *arguments: str) -> None:
        command = [
            str(ROOT / ".venv/bin/python"),
            "-m",
            "controllers.tinker_server",
            "--config",
            "tiny_chat",
            "--address",
            "127.0.0.1:0",
        ]
        self.log = state.with_suffix(".log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--state", str(state), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.url = self._read_url()

    def _read_url(self) -> str:
        too_late = threading.Timer(START_SECONDS, self.process.kill)
        too_late.start()
        try:
            for line in self.process.stdout:
                if line.startswith("export TINKER_BASE_URL="):
                    return line.strip().partition("=")[2]
        finally:
            too_late.cancel()
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-4000:]}")

    def trainers(self) -> list[int]:
        """Process ids of the ranks of the trainers."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.environ().get("RL_ACTORS_PROCESS", "").startswith("trainer"):
                    found.append(process.pid)
        return found

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=300)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of the connection. It replaces the answer to a training request. Such a request begins with an entry of WORK."""

    reaches_server: bool  # False: the proxy closes the connection instead of passing the request on
    answer: bytes = b""  # sent to the client in place of the server's answer; then the proxy closes the connection


BUSY = Fault(
    reaches_server=True,
    answer=b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}",
)
LOST_ANSWER = Fault(reaches_server=True)
LOST_REQUEST = Fault(reaches_server=False)
WORK = (b"POST /api/v1/forward_backward ", b"POST /api/v1/optim_step ")


class Proxy:
    """A proxy between Tinker's SDK and the server, in a thread of its own.

    Each training request takes the next fault from `faults`. If `faults` is empty, the proxy passes everything on.
    """

    def __init__(self, target: str) -> None:
        self.target_port = int(target.rpartition(":")[2])
        self.faults: deque[Fault] = deque()
        self._ready = threading.Event()
        self.thread = threading.Thread(target=partial(asyncio.run, self._serve()))
        self.thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listening = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        listening.close()

    async def _connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection("127.0.0.1", self.target_port)
        taken: list[Fault] = []  # at most one: the fault of the request that is under way
        directions = (self._pass_requests(client, to_server, taken), self._pass_answers(server, to_client, taken))
        tasks = [asyncio.ensure_future(each) for each in directions]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for writer in (to_client, to_server):
            with suppress(OSError):
                writer.close()

    async def _pass_requests(
        self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, taken: list[Fault]
    ) -> None:
        # On a connection the client sends a request only after the answer to the previous request. So each request begins at the beginning of a read.
        while data := await client.read(1 << 16):
            if data.startswith(WORK) and self.faults:
                taken.append(self.faults.popleft())
                if not taken[0].reaches_server:
                    return
            to_server.write(data)
            await to_server.drain()

    async def _pass_answers(
        self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter, taken: list[Fault]
    ) -> None:
        while data := await server.read(1 << 16):
            to_client.write(taken[0].answer if taken else data)
            await to_client.drain()
            if taken:
                return

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(60)
