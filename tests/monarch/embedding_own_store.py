"""A Monarch program that opens and closes its own torchstore. test_lifecycle.py runs this program."""

import asyncio
import gc

import torchstore
from monarch.actor import Actor, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

import rl_actors as rl


class Collector(Actor):
    @endpoint
    async def num_frozen(self) -> int:
        """Number of objects that gc.freeze has taken out of garbage collection in this process. The number is 0, because rl_actors calls
        gc.freeze only in processes that it spawned."""
        return gc.get_freeze_count()


async def main() -> None:
    model = rl.ModelConfig(vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32)
    config = rl.GeneratorConfig(model=model, max_model_len=256)
    transport = rl.TorchStoreTransport(store_name="mine")  # this program opens and closes the store
    procs = {name: this_host().spawn_procs(per_host={"gpus": 1}) for name in ("store", "trainer", "generator")}
    await torchstore.initialize(store_name="mine", mesh=procs["store"])
    await setup_torch_elastic_env_async(procs["trainer"])
    trainer_mesh = procs["trainer"].spawn("trainer", rl.PolicyTrainer, rl.TrainerConfig(model=model), transport)
    generator_mesh = procs["generator"].spawn("generator", rl.Generator, config, transport)
    trainer, generator = rl.TrainerClient(trainer_mesh), rl.GeneratorClient(generator_mesh)
    await torchstore.put("a key of mine", 7, store_name="mine")
    await generator.pull_model_state_dict(await trainer.push_model_state_dict())
    [[completion]] = await generator.generate([[5, 6, 7]], rl.SamplingParams(max_tokens=8))
    output = await trainer.forward([rl.Sample.from_tokens([5, 6, 7], completion.tokens)])
    difference = max(abs(a - b) for a, b in zip(completion.logprobs, output.logprobs[0][2:].tolist(), strict=True))
    print(
        f"logprob_diff/max {difference:.1e}; a key of mine: {await torchstore.get('a key of mine', store_name='mine')}"
    )
    print(f"frozen in a process of mine: {await procs['trainer'].spawn('collector', Collector).num_frozen.call_one()}")
    await torchstore.shutdown("mine")
    await asyncio.gather(*(mesh.stop() for mesh in procs.values()))


asyncio.run(main())
