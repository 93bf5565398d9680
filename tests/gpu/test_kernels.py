"""Tests on one GPU. FlashAttention 4 and fused logprobs are compared with float32, and two deterministic trainers with
each other.

Letters of shapes: B rows, L positions of a row, N positions of all rows together, V tokens of the vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F

from rl_actors import PPO, ModelConfig, OptimParams, Sample, TrainerClient, TrainerConfig, num_loss_tokens
from rl_actors.types import IGNORE_TARGET

pytestmark = pytest.mark.gpu


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def test_flash_attention_4_agrees_with_float32_attention_under_a_dense_mask_of_the_documents():
    from rl_actors.engine import cpu, flash4

    num_rows, length, heads, groups, width = 2, 1024, 16, 8, 128
    spans = [(0, 0, 0, 300), (1, 0, 300, 301), (2, 0, 301, 1000), (3, 1, 0, 1017)]
    made = flash4.documents(num_rows, length, spans)
    masks = made._replace(cu_seq_q=made.cu_seq_q.cuda(), cu_seq_k=made.cu_seq_k.cuda())
    spans += [(0, 0, 1000, length), (0, 1, 1017, length)]  # the padding of a row is a document, too
    positions_BL = torch.zeros(num_rows, length, dtype=torch.int64)
    for _, row, start, end in spans:
        positions_BL[row, start:end] = torch.arange(end - start)
    draw = torch.Generator("cuda").manual_seed(0)
    inputs = [torch.randn(num_rows, length, n, width, generator=draw, device="cuda") for n in (heads, groups, groups)]
    rounded = [x.bfloat16().requires_grad_() for x in inputs]
    plain = [x.detach().float().requires_grad_() for x in rounded]
    out = flash4.CONFIGS["flash4"]().build()(*rounded, attention_masks=masks, enable_gqa=True)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in plain), attn_mask=cpu.dense_mask(positions_BL).cuda(), enable_gqa=True
    ).transpose(1, 2)
    upstream = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
    gradients = torch.autograd.grad(out, rounded, upstream)
    expected_gradients = torch.autograd.grad(expected, plain, upstream.float())
    assert relative_error(out, expected) < 1e-2
    for actual, known in zip(gradients, expected_gradients, strict=True):
        assert relative_error(actual, known) < 2e-2


def test_fused_logprobs_and_their_gradients_agree_with_float32():
    from rl_actors.engine import gpu
    from rl_actors.engine.vocab_parallel import Logits, TargetLogprobs

    draw = torch.Generator("cuda").manual_seed(0)
    logprobs = TargetLogprobs(gpu.this_machine().fuse)
    for num_positions in (1024, 768, 1024):
        raw_NV = torch.randn(num_positions, 151_936, generator=draw, device="cuda").bfloat16().mul_(3).requires_grad_()
        targets_N = torch.randint(151_936, (num_positions,), generator=draw, device="cuda")
        targets_N[::5] = IGNORE_TARGET
        temperatures_N = 0.5 + torch.rand(num_positions, generator=draw, device="cuda")
        plain_NV = raw_NV.detach().float().requires_grad_()
        all_NV = (plain_NV / temperatures_N[:, None]).log_softmax(-1)
        expected_N = all_NV.gather(-1, targets_N.clamp(min=0)[:, None])[:, 0] * (targets_N >= 0)
        actual_N = logprobs(Logits(raw_NV=raw_NV, temperatures_N=temperatures_N, vocab_size=151_936), targets_N)
        upstream_N = torch.randn(num_positions, generator=draw, device="cuda")
        (gradient,) = torch.autograd.grad(actual_N, raw_NV, upstream_N)
        (known,) = torch.autograd.grad(expected_N, plain_NV, upstream_N)
        torch.testing.assert_close(actual_N, expected_N, rtol=1e-5, atol=1e-5)
        assert gradient.dtype == torch.bfloat16 and relative_error(gradient, known) < 4e-3


@pytest.mark.parametrize("attention", ["flex", "flash4"])
def test_two_deterministic_trainers_report_bit_identical_metrics_and_grad_norms(attention):
    model = ModelConfig(num_hidden_layers=4)
    config = TrainerConfig(
        model=model,
        attention=attention,
        compute_dtype="bfloat16",
        max_sequence_length=1024,
        tokens_per_row=2048,
        deterministic=True,
    )
    draw = torch.Generator().manual_seed(0)
    samples = []
    for length in torch.randint(20, 900, (12,), generator=draw).tolist():
        ids = torch.randint(model.vocab_size, (length,), generator=draw).tolist()
        samples.append(Sample.from_tokens(ids[:4], ids[4:], old_logprobs=-11.9, advantages=1.0))
    params = OptimParams(learning_rate=1e-4, grad_divisor=num_loss_tokens(samples))
    with TrainerClient.spawn(config, name="one") as one, TrainerClient.spawn(config, name="other") as other:
        # All calls of both trainers are sent before any answer is read.
        calls: list[list] = [[], []]
        for of_trainer, trainer in zip(calls, (one, other), strict=True):
            for _ in range(3):
                of_trainer.append((trainer.forward_backward(samples, loss=PPO()), trainer.optim_step(params)))
        reported: list[list] = [[], []]
        for of_trainer, steps in zip(reported, calls, strict=True):
            for output, step in steps:
                of_trainer.append((output.result().metrics, step.result().grad_norm))
    assert reported[0] == reported[1]
