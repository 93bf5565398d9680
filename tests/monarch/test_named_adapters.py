"""Tests of LoRA adapters that a generator loads by name.

A real vLLM engine answers requests with different adapters and requests without an adapter in the same batch.
"""

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import support
import torch
from references import save_random
from safetensors.torch import load_file
from support import worst

from rl_actors import GeneratorClient, LoRAConfig, MemoryTransport, SamplingParams, adapters

pytestmark = pytest.mark.slow

NAMES = ("all layers", "attention", "no head", "rank 2")
CONFIGS = {
    "all layers": LoRAConfig(rank=4, alpha=16.0, train_unembed=True),
    "attention": LoRAConfig(rank=3, alpha=6.0, train_mlp=False),
    "no head": LoRAConfig(rank=4, alpha=16.0),
    "rank 2": LoRAConfig(rank=2, alpha=8.0, train_attn=False, train_unembed=True),
}
SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
SAMPLING = SamplingParams(max_tokens=24, n=3, seed=1)


def write_adapter(directory: Path, config: LoRAConfig, weights: dict[str, torch.Tensor], seed: int) -> dict:
    """Write a random adapter into a directory, and return the model's weights with the adapter merged into them."""
    directory.mkdir()
    draw = torch.Generator().manual_seed(seed)
    shapes = adapters.shapes(config, {name: tuple(weights[name].shape) for name in sorted(weights)})
    tensors = {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}
    adapters.write(directory, tensors, config, base="base")
    merged = dict(weights)
    for name in weights:
        a, b = adapters.names(name)
        if a in tensors:
            merged[name] = weights[name] + config.alpha / config.rank * tensors[b] @ tensors[a]
    return merged


@pytest.fixture(scope="module", params=["in process", "own process"])
def served(request, tmp_path_factory):
    """A generator with four loaded adapters, and transformers' models with the same weights.

    The requests of one step of vLLM can use at most two of the four adapters.
    """
    folder = tmp_path_factory.mktemp("adapters")
    base = save_random(folder / "base", support.model_config(tied=False))
    weights = load_file(f"{base}/model.safetensors")
    models = {None: support.hf_model(weights, tied=False)}
    for seed, name in enumerate(NAMES):
        merged = write_adapter(folder / name, CONFIGS[name], weights, seed)
        models[name] = support.hf_model(merged, tied=False)
    config = replace(
        support.generator_config(tied=False),
        hf_path=base,
        max_adapters=2,
        max_adapter_rank=4,
        own_process=request.param == "own process",
    )
    transport = MemoryTransport()
    asyncio.run(transport.open())
    with GeneratorClient.spawn(config, transport=transport, name="adapters") as generator:
        for name in NAMES:
            generator.load_adapter(name, str(folder / name))
        generator.ready().result()
        yield SimpleNamespace(generator=generator, models=models, folder=folder, weights=weights, transport=transport)
    asyncio.run(transport.close())


def expected(model, sequences) -> list[torch.Tensor]:
    return [support.reference_logprobs(model, tokens[:1], tokens[1:]) for tokens in sequences]


def check_completions(served, name, groups) -> None:
    for prompt, completion in support.with_prompts(PROMPTS, groups):
        reference = support.reference_logprobs(served.models[name], prompt, completion.tokens)
        assert worst([torch.tensor(completion.logprobs)], [reference]) < 1e-4


def test_requests_with_several_adapters_and_without_one_run_together(served):
    names = [*NAMES, None]
    generating = [served.generator.generate(PROMPTS, SAMPLING, adapter=name) for name in names]
    scoring = [served.generator.compute_logprobs(SEQUENCES, adapter=name) for name in names]
    for name, call in zip(names, generating, strict=True):
        check_completions(served, name, call.result())
    found = {name: call.result() for name, call in zip(names, scoring, strict=True)}
    for name in names:
        assert worst(found[name], expected(served.models[name], SEQUENCES)) < 1e-4
        assert all(worst(found[name], found[other]) > 0.05 for other in names if other != name)


def test_a_request_uses_no_prefix_that_was_cached_with_another_adapter(served):
    prompt = [index % support.VOCAB_SIZE for index in range(100)]
    for name in (None, *NAMES, None):
        [[completion]] = served.generator.generate(
            [prompt], SamplingParams(max_tokens=4, seed=2), adapter=name
        ).result()
        reference = support.reference_logprobs(served.models[name], prompt, completion.tokens)
        assert worst([torch.tensor(completion.logprobs)], [reference]) < 1e-4


def test_an_unloaded_adapter_is_refused_and_its_name_can_be_loaded_again_with_other_weights(served):
    generator, directory = served.generator, served.folder / "again"
    shutil.copytree(served.folder / "attention", directory)
    generator.load_adapter("again", str(directory)).result()
    before = generator.compute_logprobs(SEQUENCES, adapter="again").result()
    assert worst(before, expected(served.models["attention"], SEQUENCES)) < 1e-4
    running = generator.generate(PROMPTS, replace(SAMPLING, max_tokens=200), adapter="again")
    generator.unload_adapter("again").result()
    assert running.done()  # unload_adapter has waited for the running request
    check_completions(served, "attention", running.result())
    for call in (generator.generate, generator.compute_logprobs):
        with pytest.raises(ValueError, match="adapter='again' is not loaded; the loaded adapters are 'all layers', "):
            call(PROMPTS, adapter="again")
    shutil.rmtree(directory)
    shutil.copytree(served.folder / "no head", directory)
    generator.load_adapter("again", str(directory))
    after = generator.compute_logprobs(SEQUENCES, adapter="again").result()
    assert worst(after, expected(served.models["no head"], SEQUENCES)) < 1e-4
    generator.unload_adapter("again").result()


def test_adapters_that_do_not_fit_are_refused(served):
    generator, folder = served.generator, served.folder
    weights = {name: tensor for name, tensor in served.weights.items() if "layers.1." not in name}
    write_adapter(folder / "rank 5", LoRAConfig(rank=5), weights, 0)
    wide = {name: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:]) for name, tensor in weights.items()}
    write_adapter(folder / "wide", LoRAConfig(rank=2, train_mlp=False), wide, 0)
    with pytest.raises(ValueError, match="rank 5 has rank 5, but generator.max_adapter_rank=4"):
        generator.load_adapter("new", str(folder / "rank 5"))
    with pytest.raises(ValueError, match="missing has no adapter_config.json"):
        generator.load_adapter("new", str(folder / "missing"))
    with pytest.raises(ValueError, match="name 'attention' is loaded already"):
        generator.load_adapter("attention", str(folder / "attention"))
    with pytest.raises(ValueError, match=r"k_proj.lora_B.weight of shape .65, 2.; the model needs .64, 2."):
        generator.load_adapter("new", str(folder / "wide")).result()
    with pytest.raises(ValueError, match="adapter='new' is not loaded"):
        generator.unload_adapter("new")
    check_completions(served, None, generator.generate(PROMPTS, SAMPLING).result())


def test_a_generator_that_was_killed_is_started_again_with_its_adapters(served):
    num_restarts = served.generator.num_restarts
    os.kill(support.process_of("adapters-0").pid, signal.SIGKILL)
    groups = served.generator.generate(PROMPTS, SAMPLING, adapter="all layers").result()
    assert served.generator.num_restarts == num_restarts + 1
    check_completions(served, "all layers", groups)


def test_a_pull_replaces_the_weights_under_the_adapters(served):
    """A generator with loaded adapters pulls whole weights.

    The Tinker server's generator does so when a client samples with whole weights other than the base model's.
    """
    weights = support.random_weights(tied=False, seed=5)
    support.publish_from_here(served.transport, weights, stream="whole", version=3)
    served.generator.pull_model_state_dict(3).result()
    models = {None: support.hf_model(weights, tied=False)}
    for seed, name in enumerate(NAMES):
        models[name] = support.hf_model(
            write_adapter(served.folder / f"{name} 3", CONFIGS[name], weights, seed), tied=False
        )
    for name in (None, *NAMES):
        found = served.generator.compute_logprobs(SEQUENCES, adapter=name).result()
        assert worst(found, expected(models[name], SEQUENCES)) < 1e-4
