"""The state of a server, for Prometheus and for its page."""

from typing import Any

from controllers.prometheus import Family, Labels, text
from controllers.serve.access import Counts
from controllers.serve.server import Server


def numbers(server: Server) -> dict[str, float]:
    """Gauges and counters by name."""
    return {
        "requests_waiting": server.futures.num_waiting,
        "promises": len(server.futures.promises),
        "trainers": len(server.trainers.residents),
        "samples_running": server.generator.num_running,
        "samples_waiting": server.generator.num_waiting,
        "generator_version": -1 if server.generator.version is None else server.generator.version,
        "generator_pulls_total": server.generator.num_switches,
        "sampled_tokens_total": server.num_sampled_tokens,
        "trained_positions_total": server.num_trained_positions,
        "optim_steps_total": server.num_optim_steps,
    }


def prometheus(server: Server, counts: Counts) -> str:
    """The text that Prometheus reads."""
    families = [Family(name=f"rl_actors_serve_{name}", numbers={(): value}) for name, value in numbers(server).items()]
    requests: dict[Labels, float] = {}
    for (route, status), count in sorted(counts.requests.items()):
        requests[("route", route), ("status", str(status))] = count
    seconds: dict[Labels, float] = {}
    for route, number in sorted(counts.seconds.items()):
        seconds[(("route", route),)] = number
    families.append(Family(name="rl_actors_serve_http_requests_total", numbers=requests))
    families.append(Family(name="rl_actors_serve_http_seconds_total", numbers=seconds))
    return text(families)


def page_data(server: Server, owner: str) -> dict[str, Any]:
    """The data of the status page: numbers, and the runs of an owner with the curves of their losses."""
    runs = []
    for run in server.store.runs(owner, 50, 0):
        runs.append(
            {
                "id": run.id,
                "base_model": run.base_model,
                "rank": run.lora["rank"],
                "where": _where(server, run.id, run.parked),
                "losses": list(server.losses.get(run.id, ())),
            }
        )
    return {"name": server.config.name, "numbers": numbers(server), "runs": runs}


def _where(server: Server, run_id: str, parked: str | None) -> str:
    if run_id in server.trainers.residents:
        return "in memory"
    return "on disk" if parked else "ended"
