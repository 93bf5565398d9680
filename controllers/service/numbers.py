"""The metrics that an actor service exports to Prometheus."""

from controllers.observe.prometheus import Family, Labels, text
from controllers.service.counts import ServiceNumbers

PREFIX = "rl_actors_service_"


def prometheus(numbers: ServiceNumbers) -> str:
    return text([*_of_the_service(numbers), *_of_calls(numbers), *_of_actors(numbers)])


def _of_the_service(numbers: ServiceNumbers) -> list[Family]:
    return [
        Family(name=f"{PREFIX}up_seconds", about="seconds since the service started", numbers={(): numbers.up_for}),
        Family(
            name=f"{PREFIX}clients",
            about="number of attached clients",
            numbers={_actor(name): count for name, count in numbers.clients.items()},
        ),
    ]


def _of_calls(numbers: ServiceNumbers) -> list[Family]:
    ended: dict[Labels, float] = {}
    for (member, name, outcome), count in sorted(numbers.calls.ended.items()):
        ended[*_actor(member), ("call", name), ("outcome", outcome)] = count
    seconds: dict[Labels, float] = {}
    for (member, name), number in sorted(numbers.calls.seconds.items()):
        seconds[*_actor(member), ("call", name)] = number
    return [
        Family(name=f"{PREFIX}calls_total", about="number of clients' calls that have ended", numbers=ended),
        Family(
            name=f"{PREFIX}call_seconds_total",
            about="seconds that the ended calls took in total, waits included",
            numbers=seconds,
        ),
        Family(
            name=f"{PREFIX}calls_running",
            about="number of calls that have no answer yet, calls that wait included",
            numbers={_actor(name): numbers.calls.running[name] for name in numbers.members},
        ),
        Family(
            name=f"{PREFIX}calls_waiting",
            about="number of calls that wait for the end of another client's step",
            numbers={_actor(name): count for name, count in numbers.waiting.items()},
        ),
    ]


def _of_actors(numbers: ServiceNumbers) -> list[Family]:
    versions: dict[Labels, float] = {}
    restarts: dict[Labels, float] = {}
    steps: dict[Labels, float] = {}
    silent: dict[Labels, float] = {}
    for name, member in numbers.members.items():
        if member.policy_version is not None:
            versions[_actor(name)] = member.policy_version
        restarts[_actor(name)] = member.restarts
        steps[_actor(name)] = member.step_open_for
        for process, seconds in member.silent.items():
            silent[*_actor(name), ("process", process)] = seconds
    return [
        Family(name=f"{PREFIX}policy_version", about="version of the actor's weights", numbers=versions),
        Family(
            name=f"{PREFIX}restarts_total",
            about="restarts of a generator after deaths; 0 for other actors",
            numbers=restarts,
        ),
        Family(
            name=f"{PREFIX}step_open_seconds",
            about="seconds since the open step began; 0: no step is open",
            numbers=steps,
        ),
        Family(
            name=f"{PREFIX}silent_seconds", about="seconds since the last sign of life of a process", numbers=silent
        ),
    ]


def _actor(name: str) -> Labels:
    return (("actor", name),)
