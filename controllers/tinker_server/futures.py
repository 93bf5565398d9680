"""Promises of the server: a request is accepted at once, and the client fetches its answer by a
long poll. A repeated request gets the first one's promise. Uses neither HTTP nor actors.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

Json = dict[str, Any]

MAX_ERROR_LENGTH = 4096
"""Longest error that a client gets; it may repeat a part of the request."""


class UserError(Exception):
    """A fault of the request: an Answer of category `user`, or outside a promise an HTTP error."""


class NotFoundError(UserError):
    """Something that the request names does not exist, or belongs to another owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a request: JSON, protobuf or an error."""

    json: Json | None = None
    proto: bytes | None = None
    error: str | None = None
    category: str = "unknown"  # of an error: "user" or "server"

    @property
    def num_bytes(self) -> int:
        """Size of the protobuf message; JSON answers and errors are small and count as 0."""
        return len(self.proto or b"")


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """An accepted request."""

    request_id: str
    key: Hashable
    keeps_key: bool
    what: str  # for logs
    num_bytes: int  # of the data that the work holds
    owner: str
    extra: Json  # fields of the reply
    begun: float  # this, answered and fetched: Futures.now
    answered: float = 0.0
    fetched: float | None = None
    answer: Answer | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    def reply(self) -> Json:
        return {"request_id": self.request_id, **self.extra}


Work = Callable[[], Awaitable[Answer]]


class Futures:
    def __init__(
        self,
        *,
        keep_fetched: float = 60.0,
        keep_unfetched: float = 3600.0,
        keep_keys: float = 1800.0,
        max_answers: int = 20_000,
        max_bytes: int = 256 << 20,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Seconds that an answer is kept: keep_fetched after its fetch, keep_unfetched without one (at
        least keep_keys, in which a repeated request is recognised by its key). Of one owner:
        max_answers, above which the oldest promises are forgotten, and max_bytes, above which the
        oldest answers are dropped, but not their promises, so nothing runs twice.
        """
        self.keep_fetched = keep_fetched
        self.keep_unfetched = keep_unfetched
        self.keep_keys = keep_keys
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self.now = now
        self.promises: dict[str, Promise] = {}
        self.keys: dict[Hashable, Promise] = {}
        self.spent: set[Hashable] = set()  # of work that must never run again
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_waiting = 0  # without an answer
        self.waiting_bytes: Counter[str] = Counter()  # of their data, by owner
        # by owner and id, oldest first: answered, and of these with a protobuf answer
        self.answered: dict[str, OrderedDict[str, Promise]] = defaultdict(OrderedDict)
        self.kept: dict[str, OrderedDict[str, Promise]] = defaultdict(OrderedDict)
        self.kept_bytes: Counter[str] = Counter()  # by owner
        self._swept = now()

    def submit(
        self,
        key: Hashable,
        what: str,
        work: Work,
        extra: Json | None = None,
        *,
        owner: str = "",
        keeps_key: bool = False,
        num_bytes: int = 0,
    ) -> Promise:
        """Start the work, or return the promise of this owner's earlier `what` with this key.
        keeps_key: once the promise is forgotten, a repeated request gets an error. num_bytes: of
        the data that the work holds.
        """
        key = None if key is None else (owner, what, key)
        self._sweep(owner)
        if key in self.keys:
            return self.keys[key]
        promise = Promise(
            request_id=uuid.uuid4().hex,
            key=key,
            keeps_key=keeps_key,
            what=what,
            num_bytes=num_bytes,
            owner=owner,
            extra=extra or {},
            begun=self.now(),
        )
        self.promises[promise.request_id] = promise
        if key in self.spent:
            self._finish(promise, SPENT)
            return promise
        if key is not None:
            self.keys[key] = promise
        self.num_waiting += 1
        self.waiting_bytes[owner] += num_bytes
        task = asyncio.create_task(self._run(promise, work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return promise

    async def _run(self, promise: Promise, work: Work) -> None:
        try:
            answer = await work()
        except (UserError, ValueError, TypeError) as error:
            answer = Answer(error=_text(error), category="user")
        except asyncio.CancelledError:
            answer = Answer(error="the server is stopping, so the request was cancelled", category="server")
        except Exception as error:
            logger.exception("%s failed", promise.what)
            answer = Answer(error=f"{type(error).__name__}: {_text(error)}", category="server")
        self.num_waiting -= 1
        self.waiting_bytes[promise.owner] -= promise.num_bytes
        self._finish(promise, answer)

    def _finish(self, promise: Promise, answer: Answer) -> None:
        promise.answer = answer
        promise.answered = self.now()
        promise.is_done.set()
        self.answered[promise.owner][promise.request_id] = promise
        if answer.num_bytes:
            kept = self.kept[promise.owner]
            kept[promise.request_id] = promise
            self.kept_bytes[promise.owner] += answer.num_bytes
            while self.kept_bytes[promise.owner] > self.max_bytes and len(kept) > 1:
                self._drop(next(iter(kept.values())))

    def _drop(self, promise: Promise) -> None:
        """Forget an answer, but not its promise."""
        if promise.answer is not None and promise.answer.num_bytes:
            del self.kept[promise.owner][promise.request_id]
            self.kept_bytes[promise.owner] -= promise.answer.num_bytes
        promise.answer = DROPPED

    async def wait(self, request_id: str, hold: float, *, owner: str = "") -> Promise:
        """The promise, answered or after `hold` seconds. KeyError: unknown, or another owner's."""
        promise = self.promises[request_id]
        if promise.owner != owner:
            raise KeyError(request_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(promise.is_done.wait(), hold)
        return promise

    async def close(self) -> None:
        """Cancel all work, and wait until it has ended."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _sweep(self, owner: str) -> None:
        """Forget the owner's oldest answers above max_answers, and once a second everyone's old ones."""
        answered = self.answered[owner]
        while len(answered) > self.max_answers:
            self._forget(next(iter(answered.values())))
        now = self.now()
        if now - self._swept < 1.0:
            return
        self._swept = now
        for promise in [each for owned in self.answered.values() for each in owned.values()]:
            age = now - promise.answered
            if promise.fetched is None:
                is_forgotten = age > max(self.keep_keys, self.keep_unfetched)
            else:
                is_dropped = now - promise.fetched > self.keep_fetched
                is_forgotten = is_dropped and age > self.keep_keys
                if is_dropped:
                    self._drop(promise)
            if is_forgotten:
                self._forget(promise)

    def _forget(self, promise: Promise) -> None:
        self._drop(promise)
        del self.promises[promise.request_id]
        del self.answered[promise.owner][promise.request_id]
        if promise.key is not None and self.keys.get(promise.key) is promise:
            del self.keys[promise.key]
            if promise.keeps_key:
                self.spent.add(promise.key)


DROPPED = Answer(
    error="the answer is gone: it was fetched before, or the server needed its memory for newer answers",
    category="server",
)
SPENT = Answer(
    error="this request was executed before, and its answer is gone; it is not executed again", category="user"
)
"""Answers a repeated request whose promise was forgotten."""


def _text(error: BaseException) -> str:
    """The text of an error and its notes."""
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "…"
