"""A pull and a load from a directory give vLLM's engine the same weights, bit for bit. The tests compare digests of the
weights.

vLLM can compute digests of its parameters. On a CPU the parameters of linear layers are empty, because these layers
keep only packed weights. So the tests also compare digests of the weights that the layers compute with.
"""

import asyncio
from dataclasses import replace

import pytest
import support
from references import save_random
from waiting import GUARD

from rl_actors import GeneratorClient, IndexTransport, LoRAConfig, TrainerClient, TrainerConfig, WeightsConfig
from rl_actors.processes.spawn import spawn_processes

NUM_PULLS = 200
DENSE = support.model_config(tied=False)
EXPERTS = replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
FSDP2_TP2 = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}
# Each case has the model, the degrees of the trainer's parallelism, the adapters, and WeightsConfig.path. In the name of
# a case the number after FSDP, TP, PP or EP is the degree.
CASES = {
    "FSDP2 x TP2": (DENSE, FSDP2_TP2, LoRAConfig(), "auto"),
    "FSDP2 x TP2, point to point": (DENSE, FSDP2_TP2, LoRAConfig(), "point_to_point"),
    "PP2": (DENSE, {"pipeline_parallel_degree": 2}, LoRAConfig(), "auto"),
    "EP2": (EXPERTS, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}, LoRAConfig(), "auto"),
    "LoRA": (DENSE, {"tensor_parallel_degree": 2}, LoRAConfig(rank=4, alpha=16.0), "auto"),
}


def digests(mesh) -> dict[str, str]:
    return mesh.digests.call_one().get(timeout=GUARD)


async def start(trainer_config: TrainerConfig, transport: IndexTransport):
    await transport.open()
    trainers = await spawn_processes("trainer", trainer_config.num_processes(), env={"OMP_NUM_THREADS": "1"})
    generators = [await spawn_processes(name, 1, env={"OMP_NUM_THREADS": "1"}) for name in ("pulls", "loads")]
    return [trainers, *generators]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_pull_gives_the_digests_of_an_engine_that_loaded_the_same_weights_from_a_directory(tmp_path, case):
    model, degrees, lora, path = CASES[case]
    base = save_random(tmp_path / "base", model)
    config = TrainerConfig(hf_path=base, lora=lora, max_sequence_length=511, tokens_per_row=512)
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    transport = IndexTransport(WeightsConfig(path=path))
    trainers, *others = asyncio.run(start(config, transport))
    generator_config = replace(support.generator_config(), model=model)
    pulling, loading = [
        processes.mesh.spawn(name, support.TestGenerator, generator_config, transport if name == "pulling" else None)
        for name, processes in zip(("pulling", "loading"), others, strict=True)
    ]
    trainer = TrainerClient(trainers.mesh.spawn("trainer", support.TestTrainer, config, transport))
    generator, reference = GeneratorClient(pulling), GeneratorClient(loading)
    reference.ready().result()
    former: dict[str, str] = {}
    for pull in range(NUM_PULLS):
        version = support.step(trainer, seed=pull)
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        trainer.export_hf(str(tmp_path / f"{version}")).result()
        loading.load_weights_of.call_one(str(tmp_path / f"{version}")).get(timeout=GUARD)
        found = digests(pulling)
        assert found == digests(loading), f"pull {pull}"
        changed = {name for name in found if found[name] != former.get(name)}
        # In the case LoRA a pull changes only the projections. vLLM fuses the 7 projections of a block into
        # 4 weights, so with 2 blocks at least 8 digests change.
        assert len(changed) >= 8
        former = found

    async def stop() -> None:
        for processes in (trainers, *others):
            await processes.stop()
        await transport.close()

    asyncio.run(stop())


def test_a_pull_and_a_directory_give_the_same_digests(trainer, generator, generator_mesh, tmp_path):
    """One engine pulls two versions, and then loads both versions from directories. The digests of the two versions
    differ. So the test would fail if a pull or a load left the old weights in the engine.
    """
    found = {}
    for seed in (1, 2):
        version = support.step(trainer, seed=seed)
        generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
        found[version] = digests(generator_mesh)
        trainer.export_hf(str(tmp_path / str(version))).result()
    assert len({tuple(sorted(of_version.items())) for of_version in found.values()}) == 2
    for version, expected in found.items():
        generator_mesh.load_weights_of.call_one(str(tmp_path / str(version))).get(timeout=GUARD)
        assert digests(generator_mesh) == expected
