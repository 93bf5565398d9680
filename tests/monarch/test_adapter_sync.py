"""A trainer pushes LoRA adapters to vLLM, either merged into the weights (lora.sync="merged") or unmerged ("adapter").

After a pull, trainer and generator compute the same logprobs.
"""

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
from monarch.actor import concurrent_endpoint
from references import save_random
from safetensors.torch import load_file
from support import forward_logprobs, worst
from waiting import GUARD

from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    LoRAConfig,
    MemoryTransport,
    ModelConfig,
    SamplingParams,
    TrainerClient,
    adapters,
)
from rl_actors.processes.spawn import spawn_processes
from rl_actors.vllm import cpu, gpu
from rl_actors.vllm.requests import NO_VERSION

LORA = LoRAConfig(rank=4, alpha=16.0, seed=3)
SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]


class AdapterGenerator(support.TestGenerator):
    @concurrent_endpoint
    async def load_directory(self, path: str) -> None:
        """Serve an adapter that export_lora wrote."""
        thread = self.engine

        def load() -> None:
            from vllm.lora.request import LoRARequest

            thread.engine.add_lora(LoRARequest("adapter", 1, path, load_inplace=True))
            thread.engine.reset_prefix_cache(reset_running_requests=True)

        await asyncio.wrap_future(thread.submit(load))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_random(tmp_path_factory.mktemp("base"), support.model_config())


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("merged", "adapter")]


@pytest.fixture(scope="module", params=SLOW)
def pair(request, base):
    """Trainer and generator of one process each.

    `before` has the generator's logprobs of SEQUENCES before its first pull. `first_pull` is the result of
    pull_under_way for that pull.
    """
    lora = replace(LORA, sync=request.param)
    transport = MemoryTransport()
    asyncio.run(transport.open())
    processes = [
        asyncio.run(spawn_processes(name, 1, env={"OMP_NUM_THREADS": "1"})) for name in ("trainer", "generator")
    ]
    trainer_config = support.trainer_config(hf_path=base, lora=lora)
    generator_config = replace(support.generator_config(), hf_path=base, lora=lora)
    mesh = processes[1].mesh.spawn("generator", AdapterGenerator, generator_config, transport)
    generator = GeneratorClient(mesh)
    trainer = TrainerClient(processes[0].mesh.spawn("trainer", support.TestTrainer, trainer_config, transport))
    parts = {"trainer": trainer, "generator": generator, "mesh": mesh, "transport": transport}
    made = SimpleNamespace(sync=request.param, base=base, **parts)
    made.before = generator.compute_logprobs(SEQUENCES).result()
    made.first_pull = pull_under_way(made)
    yield made
    for client in (trainer, generator):
        client.close().result()

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes), transport.close())

    asyncio.run(stop())


def sync(trainer, generator) -> int:
    return generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()


def pull_under_way(pair) -> tuple[int, list]:
    """Take a step of training, and pull the new weights while requests run.

    Returns the new version, and every completion with its logprobs under the new weights.
    """
    call = pair.generator.generate(PROMPTS, SamplingParams(max_tokens=400, n=2, seed=1))
    support.wait_until(lambda: min(pair.mesh.num_tokens_under_way.call_one().get(), default=0) > 3)
    new = support.step(pair.trainer, seed=1)
    sync(pair.trainer, pair.generator)
    with_prompts = support.with_prompts(PROMPTS, call.result())
    logprobs = forward_logprobs(pair.trainer, [prompt + completion.tokens for prompt, completion in with_prompts])
    outcomes = []
    for (prompt, completion), of_sequence in zip(with_prompts, logprobs, strict=True):
        outcomes.append((completion, of_sequence[len(prompt) - 1 :]))
    return new, outcomes


def test_every_push_gives_the_generator_the_trainers_logprobs(pair):
    known = pair.before
    for _ in range(3):
        version = sync(pair.trainer, pair.generator)
        expected = forward_logprobs(pair.trainer, SEQUENCES)
        assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) < 1e-4
        assert worst(known, expected) > 0.1
        known = expected
        support.step(pair.trainer, seed=version)


def test_before_the_first_pull_the_generator_serves_the_base_weights(pair):
    model = support.hf_model(load_file(f"{pair.base}/model.safetensors"))
    expected = [support.reference_logprobs(model, tokens[:1], tokens[1:]) for tokens in SEQUENCES]
    assert worst(pair.before, expected) < 1e-4


def test_a_push_publishes_whole_weights_or_only_the_adapters(pair):
    published = support.published_weights(pair.transport, sync(pair.trainer, pair.generator))
    whole = {name: tuple(tensor.shape) for name, tensor in load_file(f"{pair.base}/model.safetensors").items()}
    of_adapters = adapters.shapes(LORA, whole)
    assert len(of_adapters) == 2 * 7 * support.model_config().num_hidden_layers
    assert {name: tuple(x.shape) for name, x in published.items()} == (of_adapters if pair.sync == "adapter" else whole)


@pytest.mark.parametrize("pull", ["first", "later"])
def test_during_a_pull_running_completions_change_from_the_old_to_the_new_policy(pair, pull):
    old = NO_VERSION if pull == "first" else sync(pair.trainer, pair.generator)
    new, outcomes = pair.first_pull if pull == "first" else pull_under_way(pair)
    for completion, of_new in outcomes:
        num_old = completion.policy_versions.count(old)
        assert 3 < num_old < 400
        assert completion.policy_versions == [old] * num_old + [new] * (400 - num_old)
        difference = (torch.tensor(completion.logprobs) - of_new).abs()
        assert difference[num_old:].max() < 1e-4
        assert difference[:num_old].max() > 0.1


def test_a_request_after_a_pull_uses_no_prefix_that_was_cached_before(pair):
    sync(pair.trainer, pair.generator)
    block_size = pair.mesh.cache_block_size.call_one().get(timeout=GUARD)
    # vLLM caches only whole blocks. This prompt fills two blocks.
    prompt = [index % support.VOCAB_SIZE for index in range(2 * block_size + 1)]
    pair.generator.generate([prompt], SamplingParams(max_tokens=8)).result()
    new = support.step(pair.trainer, seed=3)
    sync(pair.trainer, pair.generator)
    [[completion]] = pair.generator.generate([prompt], SamplingParams(max_tokens=8, seed=3)).result()
    assert completion.policy_versions == [new] * 8
    [expected] = forward_logprobs(pair.trainer, [prompt + completion.tokens])
    assert worst([torch.tensor(completion.logprobs)], [expected[-8:]]) < 1e-4


@pytest.mark.parametrize("kind", ["missing", "misshapen", "unknown"])
def test_a_pull_of_adapters_that_do_not_fit_fails_and_changes_nothing(pair, kind):
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


@pytest.mark.parametrize("pair", SLOW[1:], indirect=True)
def test_vllm_loads_an_exported_adapter(pair, tmp_path):
    support.step(pair.trainer, seed=5)
    pair.trainer.export_lora(str(tmp_path / "adapter")).result()
    expected = forward_logprobs(pair.trainer, SEQUENCES)
    assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) > 0.1
    pair.mesh.load_directory.call_one(str(tmp_path / "adapter")).get()
    assert worst(pair.generator.compute_logprobs(SEQUENCES).result(), expected) < 1e-4


UNEMBED = replace(LORA, train_unembed=True, sync="adapter")


@pytest.mark.slow
def test_a_generator_samples_and_computes_logprobs_with_an_adapter_of_the_output_projection(tmp_path):
    """The generator comes from spawn_generator, so that the test also covers the config that spawn_generator makes."""
    base = save_random(tmp_path / "base", support.model_config(tied=False))
    config = support.trainer_config(tied=False, hf_path=base, lora=UNEMBED)
    with TrainerClient.spawn(config) as trainer, trainer.spawn_generator() as generator:
        for seed in range(2):
            version = support.step(trainer, seed=seed)
            sync(trainer, generator)
            groups = generator.generate(PROMPTS, SamplingParams(max_tokens=24, n=4, seed=7)).result()
            pairs = support.with_prompts(PROMPTS, groups)
            logprobs = forward_logprobs(trainer, [prompt + completion.tokens for prompt, completion in pairs])
            for (_, completion), expected in zip(pairs, logprobs, strict=True):
                assert completion.policy_versions == [version] * 24
                assert worst([torch.tensor(completion.logprobs)], [expected[-24:]]) < 1e-4
            found = generator.compute_logprobs(SEQUENCES).result()
            assert worst(found, forward_logprobs(trainer, SEQUENCES)) < 1e-4


BARE_VLLM = """
import sys
from rl_actors import GeneratorConfig, LoRAConfig, ModelConfig
from rl_actors.vllm import cpu, start

if __name__ == "__main__":
    path = sys.argv[1]
    lora = LoRAConfig(rank=4, train_mlp=False, sync="adapter")
    limits = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_bytes": 8 << 20}
    config = GeneratorConfig(model=ModelConfig.from_hf(path), hf_path=path, lora=lora, **limits)
    cpu.require_possible = lambda config: None
    engine = start.start_vllm(config)
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, detokenize=False)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7, 8]}, params)
    while engine.has_unfinished_requests():
        engine.step()
"""


@pytest.mark.slow
def test_vllm_itself_fails_with_adapters_and_experts_on_a_cpu(tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    base = save_random(tmp_path / "base", replace(support.model_config(tied=False), **experts))
    (tmp_path / "program.py").write_text(BARE_VLLM)
    command = [sys.executable, "program.py", base]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, cwd=tmp_path, env=environment, timeout=GUARD, capture_output=True, text=True)
    assert finished.returncode != 0
    error = "module 'triton.language' has no attribute 'float32'"
    assert re.search(error, finished.stderr), finished.stderr[-2000:]


@pytest.mark.parametrize(
    "fields, machine, other, message",
    [
        (
            {"model": ModelConfig(num_experts=4), "dtype": "bfloat16"},
            cpu,
            gpu,
            'model.num_experts=4 with lora.sync="adapter" on a CPU',
        ),
        ({"dtype": "float32"}, gpu, cpu, 'generator.dtype="float32" with lora.sync="adapter" on a GPU'),
    ],
)
def test_a_machine_refuses_adapters_that_vllm_cannot_apply_there(fields, machine, other, message, tmp_path):
    config = GeneratorConfig(lora=replace(LORA, sync="adapter"), hf_path=str(tmp_path), **fields)
    config.model.save(tmp_path)
    with pytest.raises(ValueError, match=message):
        machine.require_possible(config)
    machine.require_possible(replace(config, lora=LORA))
    other.require_possible(config)


def test_a_generator_that_pulls_adapters_needs_base_weights():
    with pytest.raises(ValueError, match='generator.hf_path is empty with lora.sync="adapter"'):
        GeneratorConfig(lora=replace(LORA, sync="adapter")).validate()
