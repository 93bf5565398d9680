"""Real actors are killed in the middle of a push or a pull. Afterwards every generator that still runs has all weights of one version.

A slot is the memory for one trainer rank's part of a version. tests/transports/test_slots.py kills processes that write or read a slot in
shared memory, between any two tensors. test_served_slots.py, in the same folder, kills processes that send or receive the bytes of a slot,
between any two pieces.
"""

import asyncio

import pytest
import support
from support import forward_logprobs, worst
from waiting import GUARD

from rl_actors import GeneratorClient, IndexTransport, SamplingParams, TrainerClient, WeightsConfig
from rl_actors.processes.spawn import spawn_processes

SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
NUM_TENSORS = 24  # the model has 11 tensors in each of 2 blocks, plus the embedding and the last norm
THREAD = {"OMP_NUM_THREADS": "1"}


class Actors:
    """Context manager that opens a transport, in which a test's actors publish and find weights. When the context ends, the actors are stopped
    and the transport is closed.
    """

    def __init__(self, path: str = "auto") -> None:
        """path: the path on which the weights travel, as in WeightsConfig."""
        self.path = path

    def __enter__(self) -> "Actors":
        self.processes = []
        self.transport = IndexTransport(WeightsConfig(path=self.path))
        asyncio.run(self.transport.open())
        return self

    def __exit__(self, *_) -> None:
        async def stop() -> None:
            for processes in self.processes:
                await processes.stop()
            await self.transport.close()

        asyncio.run(stop())

    def spawn(self, name: str, count: int, actor: type, config):
        processes = asyncio.run(spawn_processes(name, count, env=THREAD))
        self.processes.append(processes)
        return processes.mesh.spawn(name, actor, config, self.transport)

    def generator(self, name: str):
        return self.spawn(name, 1, support.TestGenerator, support.generator_config())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "point_to_point"])
@pytest.mark.parametrize("rank, copied", [(1, 0), (0, NUM_TENSORS // 2), (1, NUM_TENSORS), (0, "written")])
def test_generators_keep_the_former_version_if_a_trainer_rank_is_killed_in_a_push(rank, copied, path):
    """copied: number of tensors that the rank has copied when it is killed.
    "written": the rank has copied all tensors and has ended its write.
    """
    with Actors(path) as actors:
        mesh = actors.spawn("trainer", 2, support.TestTrainer, support.trainer_config(shard=2))
        trainer, generator = TrainerClient(mesh), GeneratorClient(actors.generator("generator"))
        support.step(trainer)
        version = generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        before = generator.compute_logprobs(SEQUENCES).result()
        assert worst(before, forward_logprobs(trainer, SEQUENCES)) < 1e-4
        new = support.step(trainer, seed=1)
        mesh.die_in_push.call(rank, copied).get(timeout=GUARD)
        with pytest.raises(Exception, match="trainer"):
            trainer.push_model_state_dict().result()
        with pytest.raises(
            TimeoutError, match=rf"version {new} was not published within 0\.2 s; the newest is {version}"
        ):
            generator.pull_model_state_dict(new, timeout=0.2).result()
        assert worst(generator.compute_logprobs(SEQUENCES).result(), before) == 0
        [[completion]] = generator.generate([[5, 6, 7]], SamplingParams(max_tokens=4)).result()
        assert completion.policy_versions == [version] * 4
        trainer.close().result()
        generator.close().result()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["auto", "point_to_point"])
@pytest.mark.parametrize("loaded", [0, NUM_TENSORS // 2, NUM_TENSORS])
def test_a_generator_that_is_killed_in_a_pull_blocks_neither_the_trainer_nor_another_generator(loaded, path):
    """loaded: number of tensors that the generator has loaded when it is killed."""
    with Actors(path) as actors:
        trainer = TrainerClient(actors.spawn("trainer", 1, support.TestTrainer, support.trainer_config()))
        other = GeneratorClient(actors.generator("other"))
        dying_mesh = actors.generator("dying")
        dying = GeneratorClient(dying_mesh, name="dying")
        dying.ready().result()
        version = trainer.push_model_state_dict().result()
        dying_mesh.die_in_load.call_one(loaded).get(timeout=GUARD)
        with pytest.raises(Exception, match="dying"):
            dying.pull_model_state_dict(version).result()
        # The trainer has two slots, and pushes alternate between them. So the second push of this loop writes into the slot from which the killed
        # generator was reading.
        for seed in range(3):
            version = support.step(trainer, seed=seed)
            other.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
            assert worst(other.compute_logprobs(SEQUENCES).result(), forward_logprobs(trainer, SEQUENCES)) < 1e-4
        assert other.info().result().policy_version == version
        for client in (dying, other, trainer):
            client.close().result()
