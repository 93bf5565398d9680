"""The metrics that an actor service exports to Prometheus, collected without a call to an actor."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from controllers.observe.prometheus import Family, Labels, text
from controllers.service.service import Service

PREFIX = "rl_actors_service_"


async def prometheus(service: Service) -> str:
    """On the event loop of the service, which changes the numbers."""
    return text([*_of_clients(service), *_of_calls(service), *_of_actors(service)])


def _family(name: str, about: str, numbers: Mapping[Labels, float]) -> Family:
    return Family(name=PREFIX + name, about=about, numbers=numbers)


def _of_clients(service: Service) -> Iterable[Family]:
    attached = Counter(client.member for client in service.clients.values())
    waiting: Counter[str] = Counter()
    for client in service.clients.values():
        waiting[client.member] += len(client.waiting)
    up_for = time.time() - service.started
    yield _family("up_seconds", "seconds since the service started", {(): up_for})
    yield _family("clients", "number of attached clients", _by_actor(service, attached))
    about = "number of calls that wait for the end of another client's step"
    yield _family("calls_waiting", about, _by_actor(service, waiting))


def _of_calls(service: Service) -> Iterable[Family]:
    ended: dict[Labels, float] = {}
    for (member, name, outcome), count in sorted(service.calls.ended.items()):
        ended[("actor", member), ("call", name), ("outcome", outcome)] = count
    seconds: dict[Labels, float] = {}
    for (member, name), number in sorted(service.calls.seconds.items()):
        seconds[("actor", member), ("call", name)] = number
    yield _family("calls_total", "number of clients' calls that have ended", ended)
    yield _family("call_seconds_total", "seconds that the ended calls took in total, waits included", seconds)
    about = "number of calls that have no answer yet, calls that wait included"
    yield _family("calls_running", about, _by_actor(service, service.calls.running))


def _of_actors(service: Service) -> Iterable[Family]:
    versions: dict[str, float] = {}
    restarts: dict[str, float] = {}
    steps: dict[str, float] = {}
    silent: dict[Labels, float] = {}
    for name, member in service.members.items():
        if member.client.policy_version is not None:
            versions[name] = member.client.policy_version
        restarts[name] = member.num_restarts
        steps[name] = member.step.seconds() if member.step else 0.0
        for process, seconds in member.client.seconds_silent().items():
            silent[("actor", name), ("process", process)] = seconds
    yield _family("policy_version", "version of the actor's weights", _with_label(versions))
    yield _family("restarts_total", "restarts of a generator after deaths; 0 for other actors", _with_label(restarts))
    yield _family("step_open_seconds", "seconds since the open step began; 0: no step is open", _with_label(steps))
    yield _family("silent_seconds", "seconds since the last sign of life of a process", silent)


def _by_actor(service: Service, counts: Counter[str]) -> dict[Labels, float]:
    return _with_label({name: counts[name] for name in service.members})


def _with_label(numbers: Mapping[str, float]) -> dict[Labels, float]:
    return {(("actor", name),): number for name, number in numbers.items()}
