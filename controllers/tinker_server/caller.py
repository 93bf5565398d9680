"""`Caller`, the server as the owner of a request's API key sees it."""

from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, HTTPException, Request

from controllers.tinker_server.access import ANYONE
from controllers.tinker_server.futures import Answer, Json, NotFoundError, Work
from controllers.tinker_server.server import Server
from controllers.tinker_server.store import Checkpoint, OwnRow, Sampler, Session, TrainingRun

NOUNS: dict[type, str] = {Session: "session", TrainingRun: "training run", Checkpoint: "checkpoint", Sampler: "sampler"}
WorkOfRun = Callable[[Server, TrainingRun, Any], Awaitable[Answer]]  # of the run that the request names, and its body
MAX_PAGE = 1000
MAX_OFFSET = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Caller:
    server: Server
    owner: str

    def own(self, kind: type[OwnRow], key: str) -> OwnRow:
        """Raises NotFoundError for a row that does not exist or belongs to another owner."""
        row = self.server.store.get(kind, key)
        if row is None or row.owner != self.owner:
            raise NotFoundError(f"there is no {NOUNS[kind]} {key}")
        return row

    def page(self, kind: type[OwnRow], limit: int, offset: int) -> tuple[list[OwnRow], Json]:
        """The owner's rows, newest first, and the cursor. ValueError: limit or offset out of range."""
        if not 1 <= limit <= MAX_PAGE or not 0 <= offset <= MAX_OFFSET:
            raise ValueError(f"limit={limit}, offset={offset}; limit must be 1 to {MAX_PAGE}, offset 0 to {MAX_OFFSET}")
        store = self.server.store
        cursor = {"offset": offset, "limit": limit, "total_count": store.count(kind, owner=self.owner)}
        return store.find(kind, limit, offset, owner=self.owner), cursor

    def require_room(self, num_bytes: int) -> None:
        """Refuse a request if too much data of its owner waits already."""
        waiting = self.server.futures.waiting_bytes[self.owner]
        most = self.server.config.max_bytes_in_flight
        if waiting and waiting + num_bytes > most:
            detail = f"data of {waiting} bytes already waits for its calls; at most max_bytes_in_flight={most} may wait"
            raise try_later(detail)

    def submit(self, what: str, body: Any, work: WorkOfRun, **options: Any) -> Json:
        """Accept a request to a run, and return the reply. options: of Futures.submit."""

        async def work_of_run() -> Answer:
            return await work(self.server, self.own(TrainingRun, body.model_id), body)

        key = ("run", body.model_id, body.seq_id) if body.seq_id else None
        return self.submit_as(key, what, body.model_id, work_of_run, **options)

    def submit_as(self, key: Hashable, what: str, run_id: str, work: Work, **options: Any) -> Json:
        extra = {"model_id": run_id}
        return self.server.futures.submit(key, what, work, extra, owner=self.owner, **options).reply()

    def new_run(self, session_id: str, seq_id: int, of: Mapping[str, Any]) -> TrainingRun:
        """of: the other fields. Raises NotFoundError for another owner's session."""
        session = self.own(Session, session_id)
        return TrainingRun(id=f"{session.id}:train:{seq_id}", session_id=session.id, owner=self.owner, **of)


# a coroutine, because FastAPI calls plain functions in a thread, which takes longer than the rest
async def caller_of(request: Request) -> Caller:
    return Caller(request.app.state.server, getattr(request.state, "owner", ANYONE))


Calling = Annotated[Caller, Depends(caller_of)]


def try_later(detail: str) -> HTTPException:
    return HTTPException(429, detail, headers={"Retry-After": "1"})
