"""Converts rows of the server's database to JSON objects of Tinker's protocol: training runs,
checkpoints and sessions.
"""

from datetime import UTC, datetime
from typing import Any

from controllers.tinker_server.futures import NotFoundError
from controllers.tinker_server.store import Checkpoint, Run, Store

MAX_PAGE = 1000
"""Most items in one answer."""
EVERY = 1 << 31
"""A limit that gives all rows."""


def require_run(store: Store, owner: str, run_id: str) -> Run:
    found = store.run(run_id)
    if found is None or found.owner != owner:
        raise NotFoundError(f"there is no training run {run_id}")
    return found


def runs(store: Store, owner: str, limit: int, offset: int) -> dict[str, Any]:
    limit, offset = _page(limit, offset)
    found = [run(store, each) for each in store.runs(owner, limit, offset)]
    return {"training_runs": found, "cursor": _cursor(limit, offset, store.count_runs(owner))}


def run(store: Store, row: Run) -> dict[str, Any]:
    """A run with its newest training and sampler checkpoints."""
    saved = store.checkpoints(run_id=row.id)
    rank = row.lora["rank"]
    return {
        "training_run_id": row.id,
        "base_model": row.base_model,
        "model_owner": row.owner,
        "is_lora": rank > 0,
        "lora_rank": rank or None,
        "last_request_time": as_time(row.last_request),
        "last_checkpoint": _newest(saved, "training"),
        "last_sampler_checkpoint": _newest(saved, "sampler"),
        "user_metadata": row.user_metadata,
    }


def _newest(saved: list[Checkpoint], kind: str) -> dict[str, Any] | None:
    return next((checkpoint(each) for each in saved if each.kind == kind), None)


def checkpoint(row: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": row.id,
        "checkpoint_type": row.kind,
        "time": as_time(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": row.user_metadata,
        "expires_at": as_time(row.expires),
    }


def checkpoints(store: Store, owner: str, limit: int, offset: int) -> dict[str, Any]:
    limit, offset = _page(limit, offset)
    found = store.checkpoints(owner=owner)
    page = [checkpoint(each) for each in found[offset : offset + limit]]
    return {"checkpoints": page, "cursor": _cursor(limit, offset, len(found))}


def weights_info(store: Store, row: Checkpoint) -> dict[str, Any]:
    trained = store.run(row.run_id)
    assert trained is not None
    lora = trained.lora
    names = ("train_unembed", "train_mlp", "train_attn")
    return {
        "base_model": trained.base_model,
        "is_lora": lora["rank"] > 0,
        "lora_rank": lora["rank"],
        **{name: lora[name] for name in names},
    }


def session(store: Store, row: dict[str, Any]) -> dict[str, Any]:
    found = store.runs(row["owner"], EVERY, 0, session_id=row["id"])
    return {
        "training_run_ids": [each.id for each in found],
        "sampler_ids": store.samplers_of(row["id"]),
        "user_metadata": row["user_metadata"],
        "display_name": row["display_name"],
    }


def _page(limit: int, offset: int) -> tuple[int, int]:
    """Raises ValueError if limit or offset is out of range."""
    if not 1 <= limit <= MAX_PAGE or not 0 <= offset < EVERY:
        raise ValueError(f"limit={limit}, offset={offset}; limit must be 1 to {MAX_PAGE}, offset 0 to {EVERY - 1}")
    return limit, offset


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def as_time(seconds: float | None) -> str | None:
    """Seconds since 1970 as ISO 8601."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
