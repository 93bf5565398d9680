"""The weights of experts reach vLLM through the default transport.

Real trainers and generators have equal logprobs after every push and pull.
"""

from dataclasses import replace

import pytest
import support
import torch
from references import save_random
from safetensors.torch import load_file
from support import forward_logprobs, worst

from rl_actors import ModelConfig, SamplingParams, TrainerClient, TrainerConfig
from rl_actors.generator import expected_tensors

SEQUENCES = [[5, 6], list(range(30)), [7, 3] * 20]
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
LAYERS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = replace(support.model_config(tied=False), **LAYERS)
# vLLM's kernel on a CPU needs widths that are multiples of 32, so vLLM pads experts of width 48.
SPARSE = replace(
    support.model_config(tied=True),
    **LAYERS | {"moe_intermediate_size": 48},
    decoder_sparse_step=2,
    norm_topk_prob=False,
)
CASES = {
    "one process": (EXPERTS, {}),
    "padded experts in every second block, tied embeddings, TP2 and EP2": (
        SPARSE,
        {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
    ),
}


def trainer_config(path: str, degrees: dict[str, int] | None = None, **fields) -> TrainerConfig:
    limits = {"max_sequence_length": support.MAX_MODEL_LEN - 1, "tokens_per_row": support.MAX_MODEL_LEN}
    config = TrainerConfig(hf_path=path, **limits, **fields)
    for name, degree in (degrees or {}).items():
        setattr(config.parallelism, name, degree)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_pull_gives_the_generator_the_trainers_logprobs(tmp_path, case):
    model, degrees = CASES[case]
    config = trainer_config(save_random(tmp_path / "base", model), degrees)
    with TrainerClient.spawn(config) as trainer, trainer.spawn_generator() as generator:
        known = [torch.zeros(len(tokens) - 1) for tokens in SEQUENCES]
        for version in range(4):
            expected = forward_logprobs(trainer, SEQUENCES)
            # The logprobs differ from those of the last version, so the test would notice stale weights.
            assert worst(expected, known) > 0.1
            known = expected
            assert worst(generator.compute_logprobs(SEQUENCES).result(), expected) < 1e-4
            groups = generator.generate(PROMPTS, SamplingParams(max_tokens=24, n=4, seed=version)).result()
            pairs = support.with_prompts(PROMPTS, groups)
            logprobs = forward_logprobs(trainer, [prompt + completion.tokens for prompt, completion in pairs])
            for (_, completion), of_sequence in zip(pairs, logprobs, strict=True):
                assert completion.policy_versions == [version] * 24
                assert worst([torch.tensor(completion.logprobs)], [of_sequence[-24:]]) < 1e-4
            support.step(trainer, seed=version)
            generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()


@pytest.mark.parametrize("model", [support.model_config(), EXPERTS, SPARSE], ids=["dense", "experts", "sparse"])
def test_a_generator_expects_the_tensors_that_a_saved_model_has(tmp_path, model: ModelConfig):
    path = save_random(tmp_path / "base", model)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(f"{path}/model.safetensors").items()}
    assert expected_tensors(path) == saved


@pytest.mark.slow
def test_a_trainer_with_an_expert_bias_refuses_to_push_and_to_spawn_a_generator(tmp_path):
    config = trainer_config(save_random(tmp_path / "base", EXPERTS), load_balance_coeff=0.01)
    with TrainerClient.spawn(config) as trainer:
        with pytest.raises(ValueError, match="spawn_generator is not possible with load_balance_coeff=0.01"):
            trainer.spawn_generator()
        with pytest.raises(ValueError, match="push_model_state_dict is not possible with load_balance_coeff=0.01"):
            trainer.push_model_state_dict().result()
        assert support.step(trainer) == 1
