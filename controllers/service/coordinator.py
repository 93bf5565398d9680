"""The coordinator of a service: a Monarch actor that clients in other programs call.

The clients never call the actor meshes of the service. The coordinator runs in the service's process and passes the
clients' calls on to the object of class Service. For each mesh the Service has one client of its own (members.py). Only
this client calls the mesh.
The arguments of a call arrive as pickled bytes, and the coordinator unpickles the bytes. If the unpickling fails, only
the call fails. If Monarch unpickled the arguments, a failure would end the coordinator.
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
"""The services of this process by key.

Monarch pickles the arguments of a new actor, and a Service cannot be pickled. So the actor gets the key.
"""


class Coordinator(Actor):
    """The coordinator of one service. Any number of its calls can run at the same time.

    The Service decides which calls wait.
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
        """Drop an answer that cannot be delivered because its client has ended.

        Returning True keeps the actor running.
        """
        return True


def spawn_coordinator(service: Service) -> bytes:
    """Start the service's coordinator in this process.

    Returns a pickled reference to the coordinator. Other programs call the coordinator through this reference.
    """
    key = uuid.uuid4().hex[:12]
    _services[key] = service
    coordinator = this_proc().spawn(f"coordinator_{key}", Coordinator, key)
    coordinator.initialized.get()
    return cloudpickle.dumps(coordinator)
