"""Weights that are not finite, or that overflow, in a real vLLM engine: requests with these weights fail, and no other request changes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from references import save_random
from waiting import GUARD

from rl_actors import ModelConfig

MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rope_theta=10_000.0,
    tie_word_embeddings=False,
)

PROGRAM = """
import os, sys
from functools import partial
from pathlib import Path
import torch
from safetensors.torch import load_file
from rl_actors import GeneratorConfig, LoRAConfig, SamplingParams, adapters
from rl_actors.transports.base import LoadedTensors
from rl_actors.types import NonFiniteError
from rl_actors.vllm.engine import EngineThread
from rl_actors.vllm.pull import WholeWeights
from rl_actors.vllm.requests import EngineCall, read_completion, read_prompt_logprobs, vllm_params

PARAMS = SamplingParams(max_tokens=8, n=4, seed=1)


def begin(engine, adapter=None):
    make_params = lambda prompt: vllm_params(PARAMS, prompt)
    return engine.start(EngineCall([[5, 6, 7]], make_params, partial(read_completion, PARAMS), adapter))


def completions(call):
    [(_, group)] = call.take(1).result()
    return [(completion.tokens, completion.logprobs) for completion in group]


def refusal(call):
    try:
        call.take(1).result()
    except NonFiniteError as error:
        return str(error)
    raise AssertionError("the call did not fail")


def prompt_call(engine, adapter=None):
    from vllm import SamplingParams as VLLMParams
    params = VLLMParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
    read = read_prompt_logprobs
    return engine.start(EngineCall([[5, 6, 7]], lambda _: [params], read, adapter, name="compute_logprobs"))


if __name__ == "__main__":
    folder, own_process, tensor_parallel = Path(sys.argv[1]), sys.argv[2] == "own", int(sys.argv[3])
    weights = load_file(folder / "model.safetensors")
    # The adapter is finite, but B A x overflows. So no check of weights finds it.
    shapes = adapters.shapes(LoRAConfig(rank=4), {name: tuple(tensor.shape) for name, tensor in weights.items()})
    (folder / "huge").mkdir()
    huge = {name: torch.full(shape, 1e25) for name, shape in shapes.items()}
    adapters.write(folder / "huge", huge, LoRAConfig(rank=4), base=str(folder))
    # One megabyte of cache is few blocks, so every block is soon used again.
    engine = EngineThread(
        GeneratorConfig(
            hf_path=str(folder), max_model_len=512, max_num_seqs=16, kv_cache_bytes=1 << 20,
            enforce_eager=not torch.cuda.is_available(), dtype="bfloat16" if torch.cuda.is_available() else "float32",
            max_adapters=2, own_process=own_process, tensor_parallel=tensor_parallel,
        ),
        WholeWeights(),
    )
    engine.load_adapter("huge", str(folder / "huge")).result()
    expected = completions(begin(engine))

    text = refusal(begin(engine, "huge"))
    assert "generate with the adapter 'huge'" in text and "is nan, for the prompt of 3 tokens" in text, text
    assert "compute_logprobs with the adapter 'huge'" in refusal(prompt_call(engine, "huge"))
    for _ in range(3):
        assert completions(begin(engine)) == expected
    # Requests of both kinds in the same steps.
    calls = [begin(engine, adapter) for adapter in ("huge", None, "huge", None)]
    assert completions(calls[1]) == completions(calls[3]) == expected
    assert "'huge'" in refusal(calls[0]) and "'huge'" in refusal(calls[2])
    # An aborted request leaves no output, but it leaves its blocks.
    call = begin(engine, "huge")
    engine.abort(call)
    assert completions(begin(engine)) == expected

    engine.update(LoadedTensors({name: tensor * float("nan") for name, tensor in weights.items()}), 1).result()
    assert refusal(begin(engine)).startswith("generate: ")
    engine.update(LoadedTensors(weights), 2).result()
    for _ in range(3):
        assert completions(begin(engine)) == expected
    print("clean")
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("core", "tensor_parallel"), [("in process", 1), ("own", 1), ("own", 2)])
def test_numbers_that_are_not_finite_stay_in_the_requests_that_made_them(core, tensor_parallel, tmp_path):
    save_random(tmp_path, MODEL)
    # A file, because a core in its own process imports the main module again.
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(program), str(tmp_path), core, str(tensor_parallel)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=GUARD)
    assert "clean" in done.stdout, done.stdout + done.stderr
