"""Fixtures for the tests in this folder.

The tests share one vLLM generator, one torchstore, and one trainer with a single process.
"""

import asyncio

import pytest
import support

from rl_actors import GeneratorClient, TorchStoreTransport, TrainerClient
from rl_actors.processes.spawn import ProcessMesh, spawn_processes


@pytest.fixture(scope="session")
def transport():
    transport = TorchStoreTransport()
    asyncio.run(transport.open())
    yield transport
    asyncio.run(transport.close())


@pytest.fixture(scope="session")
def trainer_mesh(transport):
    processes = asyncio.run(spawn_processes("trainer", 1))
    yield processes.mesh.spawn("trainer", support.TestTrainer, support.trainer_config(), transport)
    asyncio.run(processes.stop())


@pytest.fixture(scope="session")
def ranks():
    """ranks(n) returns a mesh of n processes, on which a test spawns a trainer of its own.

    Tests share the processes, because starting processes is slow.
    """
    started: dict[int, ProcessMesh] = {}

    def of(count: int):
        if count not in started:
            started[count] = asyncio.run(spawn_processes(f"ranks_of_{count}", count))
        return started[count].mesh

    yield of
    for processes in started.values():
        asyncio.run(processes.stop())


@pytest.fixture(scope="session")
def generator_mesh(transport):
    processes = asyncio.run(spawn_processes("generator", 1, env={"OMP_NUM_THREADS": "1"}))
    yield processes.mesh.spawn("generator", support.TestGenerator, support.generator_config(), transport)
    asyncio.run(processes.stop())


@pytest.fixture
def trainer(trainer_mesh):
    """A new client for each test, of the shared trainer. The trainer has no accumulated gradients. Its weights and its
    policy_version are as the last test left them.
    """
    client = TrainerClient(trainer_mesh)
    client.discard_gradients().result()
    yield client
    client.close().result()


@pytest.fixture
def generator(generator_mesh):
    client = GeneratorClient(generator_mesh)
    yield client
    client.close().result()


@pytest.fixture
def synced(trainer, generator):
    """The version of the weights that trainer and generator both hold, after at least two training steps."""
    while support.step(trainer) < 2:
        pass
    return generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()


@pytest.fixture
def policy(synced, transport):
    """A transformers model with the synced weights."""
    return support.hf_model(support.published_weights(transport, synced))
