"""Promises of the server: a request is accepted at once, and the client fetches its answer by a
long poll. Uses neither HTTP nor actors.

A request that is sent again with its key gets the first one's promise, so the work is done once.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

Json = dict[str, object]

MAX_ERROR_LENGTH = 4096
"""Longest error that a client gets; it may repeat a part of the request."""


class UserError(Exception):
    """A fault of the request, whose text the client gets: as an Answer of category `user`, or
    outside a promise in an HTTP error.
    """


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
    answered: float | None = None
    fetched: float | None = None
    answer: Answer | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    def reply(self) -> Json:
        return {"request_id": self.request_id, **self.extra}


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
        """keep_fetched: seconds that an answer is kept after it was fetched. keep_keys: seconds
        after the answer in which a repeated request is recognised by its key. keep_unfetched:
        seconds that an unfetched answer is kept, at least keep_keys. max_answers: most promises of
        one owner; above it the oldest answered ones are forgotten. max_bytes: of the answers kept
        for one owner; above it the oldest are dropped, but not their promises, so nothing runs
        twice.
        """
        self.keep_fetched = keep_fetched
        self.keep_unfetched = keep_unfetched
        self.keep_keys = keep_keys
        self.max_answers = max_answers
        self.max_bytes = max_bytes
        self.now = now
        self.promises: OrderedDict[str, Promise] = OrderedDict()
        self.keys: dict[Hashable, str] = {}
        self.spent: set[Hashable] = set()  # of work that must never run again
        self.owned: Counter[str] = Counter()  # by owner
        self.answered: dict[str, deque[str]] = defaultdict(deque)  # by owner, oldest first
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_waiting = 0  # without an answer
        self.waiting_bytes: Counter[str] = Counter()  # of their data, by owner
        # by owner and id: with a protobuf answer, oldest first
        self.kept: dict[str, OrderedDict[str, Promise]] = defaultdict(OrderedDict)
        self.kept_bytes: Counter[str] = Counter()  # by owner
        self._swept = now()

    def submit(
        self,
        key: Hashable,
        what: str,
        work: Callable[[], Awaitable[Answer]],
        extra: Json | None = None,
        *,
        owner: str = "",
        keeps_key: bool = False,
        num_bytes: int = 0,
    ) -> Promise:
        """Start the work, or return the promise of this owner's earlier `what` with this key. With
        key None it always starts.

        keeps_key: never run twice; once the promise is forgotten, a repeated request gets an error.
        num_bytes: of the data that the work holds.
        """
        key = None if key is None else (owner, what, key)
        self._sweep(owner)
        known = self.promises.get(self.keys.get(key, "")) if key is not None else None
        if known is not None:
            return known
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
        self.owned[owner] += 1
        if key in self.spent:
            self._finish(promise, SPENT)
            return promise
        if key is not None:
            self.keys[key] = promise.request_id
        self.num_waiting += 1
        self.waiting_bytes[owner] += num_bytes
        task = asyncio.create_task(self._run(promise, work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return promise

    async def _run(self, promise: Promise, work: Callable[[], Awaitable[Answer]]) -> None:
        answer = Answer(error="the work has no answer", category="server")
        try:
            answer = await work()
        except (UserError, ValueError, TypeError) as error:
            answer = Answer(error=_text(error), category="user")
        except asyncio.CancelledError:
            answer = Answer(error="the server is stopping, so the request was cancelled", category="server")
            raise
        except Exception as error:
            logger.exception("%s failed", promise.what)
            answer = Answer(error=f"{type(error).__name__}: {_text(error)}", category="server")
        finally:
            self.num_waiting -= 1
            self.waiting_bytes[promise.owner] -= promise.num_bytes
            self._finish(promise, answer)

    def _finish(self, promise: Promise, answer: Answer) -> None:
        promise.answer = answer
        promise.answered = self.now()
        promise.is_done.set()
        self.answered[promise.owner].append(promise.request_id)
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
        """The promise, when it has an answer or after `hold` seconds.

        Raises KeyError if it is unknown, forgotten, or another owner's.
        """
        promise = self.promises[request_id]
        if promise.owner != owner:
            raise KeyError(request_id)
        if promise.answer is None:
            try:
                await asyncio.wait_for(promise.is_done.wait(), hold)
            except TimeoutError:
                return promise
        return promise

    def waiting(self, owner: str) -> list[Promise]:
        """The owner's unanswered requests, oldest first."""
        return [each for each in self.promises.values() if each.answered is None and each.owner == owner]

    def fetched(self, promise: Promise) -> None:
        """Keep the answer for keep_fetched more seconds, because the client may not have received
        it.
        """
        promise.fetched = self.now()

    async def close(self) -> None:
        """Cancel all work, and wait until it has ended."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _sweep(self, owner: str) -> None:
        """Forget the owner's answered promises above max_answers, and at most once a second
        everyone's old ones.
        """
        answered = self.answered[owner]
        while answered and self.owned[owner] > self.max_answers:
            if promise := self.promises.get(answered.popleft()):
                self._forget(promise)
        now = self.now()
        if now - self._swept < 1.0:
            return
        self._swept = now
        for promise in list(self.promises.values()):
            if promise.answered is None:
                continue
            if promise.fetched is None:
                is_forgotten = now - promise.answered > max(self.keep_keys, self.keep_unfetched)
            else:
                is_dropped = now - promise.fetched > self.keep_fetched
                is_forgotten = is_dropped and now - promise.answered > self.keep_keys
                if is_dropped:
                    self._drop(promise)
            if is_forgotten:
                self._forget(promise)
        for owned in self.answered.values():
            while owned and owned[0] not in self.promises:
                owned.popleft()

    def _forget(self, promise: Promise) -> None:
        self._drop(promise)
        del self.promises[promise.request_id]
        self.owned[promise.owner] -= 1
        if promise.key is not None and self.keys.get(promise.key) == promise.request_id:
            del self.keys[promise.key]
            if promise.keeps_key:
                self.spent.add(promise.key)


DROPPED = Answer(
    error="the answer is gone: it was fetched before, or the server needed its memory for newer answers",
    category="server",
)
"""Replaces a dropped answer."""
SPENT = Answer(
    error="this request was executed before, and its answer is gone; it is not executed again", category="user"
)
"""Answers a repeated request whose promise was forgotten."""


def _text(error: BaseException) -> str:
    """The text of an error and its notes."""
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "…"
