"""Access control of the Tinker server: API keys, rate limits, access log, and counts of requests."""

import hashlib
import ipaddress
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANYONE = "anyone"
"""The owner of everything on a server without API keys."""
OPEN_PATHS = frozenset({"/healthz", "/api/v1/healthz"})  # need no key
SIGNED = "/download/"
"""Begins every path of a download, which the signature in its URL protects instead of a key."""
SAVES = frozenset({"save_weights", "save_weights_for_sampler", "save_weights_external", "copy_weights"})
WORK = SAVES | {"asample", "forward_backward", "optim_step", "create_model", "load_weights"}
"""Last parts of rate-limited paths. A program cannot reduce the SDK's heartbeats and the like."""
CONTENT_TYPES = frozenset({"application/json", "application/x-protobuf"})
"""That a page in a browser cannot send to another host without asking, which is refused."""
KEY_LINE = re.compile(r"([A-Za-z0-9_.@-]+)\s+([0-9a-f]{64})")
LONGEST_WAIT = 60  # seconds, in Retry-After


def read_keys(file: Path) -> dict[str, str]:
    """{SHA-256 of a key: owner} from lines like "alice 9f86d0…". Raises ValueError for a wrong line."""
    owners: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = KEY_LINE.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{file}, line {number}: a line must have an owner and the SHA-256 of a key, in 64 lowercase hexadecimal digits"
            )
        owner, digest = found.groups()
        if owners.setdefault(digest, owner) != owner:
            raise ValueError(f"{file}, line {number}: {owner} has the same key as {owners[digest]}")
    if not owners:
        raise ValueError(f"{file} has no key")
    return owners


def is_loopback(host: str) -> bool:
    """is_loopback("127.0.0.1") -> True. host: a name or an IP address, IPv6 also in brackets."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_this_machine(address: str) -> bool:
    """is_this_machine("http://localhost:8000") -> True. address: value of Host or Origin."""
    host = address.rpartition("://")[2]
    bracket = host.rfind("]")
    return is_loopback(host[: bracket + 1] if bracket >= 0 else host.partition(":")[0])


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(slots=True)
class Counts:
    """Requests by route and status, and their total seconds by route."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class Access:
    """Wraps the ASGI application: checks key and rate of each request, counts and logs it.

    Without keys it trusts the programs of its machine, but no page in a browser there: a page can
    resolve its own name to 127.0.0.1, and send bodies of certain types.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        owners: Mapping[str, str] | None,  # SHA-256 of a key -> owner; None: no keys, ANYONE owns every request
        rate: float | None = None,  # requests for work per second and owner; None: no limit
        burst: float = 100.0,  # requests for work at once, beyond the rate
        log: TextIO | None = None,
    ) -> None:
        self.app = app
        self.owners = owners
        self.rate = rate
        self.burst = burst
        self.log = log
        self.counts = Counts()
        # owner -> (tokens, time of the last refill); a request for work takes a token
        self.buckets: dict[str, tuple[float, float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status = 499  # cancelled before an answer begins

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        owner = self._owner(scope)
        try:
            refusal = self._refusal_of_page(scope) if self.owners is None else None
            refusal = refusal or self._refusal(scope["path"], owner)
            if refusal is not None:
                await refusal(scope, receive, note_status)
                return
            scope.setdefault("state", {})["owner"] = owner
            await self.app(scope, receive, note_status)
        finally:
            self._note(scope, owner, status, time.perf_counter() - begin)

    def _owner(self, scope: Scope) -> str | None:
        """The owner of a request's key, None if the key is unknown."""
        if self.owners is None:
            return ANYONE
        # no constant-time search: how a hash differs from the known ones says nothing of a key
        return self.owners.get(hash_of(Headers(scope=scope).get("x-api-key", "")))

    def _refusal(self, path: str, owner: str | None) -> JSONResponse | None:
        if path in OPEN_PATHS or path.startswith(SIGNED):
            return None
        if owner is None:
            return JSONResponse({"detail": "the X-API-Key of this request is not one of the server's keys"}, 401)
        if self.rate is None or path.rpartition("/")[2] not in WORK:
            return None
        now = time.monotonic()
        tokens, filled = self.buckets.get(owner, (self.burst, now))
        tokens = min(self.burst, tokens + (now - filled) * self.rate)
        self.buckets[owner] = (tokens - 1 if tokens >= 1 else tokens, now)
        if tokens >= 1:
            return None
        wait = math.ceil((1 - tokens) / self.rate)
        detail = f"{owner} may send {self.rate:g} requests for work in a second"
        return JSONResponse({"detail": detail}, 429, headers={"Retry-After": str(min(wait, LONGEST_WAIT))})

    def _refusal_of_page(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        for name in ("host", "origin"):
            value = headers.get(name)
            if value is not None and not is_this_machine(value):
                detail = f"{name} is {value[:100]!r}; a server without keys answers only programs and pages of its own machine"
                return JSONResponse({"detail": detail}, 403)
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if has_body and kind not in CONTENT_TYPES:
            detail = f"content-type is {kind[:100]!r}; it must be {' or '.join(sorted(CONTENT_TYPES))}"
            return JSONResponse({"detail": detail}, 415)
        return None

    def _note(self, scope: Scope, owner: str | None, status: int, seconds: float) -> None:
        name = getattr(scope.get("route"), "path", "other")
        self.counts.requests[name, status] += 1
        self.counts.seconds[name] += seconds
        if self.log is not None:
            line = {"time": round(time.time(), 3), "owner": owner, "method": scope["method"], "path": scope["path"]}
            self.log.write(json.dumps(line | {"status": status, "seconds": round(seconds, 4)}) + "\n")
