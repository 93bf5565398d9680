"""The coordinator of a service as a Monarch actor. Clients in other programs call it.

Each actor mesh of the service has only one client, in the service's process. The coordinator runs in the same process and passes the calls
on to this client. It unpickles the arguments of a call itself. If they cannot be unpickled, only the call fails. If Monarch unpickled them,
the failure would end the coordinator.
"""

import pickle
import traceback
import uuid
from typing import TYPE_CHECKING

import cloudpickle
from monarch.actor import Actor, concurrent_endpoint, this_proc

from rl_actors.clients.call import in_background
from rl_actors.service.service import Service

if TYPE_CHECKING:
    from monarch.actor import UndeliverableMessageEnvelope

_services: dict[str, Service] = {}
"""Key -> service of this process. The arguments of an actor are pickled, and a Service cannot be pickled. So the actor gets the key."""


class Coordinator(Actor):
    """The coordinator of one service. Any number of its calls can run at the same time. The Service decides which of them wait."""

    def __init__(self, key: str) -> None:
        self.service = _services[key]

    @concurrent_endpoint
    async def call(self, number: int, endpoint: str, arguments: bytes, patience: float) -> bytes:
        """The answers of all ranks or the error of the call, pickled; see `opened`.

        number: number of the calling client. arguments: the pickled arguments. patience: seconds, as in Member.run.
        """
        try:
            unpickled = pickle.loads(arguments)
            answers = await in_background(self.service.call(number, endpoint, unpickled, patience), endpoint)
            return cloudpickle.dumps((answers, None))
        except Exception as error:
            return _pickled(error)

    def _handle_undeliverable_message(self, message: "UndeliverableMessageEnvelope") -> bool:
        """Drop an answer that cannot be delivered because its client has ended. True means that the actor goes on."""
        return True


def opened(answer: bytes) -> list[object]:
    """The answers of all ranks, from the bytes that `call` returns. Raises the error of the call."""
    answers, error = pickle.loads(answer)
    if error is not None:
        raise error
    return answers


def _pickled(error: Exception) -> bytes:
    """The pickled error. For an error that cannot be pickled and unpickled: a pickled RuntimeError with its traceback."""
    try:
        sent = cloudpickle.dumps((None, error))
        if type(pickle.loads(sent)[1]) is type(error):
            return sent
    except Exception:
        pass
    return cloudpickle.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))


def spawn_coordinator(service: Service) -> bytes:
    """Start the coordinator in this process. Returns a pickled reference to it, with which other programs call it."""
    key = uuid.uuid4().hex[:12]
    _services[key] = service
    coordinator = this_proc().spawn(f"coordinator_{key}", Coordinator, key)
    coordinator.initialized.get()
    return cloudpickle.dumps(coordinator)
