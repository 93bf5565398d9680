"""Adapters reach vLLM merged into the weights or as an adapter over them: real trainer, real generator, equal logprobs."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import support
import torch
from monarch.actor import concurrent_endpoint
from references import save_random
from safetensors.torch import load_file
from support import MAX_MODEL_LEN

from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    LoRAConfig,
    MemoryTransport,
    Sample,
    SamplingParams,
    TrainerClient,
    TrainerConfig,
    adapters,
)
from rl_actors.meshes import spawn_processes
from rl_actors.vllm_engine import NO_VERSION

LORA = LoRAConfig(rank=4, alpha=16.0, seed=3)
SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]


class AdapterGenerator(support.TestGenerator):
    @concurrent_endpoint
    async def load_directory(self, path: str) -> None:
        """Serve what export_lora wrote there."""
        thread = self.engine

        def load() -> None:
            from vllm.lora.request import LoRARequest

            thread.engine.add_lora(LoRARequest("adapter", 1, path, load_inplace=True))
            thread.engine.reset_prefix_cache(reset_running_requests=True)

        await asyncio.wrap_future(thread.submit(load))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_random(tmp_path_factory.mktemp("base"), support.model_config())


@pytest.fixture(scope="module", params=["merged", "adapter"])
def pair(request, base):
    """Trainer and generator of a process each, and what the generator computed before its first pull."""
    lora = replace(LORA, sync=request.param)
    transport = MemoryTransport()
    asyncio.run(transport.open())
    processes = [asyncio.run(spawn_processes(name, 1, env={"OMP_NUM_THREADS": "1"})) for name in ("trainer", "generator")]
    trainer_config = support.trainer_config(hf_path=base, lora=lora)
    generator_config = replace(support.generator_config(), hf_path=base, lora=lora)
    mesh = processes[1].mesh.spawn("generator", AdapterGenerator, generator_config, transport)
    generator = GeneratorClient(mesh)
    trainer = TrainerClient(processes[0].mesh.spawn("trainer", support.TestTrainer, trainer_config, transport))
    before = generator.compute_logprobs(SEQUENCES).result()
    parts = {"trainer": trainer, "generator": generator, "mesh": mesh, "transport": transport, "before": before}
    yield SimpleNamespace(sync=request.param, base=base, **parts)
    for client in (trainer, generator):
        client.close().result()
    for process in processes:
        asyncio.run(process.stop())
    asyncio.run(transport.close())


def forward(trainer, sequences) -> list[torch.Tensor]:
    return trainer.forward([Sample.from_tokens(tokens[:1], tokens[1:]) for tokens in sequences]).result().logprobs


def worst(a, b) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def sync(trainer, generator) -> int:
    return generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()


def test_every_push_gives_the_generator_the_trainers_logprobs(pair):
    known = pair.before
    for _ in range(3):
        version = sync(pair.trainer, pair.generator)
        expected = forward(pair.trainer, SEQUENCES)
        assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) < 1e-4
        assert version == 0 or worst(known, expected) > 0.1
        known = expected
        support.step(pair.trainer, seed=version)


def test_before_the_first_pull_the_generator_serves_the_base_weights(pair):
    model = support.hf_model(load_file(f"{pair.base}/model.safetensors"))
    expected = [support.reference_logprobs(model, tokens[:1], tokens[1:]) for tokens in SEQUENCES]
    assert worst(pair.before, expected) < 1e-4


def test_a_push_publishes_whole_weights_or_the_adapters_alone(pair):
    published = support.published_weights(pair.transport, sync(pair.trainer, pair.generator))
    whole = {name: tuple(tensor.shape) for name, tensor in load_file(f"{pair.base}/model.safetensors").items()}
    alone = adapters.shapes(LORA, whole)
    assert len(alone) == 2 * 7 * support.model_config().num_hidden_layers
    assert {name: tuple(x.shape) for name, x in published.items()} == (alone if pair.sync == "adapter" else whole)


def test_a_pull_while_requests_run_splits_them_into_old_and_new_policy(pair):
    old = sync(pair.trainer, pair.generator)
    completed: list[list[int]] = []
    call = pair.generator.generate(PROMPTS, SamplingParams(max_tokens=400, n=2, seed=1))
    support.wait_until(lambda: min(pair.mesh.num_tokens_under_way.call_one().get(), default=0) > 3)
    new = support.step(pair.trainer, seed=1)
    pair.trainer.push_model_state_dict().result()
    pair.generator.pull_model_state_dict(new).result()
    pairs = [(prompt, c) for prompt, group in zip(PROMPTS, call.result(), strict=True) for c in group]
    completed = [prompt + completion.tokens for prompt, completion in pairs]
    for (prompt, completion), of_new in zip(pairs, forward(pair.trainer, completed), strict=True):
        num_old = completion.policy_versions.count(old)
        assert 3 < num_old < 400
        assert completion.policy_versions == [old] * num_old + [new] * (400 - num_old)
        logprobs, of_new = torch.tensor(completion.logprobs), of_new[len(prompt) - 1 :]
        assert float((logprobs - of_new)[num_old:].abs().max()) < 1e-4
        assert float((logprobs - of_new)[:num_old].abs().max()) > 0.1


def test_a_pull_serves_no_cached_prefix(pair):
    sync(pair.trainer, pair.generator)
    prompt = list(range(40))  # longer than a block of the cache
    pair.generator.generate([prompt], SamplingParams(max_tokens=8)).result()
    new = support.step(pair.trainer, seed=3)
    sync(pair.trainer, pair.generator)
    [[completion]] = pair.generator.generate([prompt], SamplingParams(max_tokens=8, seed=3)).result()
    assert completion.policy_versions == [new] * 8
    [expected] = forward(pair.trainer, [prompt + completion.tokens])
    assert worst([torch.tensor(completion.logprobs)], [expected[-8:]]) < 1e-4


@pytest.mark.parametrize("kind", ["missing", "misshapen", "unknown"])
def test_adapters_that_do_not_fit_fail_and_leave_those_that_are_held(pair, kind):
    version = sync(pair.trainer, pair.generator)
    before = pair.generator.compute_logprobs(SEQUENCES).result()
    tensors = support.published_weights(pair.transport, version)
    name = next(name for name in tensors if "layers.1.self_attn.k_proj" in name)
    changed = {
        "missing": {n: x for n, x in tensors.items() if n != name},
        "misshapen": {**tensors, name: tensors[name][:-1]},
        "unknown": {**tensors, "model.embed_tokens.lora_A.weight": torch.zeros(3)},
    }[kind]
    latest = asyncio.run(pair.transport.get_object("latest"))
    support.publish_from_here(pair.transport, changed, stream=f"misfit_{kind}", version=900)
    try:
        with pytest.raises(ValueError, match="version 900 does not fit the model: .*(1 in all)"):
            pair.generator.pull_model_state_dict(900).result()
    finally:
        asyncio.run(pair.transport.put_object("latest", latest))
    assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), before) == 0


@pytest.mark.parametrize("pair", ["adapter"], indirect=True)
def test_vllm_loads_an_exported_adapter(pair, tmp_path):
    support.step(pair.trainer, seed=5)
    pair.trainer.export_lora(str(tmp_path / "adapter")).result()
    expected = forward(pair.trainer, SEQUENCES)
    assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) > 0.1
    pair.mesh.load_directory.call_one(str(tmp_path / "adapter")).get()
    assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) < 1e-4
