"""Tests of the order in which a trainer gets the calls of several clients of a service. A fake stands for the trainer.

A client opens a step with forward_backward, and closes the step with optim_step or discard_gradients.
"""

import asyncio
from dataclasses import dataclass, field

import pytest
from fakes import trainer_info

from controllers.service.members import ModelMember
from controllers.service.service import Service

LONG = 600.0


@dataclass
class FakeModel:
    """Stands for a trainer with two ranks, and for the TrainerClient with which the service calls this trainer.

    The fake records the calls in `sent`. A call waits until `gate` is set.
    """

    name: str = "trainer"
    state: str = "idle"
    sent: list[tuple[str, object]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failing: set[str] = field(default_factory=set)
    policy_version: int = 0

    async def info(self):
        return [trainer_info(rank=rank, state=self.state, policy_version=self.policy_version) for rank in range(2)]

    async def is_alive(self) -> bool:
        return True

    async def relay(self, endpoint: str, *arguments: object) -> list[object]:
        async with self.turn:
            await self.gate.wait()
            self.sent.append((endpoint, *arguments))
            if endpoint in self.failing:
                raise ValueError(f"{endpoint} fails")
            if endpoint == "forward_backward":
                self.state = "open"
            elif endpoint in ("optim_step", "discard_gradients"):
                self.state = "idle"
            if endpoint == "optim_step":
                self.policy_version += 1
            return [self.policy_version] * 2


async def open_service() -> tuple[FakeModel, Service]:
    model = FakeModel()
    model.gate.set()
    return model, Service({"trainer": ModelMember(model, await model.info())})


async def settle() -> None:
    """Let the other tasks run until each of them has ended or waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_step_of_one_client_ends_before_the_step_of_another_begins():
    async def main():
        model, service = await open_service()
        clients = [service.attach(name, "trainer") for name in "abc"]

        async def steps(client) -> None:
            for index in range(3):
                await service.call(client.number, "forward_backward", [(client.name, index, 0)], LONG)
                await service.call(client.number, "forward_backward", [(client.name, index, 1)], LONG)
                await service.call(client.number, "optim_step", [(client.name, index)], LONG)

        await asyncio.gather(*map(steps, clients))
        return model.sent

    sent = asyncio.run(main())
    assert len(sent) == 27
    trained = {name: [] for name in "abc"}
    for first, second, step in zip(sent[::3], sent[1::3], sent[2::3], strict=True):
        name, index = step[1]
        assert (first, second) == (
            ("forward_backward", (name, index, 0)),
            ("forward_backward", (name, index, 1)),
        )
        trained[name].append(index)
    assert trained == {name: [0, 1, 2] for name in "abc"}


def test_the_gradients_of_a_client_that_leaves_the_service_are_discarded_and_the_next_client_opens_a_step():
    async def main():
        model, service = await open_service()
        dying, other = service.attach("dying", "trainer"), service.attach("other", "trainer")
        await service.call(dying.number, "forward_backward", ["dying"], LONG)
        waiting = asyncio.ensure_future(service.call(other.number, "forward_backward", ["other"], LONG))
        await settle()
        assert not waiting.done()
        service.leave(dying)
        await waiting
        with pytest.raises(RuntimeError, match="client 1 of the service has left, so optim_step was not run"):
            await service.call(dying.number, "optim_step", ["dying"], LONG)
        return model.sent

    assert asyncio.run(main()) == [
        ("forward_backward", "dying"),
        ("discard_gradients",),
        ("forward_backward", "other"),
    ]


def test_if_a_client_leaves_the_service_during_its_forward_backward_the_gradients_are_discarded_after_the_call():
    async def main():
        model, service = await open_service()
        dying, other = service.attach("dying", "trainer"), service.attach("other", "trainer")
        model.gate.clear()
        abandoned = asyncio.ensure_future(service.call(dying.number, "forward_backward", ["dying"], LONG))
        await settle()
        service.leave(dying)
        waiting = asyncio.ensure_future(service.call(other.number, "forward_backward", ["other"], LONG))
        await settle()
        model.gate.set()
        await asyncio.gather(abandoned, waiting)
        return model.sent

    assert asyncio.run(main()) == [
        ("forward_backward", "dying"),
        ("discard_gradients",),
        ("forward_backward", "other"),
    ]


def test_a_waiting_call_of_a_client_that_leaves_the_service_is_not_run():
    async def main():
        model, service = await open_service()
        holder, dying = service.attach("holder", "trainer"), service.attach("dying", "trainer")
        await service.call(holder.number, "forward_backward", ["holder"], LONG)
        waiting = asyncio.ensure_future(service.call(dying.number, "forward_backward", ["dying"], LONG))
        await settle()
        service.leave(dying)
        with pytest.raises(RuntimeError, match="client 2 .dying. has left"):
            await waiting
        await service.call(holder.number, "optim_step", [], LONG)
        await service.call(holder.number, "forward_backward", ["holder"], LONG)
        return model.sent

    assert [call[0] for call in asyncio.run(main())] == ["forward_backward", "optim_step", "forward_backward"]


def test_the_error_of_a_call_that_waits_too_long_names_the_client_with_the_open_step():
    async def main():
        model, service = await open_service()
        holder, other = service.attach("slow", "trainer"), service.attach("other", "trainer")
        await service.call(holder.number, "forward_backward", ["slow"], LONG)
        with pytest.raises(RuntimeError, match=r"optim_step waited 0.01 s, and client 1 \(slow\) still has the step"):
            await service.call(other.number, "optim_step", ["other"], 0.01)
        # Calls that only read the weights do not wait.
        await service.call(other.number, "forward", ["other"], 0.01)
        await service.call(other.number, "push_model_state_dict", [], 0.01)
        await service.call(holder.number, "optim_step", ["slow"], LONG)
        await service.call(other.number, "forward_backward", ["other"], 0.01)
        return model.sent

    names = [call[0] for call in asyncio.run(main())]
    assert names == ["forward_backward", "forward", "push_model_state_dict", "optim_step", "forward_backward"]


def test_a_refused_forward_backward_opens_no_step_and_a_failed_optim_step_leaves_the_step_open():
    async def main():
        model, service = await open_service()
        first, second = service.attach("first", "trainer"), service.attach("second", "trainer")
        model.failing = {"forward_backward"}
        with pytest.raises(ValueError, match="forward_backward fails"):
            await service.call(first.number, "forward_backward", ["first"], LONG)
        model.failing = set()
        await service.call(second.number, "forward_backward", ["second"], 0.01)
        model.failing = {"optim_step"}
        with pytest.raises(ValueError, match="optim_step fails"):
            await service.call(second.number, "optim_step", [], LONG)
        with pytest.raises(RuntimeError, match="client 2"):
            await service.call(first.number, "forward_backward", ["first"], 0.01)
        await service.call(second.number, "discard_gradients", [], LONG)
        model.failing = set()
        await service.call(first.number, "forward_backward", ["first"], 0.01)

    asyncio.run(main())


def test_the_description_of_a_service_names_the_clients_and_the_client_with_the_open_step():
    async def main():
        _, service = await open_service()
        client = service.attach("someone, pid 7 on here", "trainer")
        await service.call(client.number, "forward_backward", ["x"], LONG)
        return await service.describe()

    state = asyncio.run(main())
    assert state["members"]["trainer"]["open_step_of"] == "client 1 (someone, pid 7 on here)"
    assert [(one["client"], one["calls"]) for one in state["clients"]] == [("client 1 (someone, pid 7 on here)", 1)]
