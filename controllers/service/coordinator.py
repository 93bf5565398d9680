"""The coordinator of a service: a Monarch actor that clients in other programs call. It passes
their calls on to the Service.

Arguments arrive pickled, so that a failure to unpickle fails only the call; in Monarch it would end
the coordinator.
"""

import pickle
import uuid
from typing import TYPE_CHECKING

import cloudpickle
from monarch.actor import Actor, concurrent_endpoint, this_proc

from controllers.service.service import Service
from rl_actors.clients.call import in_background
from rl_actors.processes.errors import sendable

if TYPE_CHECKING:
    from monarch.actor import UndeliverableMessageEnvelope

_services: dict[str, Service] = {}
"""By key, because a Service cannot be pickled as an argument of the actor."""


class Coordinator(Actor):
    """The coordinator of one service. Its calls run at the same time; the Service decides which
    wait.
    """

    def __init__(self, key: str) -> None:
        self.service = _services[key]

    @concurrent_endpoint
    async def call(self, number: int, endpoint: str, arguments: bytes, step_wait: float) -> bytes:
        """The pickled answers of all ranks, or the pickled error of the call. remote.opened unpickles them.

        number: the number that the service gave the calling client. arguments: the pickled arguments of the endpoint.
        step_wait: seconds that the call may wait for the end of another client's step.
        """
        try:
            unpickled = pickle.loads(arguments)
            answers = await in_background(self.service.call(number, endpoint, unpickled, step_wait), endpoint)
            return cloudpickle.dumps((answers, None))
        except Exception as error:
            return cloudpickle.dumps((None, sendable(error)))

    def _handle_undeliverable_message(self, message: "UndeliverableMessageEnvelope") -> bool:
        """Drop an answer to a client that has ended. True keeps the actor running."""
        return True


def spawn_coordinator(service: Service) -> bytes:
    """Start the service's coordinator here, and return a pickled reference to it."""
    key = uuid.uuid4().hex[:12]
    _services[key] = service
    coordinator = this_proc().spawn(f"coordinator_{key}", Coordinator, key)
    coordinator.initialized.get()
    return cloudpickle.dumps(coordinator)
