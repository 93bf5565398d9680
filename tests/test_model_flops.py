"""Tests of the formulas for a model's FLOPs, whose results are compared with counts by hand.

Also tests the MFU (model FLOPs utilization), which is the share of the GPUs' peak that a run reaches.
"""

from dataclasses import replace

import pytest
from fakes import trainer_info

from controllers.observe.logger import speed_metrics
from rl_actors import LoRAConfig, ModelConfig, TrainerConfig
from rl_actors.model_flops import PEAKS, flops_per_token, peak_flops, product_parameters, training_flops

MODEL = ModelConfig(
    vocab_size=50,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
)
ATTENTION = 8 * 12 + 2 * 8 * 6 + 12 * 8  # parameters of a block's attention
H100 = "NVIDIA H100 80GB HBM3"


def test_the_flops_of_a_document_match_a_count_over_its_positions():
    products, length = 3 * (ATTENTION + 3 * 8 * 12) + 8 * 50, 1000
    forward = 0
    for position in range(length):
        forward += 2 * products + 3 * 2 * (2 * 12 * (position + 1))  # attention scores, and weighted sum of values
    counted = length * flops_per_token(MODEL, length)
    # For each product of the forward pass, the backward pass has two.
    assert counted == pytest.approx(3 * forward, rel=2 / length)
    assert counted < 3 * forward


def test_the_router_and_only_the_experts_that_a_token_is_routed_to_count_as_its_parameters():
    experts = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5, mlp_only_layers=(0,))
    expected = 3 * ATTENTION + 3 * 8 * 12 + 2 * (8 * 4 + 2 * 3 * 8 * 5) + 8 * 50
    assert product_parameters(experts) == expected


def test_a_sample_attends_only_to_itself_and_frozen_weights_cost_no_flops_for_gradients():
    config = TrainerConfig(model=MODEL)
    apart = training_flops(config, [100, 300])
    assert apart == training_flops(config, [100]) + training_flops(config, [300]) < training_flops(config, [400])
    adapters = training_flops(replace(config, lora=LoRAConfig(rank=2)), [100])
    assert training_flops(config, [100]) - adapters == 100 * 2 * product_parameters(MODEL)


def test_mfu_is_1_at_the_peak_of_all_gpus_and_absent_where_the_peak_is_unknown():
    values = {"tokens/trained": 2000, "tflops/trained": 2 * 989.0, "time/train": 1.0, "time/step": 4.0}
    infos = [trainer_info(device_name=H100, rank=rank, peak_memory_bytes=rank << 30) for rank in range(2)]
    assert speed_metrics(values, infos, float8=False) == {
        "memory/trainer_peak": 1,
        "tokens/s": 500,
        "mfu": pytest.approx(1),
    }
    assert speed_metrics(values, infos, float8=True)["mfu"] == pytest.approx(1 / 2)
    assert "mfu" not in speed_metrics(values, [trainer_info()], float8=False)
    idle = {"time/step": 4.0}
    assert set(speed_metrics(idle, infos, float8=False)) == {"memory/trainer_peak"}


def test_the_peak_of_a_gpu_is_found_by_a_part_of_its_name():
    assert peak_flops(H100) == PEAKS["H100 80GB HBM3"]
    assert peak_flops("NVIDIA H200", float8=True) == 2 * PEAKS["H200"]
    assert peak_flops("NVIDIA H100 PCIe") is None and peak_flops("CPU") is None
