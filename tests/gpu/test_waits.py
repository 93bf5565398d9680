"""Tests that the host does not wait for the GPU while it launches kernels."""

import pytest
import torch

from rl_actors import GSPO, PPO, CrossEntropy, ModelConfig, Sample, TrainerConfig

pytestmark = pytest.mark.gpu


def test_a_copy_to_the_host_does_not_wait_for_work_launched_after_it():
    from rl_actors.engine import gpu

    numbers = torch.arange(1000.0, device="cuda")
    answer = gpu.HostCopy(2 * numbers)
    torch.cuda._sleep(2_000_000_000)  # about a second
    behind = torch.cuda.Event()
    behind.record()
    assert torch.equal(answer.wait(), 2 * torch.arange(1000.0)) and answer.wait().is_pinned()
    assert not behind.query()


def test_the_host_waits_for_no_kernel_while_it_launches_microbatches(monkeypatch):
    from rl_actors.engine.train_engine import TrainEngine

    process = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in process.items():
        monkeypatch.setenv(name, str(value))
    model = ModelConfig(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64)
    engine = TrainEngine(
        TrainerConfig(model=model, compute_dtype="bfloat16", max_sequence_length=512, tokens_per_row=1024)
    )
    draw = torch.Generator().manual_seed(0)
    of_policies = {"old_logprobs": -11.9, "advantages": 1.0}
    for loss, columns in ((CrossEntropy(), {}), (PPO(), of_policies), (GSPO(), of_policies)):
        samples = []
        for length in (500, 30, 450, 200, 512, 7, 90):
            ids = torch.randint(model.vocab_size, (length + 1,), generator=draw).tolist()
            samples.append(Sample.from_tokens(ids[:1], ids[1:], **columns))
        engine.forward_backward(samples, loss)  # the first call compiles
        engine.discard_gradients()
        batches = engine._batches(samples, samples[0].columns)
        torch.cuda.set_sync_debug_mode("error")  # a wait for the GPU raises an error
        try:
            outcomes = engine.runner.forward_backward(batches, loss, with_entropy=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(sum(outcome.lengths) for outcome in outcomes) == sum(len(sample) for sample in samples)
        engine.discard_gradients()
    torch.distributed.destroy_process_group()
