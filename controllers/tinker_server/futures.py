"""Promises of the server. The server accepts a request at once, and the client fetches the answer later by a long poll.

This module uses neither HTTP nor actors. A request that is sent again with its key gets the promise of the first
request, so the work is done once.
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
"""Largest number of characters of an error that a client gets. An error may repeat a part of the request."""


class UserError(Exception):
    """A fault of the request. The client gets the text of this error.

    If the work of a promise raises the error, the text is in an Answer of the category `user`. If the error is raised
    outside such work, the text is in an HTTP reply with an error status.
    """


class NotFoundError(UserError):
    """Something that the request names does not exist, or belongs to another owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a request: a JSON object, a protobuf message, or an error."""

    json: Json | None = None
    proto: bytes | None = None
    error: str | None = None
    category: str = "unknown"  # "user" or "server" for an error, otherwise "unknown"

    @property
    def num_bytes(self) -> int:
        """Size of the protobuf message. 0 for an answer without such a message. JSON answers and errors are small."""
        return len(self.proto or b"")


@dataclass(slots=True, kw_only=True, eq=False)
class Promise:
    """A request that was accepted."""

    request_id: str
    key: Hashable
    keeps_key: bool
    what: str  # name of the call, for logs
    num_bytes: int  # size of the data that the work holds
    owner: str
    extra: Json  # further fields of the reply to the request
    begun: float  # the fields begun, answered and fetched are times of Futures.now
    answered: float | None = None
    fetched: float | None = None
    answer: Answer | None = None
    is_done: asyncio.Event = field(default_factory=asyncio.Event)

    def reply(self) -> Json:
        return {"request_id": self.request_id, **self.extra}


class Futures:
    """All promises of a server."""

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
        """keep_fetched: seconds for which an answer is kept after it was fetched.
        keep_keys: how many seconds after the answer the server still recognises a repeated request by its key.
        keep_unfetched: seconds for which an unfetched answer is kept. If keep_keys is larger, it is used instead.
        max_answers: largest number of promises of one owner. If there are more, the owner's oldest answered promises are forgotten.
        max_bytes: largest size of the answers kept for one owner. If they are larger, the owner's oldest answers are dropped, but not their
        promises: a repeated request is not executed again.
        """
        self.keep_fetched, self.keep_unfetched, self.keep_keys = keep_fetched, keep_unfetched, keep_keys
        self.max_answers, self.max_bytes, self.now = max_answers, max_bytes, now
        self.promises: OrderedDict[str, Promise] = OrderedDict()
        self.keys: dict[Hashable, str] = {}
        self.spent: set[Hashable] = set()  # keys of work that must never run again, whose promises are forgotten
        self.owned: Counter[str] = Counter()  # number of promises by owner
        self.answered: dict[str, deque[str]] = defaultdict(deque)  # by owner: answered promises, oldest answer first
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_waiting = 0  # promises without an answer
        self.waiting_bytes: Counter[str] = Counter()  # by owner: size of the data of these promises
        # By owner and by id: promises with an answer of some size, oldest first.
        self.kept: dict[str, OrderedDict[str, Promise]] = defaultdict(OrderedDict)
        self.kept_bytes: Counter[str] = Counter()  # by owner: size of the answers in `kept`
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
        """Start the work. If this owner has sent this call (`what`) with this key before, only return the promise of that call.

        With the key None the work always starts. keeps_key: the work is never done twice, even after its promise is
        forgotten; a repeated request then gets an error. num_bytes: size of the data that the work holds until its end.
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
        """Return the promise when it has an answer, or after `hold` seconds.

        Raises KeyError if the promise is unknown, was forgotten, or has another owner.
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
        """The unanswered requests of an owner, oldest first."""
        return [each for each in self.promises.values() if each.answered is None and each.owner == owner]

    def fetched(self, promise: Promise) -> None:
        """Record that the answer was sent to the client. The answer is kept for keep_fetched more seconds, because the
        client may not have received it.
        """
        promise.fetched = self.now()

    async def close(self) -> None:
        """Cancel all running work, and wait until it has ended."""
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _sweep(self, owner: str) -> None:
        """Forget the owner's oldest answered promises above max_answers. At most once a second, drop old answers of all owners, and
        later forget their promises.
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
"""The answer that replaces a dropped answer."""
SPENT = Answer(
    error="this request was executed before, and its answer is gone; it is not executed again", category="user"
)
"""The answer to a request that is repeated after its promise was forgotten."""


def _text(error: BaseException) -> str:
    """The text of an error, followed by each of its notes on a line of its own."""
    text = "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
    return text if len(text) <= MAX_ERROR_LENGTH else text[:MAX_ERROR_LENGTH] + "…"
