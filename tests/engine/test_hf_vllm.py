"""The real vLLM loads directories that export_hf has written, and gives the same tokens and logprobs as transformers.

In the names of tensors, C is the number of completion tokens, and V is the size of the vocabulary.
"""

from dataclasses import replace

import pytest
import torch
from references import random_samples, save_random
from test_hf import SHAPES

from rl_actors import GeneratorClient, GeneratorConfig, OptimParams, SamplingParams

PROMPT = random_samples([13], seed=3)[0].tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_vllm_generates_from_an_export_as_transformers_does(make_engine, tmp_path, shape):
    from transformers import AutoModelForCausalLM

    model_config = replace(SHAPES[shape], head_dim=32)  # vLLM's attention on a CPU supports no smaller head_dim
    engine = make_engine(save_random(tmp_path / "source", model_config))
    engine.forward_backward(random_samples([31, 7], seed=1), "cross_entropy")
    engine.optim_step(OptimParams(learning_rate=1e-2))
    path = str(tmp_path / "export")
    engine.export_hf(path)

    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    config = GeneratorConfig(model=model_config, hf_path=path, max_model_len=64, max_num_seqs=4, kv_cache_bytes=8 << 20)
    with GeneratorClient.spawn(config) as generator:
        [[completion]] = generator.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0)).result()
        [logprobs] = generator.compute_logprobs([PROMPT]).result()
    with torch.no_grad():
        logits_CV = reference(input_ids=torch.tensor([PROMPT + completion.tokens])).logits[0, len(PROMPT) - 1 : -1]
        expected = reference(input_ids=torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    assert len(completion.tokens) == 12 and completion.tokens == logits_CV.argmax(-1).tolist()
    assert (logprobs - expected[range(len(PROMPT) - 1), PROMPT[1:]]).abs().max() < 1e-4
