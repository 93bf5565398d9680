"""load_in_place copies weights into the parameters of a vLLM model. The parameters then have the values that vLLM's own loader gives them.

The tests run one or more tensor-parallel workers, and give the weights in pieces of unequal sizes. They build vLLM's model on a CPU. The
model's weights are not packed for CPU kernels, so they have the same form as on a GPU.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from references import save_random
from waiting import GUARD

from rl_actors import ModelConfig

MODEL = ModelConfig(
    vocab_size=50,  # not a multiple of 64, so vLLM pads the vocabulary
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)

PROGRAM = """
import os, sys
from pathlib import Path
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
from rl_actors.vllm import cpu
os.environ.update(cpu.ENV, VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", RANK=str(rank), LOCAL_RANK=str(rank))
# This program ends without a cleanup, so vLLM's segments of shared memory would remain. vLLM makes no segments if VLLM_DIST_IDENT differs
# between ranks.
os.environ["VLLM_DIST_IDENT"] = f"rank{rank}"
import torch
from safetensors.torch import load_file
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader.utils import initialize_model
from rl_actors.transports.base import LoadedTensors, OpenVersion, Piece
from rl_actors.vllm.in_place import load_in_place, make_plan


class InQuarters(LoadedTensors):
    # A matrix comes in four pieces, a vector in two. The pieces are unequal, as under FSDP and tensor parallelism if the number of ranks does
    # not divide the number of rows or columns.
    def pieces(self):
        for name, tensor in self.loaded.items():
            rows = len(tensor) // 3
            pieces = [Piece((0,) * tensor.ndim, tensor[:rows]), Piece((rows,) + (0,) * (tensor.ndim - 1), tensor[rows:])]
            if tensor.ndim == 2:
                columns = tensor.shape[1] // 2 + 5
                pieces = [
                    Piece((piece.start[0], start), piece.values[:, start:end].clone())
                    for piece in pieces
                    for start, end in ((0, columns), (columns, tensor.shape[1]))
                ]
            yield name, pieces


config = EngineArgs(
    model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
    kv_cache_memory_bytes=8 << 20, tensor_parallel_size=size, distributed_executor_backend="external_launcher",
).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(size, rank, f"file://{folder}/rendezvous{size}", rank, backend="gloo")
    initialize_model_parallel(size)
    model = initialize_model(config)
    weights = load_file(folder / "model.safetensors")
    model.load_weights(iter(weights.items()))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.zero_()
    plan = make_plan(model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    load_in_place(plan, InQuarters(weights))
    for name, parameter in model.named_parameters():
        assert expected[name].abs().sum() > 0 and torch.equal(parameter, expected[name]), name
    del weights["model.layers.1.self_attn.k_proj.weight"]
    try:
        make_plan(model, {name: tuple(tensor.shape) for name, tensor in weights.items()})
    except ValueError as error:
        assert "does not fill 1 parameters, such as model.layers.1.self_attn.qkv_proj.weight" in str(error), error
    else:
        raise AssertionError("make_plan accepted weights that do not fill all parameters")
print("equal", len(expected), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_load_in_place_gives_parameters_the_same_values_as_vllms_loader(tmp_path, num_workers, tied):
    """With four workers, each of the two key-value heads is on two workers."""
    save_random(tmp_path, replace(MODEL, tie_word_embeddings=tied))
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_workers)}
    workers = []
    for rank in range(num_workers):
        command = [sys.executable, "-c", PROGRAM, str(rank), str(num_workers), str(tmp_path)]
        workers.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for worker in workers:
        output, errors = worker.communicate(timeout=GUARD)
        assert worker.returncode == 0 and output.startswith("equal"), errors[-3000:]
