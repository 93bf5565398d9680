"""The state of a Tinker server, for Prometheus and for the server's status page."""

import time
from typing import Any

from controllers.observe.prometheus import Family, Labels, text
from controllers.tinker_server.access import Counts
from controllers.tinker_server.server import RATE_SECONDS, RunCurves, Server
from controllers.tinker_server.store import Checkpoint, TrainingRun

MOST_ROWS = 50
"""Most rows of a table on the page."""


def numbers(server: Server) -> dict[str, tuple[str, float]]:
    """Name -> (meaning, value) of every gauge and counter."""
    generator = server.generator
    trainers = server.trainers
    version = -1 if generator.version is None else generator.version
    return {
        "requests_waiting": ("requests that the server works on", server.futures.num_waiting),
        "promises": ("answers and requests that the server keeps", len(server.futures.promises)),
        "trainers": ("trainers", len(trainers.homes)),
        "runs_in_memory": ("training runs in the memory of a trainer", len(trainers.residents)),
        "samples_running": ("sampling requests that the generator works on", generator.num_running),
        "samples_waiting": ("sampling requests that wait for other weights or adapters", generator.num_waiting),
        "generator_version": ("version of the whole weights in the generator; -1: none", version),
        "generator_pulls_total": ("changes of the whole weights in the generator", generator.num_switches),
        "generator_adapters": ("adapters in the generator", generator.num_adapters),
        "sampled_tokens_total": ("sampled tokens since the start", server.num_sampled_tokens),
        "trained_positions_total": ("positions trained on since the start", server.num_trained_positions),
        "optim_steps_total": ("optimizer steps since the start", server.num_optim_steps),
    }


def prometheus(server: Server, counts: Counts) -> str:
    families = [
        Family(name=f"rl_actors_serve_{name}", about=about, numbers={(): value})
        for name, (about, value) in numbers(server).items()
    ]
    requests: dict[Labels, float] = {}
    for (route, code), count in sorted(counts.requests.items()):
        requests[("route", route), ("status", str(code))] = count
    seconds: dict[Labels, float] = {(("route", route),): spent for route, spent in sorted(counts.seconds.items())}
    families.append(Family(name="rl_actors_serve_http_requests_total", numbers=requests))
    families.append(Family(name="rl_actors_serve_http_seconds_total", numbers=seconds))
    return text(families)


def page_data(server: Server, owner: str) -> dict[str, Any]:
    """Only the owner's requests, weights and runs, and the base model's weights."""
    runs = []
    in_memory = server.trainers.residents
    for run in server.store.find(TrainingRun, MOST_ROWS, owner=owner):
        curves = server.curves.get(run.id, RunCurves())
        runs.append(
            {
                "id": run.id,
                "base_model": run.base_model,
                "rank": run.lora["rank"],
                "where": "in memory" if run.id in in_memory else "on disk" if run.parked else "ended",
                "num_steps": curves.num_steps,
                "num_losses": curves.num_losses,
                "losses": list(curves.losses),
                "grad_norms": list(curves.grad_norms),
            }
        )
    return {
        "name": server.config.name,
        "model": _model(server),
        "time": time.time(),
        "numbers": list(numbers(server).values()),
        "queue": _queue(server, owner),
        "rates": {name: list(curve) for name, curve in server.rates.items()},
        "rate_seconds": RATE_SECONDS,
        "versions": _versions(server, owner),
        "runs": runs,
    }


def _model(server: Server) -> dict[str, Any]:
    model = server.config.trainer.model
    return {
        "directory": server.config.hf_path,
        "architecture": model.architecture,
        "layers": model.num_hidden_layers,
        "width": model.hidden_size,
        "vocabulary": model.vocab_size,
        "longest training sequence": server.config.trainer.max_sequence_length,
        "longest prompt with its completion": server.config.generator.max_model_len,
    }


def _queue(server: Server, owner: str) -> list[dict[str, Any]]:
    """By call: unanswered requests, and the seconds of the oldest."""
    now = server.futures.now()
    found: dict[str, dict[str, Any]] = {}
    for promise in server.futures.promises.values():
        if promise.answer is not None or promise.owner != owner:
            continue
        entry = found.setdefault(promise.what, {"call": promise.what, "waiting": 0, "oldest": now - promise.begun})
        entry["waiting"] += 1
    return list(found.values())


def _versions(server: Server, owner: str) -> list[dict[str, Any]]:
    """The weights of samplers, newest first. is_held: whole weights that the generator holds now."""
    found = []
    for version in server.store.shown_versions(owner, MOST_ROWS):
        weights = "the base model"
        if version.run_id is not None:
            saved = server.store.find(Checkpoint, version=version.number)
            weights = saved[0].path if saved else f"unnamed, of {version.run_id}"
        is_held = version.number == server.generator.version
        found.append({"version": version.number, "weights": weights, "is_held": is_held})
    return found
