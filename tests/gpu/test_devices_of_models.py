"""A model uses the memory of the GPU that its config names. Needs two GPUs. No run of this test has come to its end yet."""

import pytest
import torch

from rl_actors import ModelConfig, Sample, TrainerConfig, ValueTrainerClient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


def test_a_value_model_takes_the_memory_of_the_gpu_that_its_config_names(tiny_run):
    tiny_run[0].wait()  # the run must end before the test measures the memory of the devices
    config = TrainerConfig(model=ModelConfig(num_hidden_layers=4), compute_dtype="bfloat16", gpu=1)
    before = free_bytes()
    with ValueTrainerClient.spawn(config) as critic:
        output = critic.forward([Sample.from_tokens([5, 6], [7, 8])]).result()
        taken = [old - new for old, new in zip(before, free_bytes(), strict=True)]
        [info] = critic.info().result()
    assert output.values is not None and len(output.values[0]) == 3
    # Each parameter takes 4 bytes. The other GPU must lose less than half of these bytes.
    assert taken[1] > 4 * info.num_parameters > 2 * taken[0]
