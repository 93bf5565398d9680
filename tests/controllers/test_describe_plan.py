"""The text that --plan prints, and the errors for runs that need more memory than the machine has.

--plan starts no run and writes no file.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs import CONFIGS
from configs.qwen3 import qwen3_4b, qwen3_8b, qwen3_8b_one_gpu
from configs.qwen3_ppo import qwen3_0_6b_ppo, qwen3_4b_ppo
from configs.tiny import tiny
from controllers.program import describe_plan
from rl_actors.memory_estimate import memory

ROOT = Path(__file__).parents[2]


def test_the_plan_shows_layout_memory_and_every_process():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.trainer.parallelism.tensor_parallel_degree = 2
    text = describe_plan.describe(config)
    assert "layout: data_parallel_shard=2 x tensor_parallel=2\n" in text
    assert "rows: at most 64 positions, multiples of 64; packed, at most 128 in a microbatch\n" in text
    held = memory(config.trainer)
    for name in ("parameters", "gradients", "optimizer", "buffers", "activations", "total"):
        assert f"  {name:<12} {describe_plan.size_text(getattr(held, name))}" in text
    places = [line.split(": ")[1] for line in text.splitlines() if line.startswith("  trainer-")]
    assert places == [
        "data_parallel_shard 0, tensor_parallel 0",
        "data_parallel_shard 0, tensor_parallel 1",
        "data_parallel_shard 1, tensor_parallel 0",
        "data_parallel_shard 1, tensor_parallel 1",
    ]
    assert "  generator-0  " in text and "  controller   " in text


def test_the_reference_model_has_as_many_processes_as_the_trainer():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 2
    assert "reference" not in describe_plan.describe(config)
    text = describe_plan.describe(replace(config, reference_kl=0.1))
    held = describe_plan.size_text(memory(replace(config.trainer, optimizer=None)).total)
    for rank in range(2):
        assert f"  reference-{rank}  CPU: data_parallel_shard {rank}, at most {held} of memory\n" in text


@pytest.mark.parametrize(
    ("degrees", "fields", "layout", "multiple", "places"),
    [
        (
            {"pipeline_parallel": 2, "data_parallel_shard": 2},
            {"tie_word_embeddings": False},
            "data_parallel_shard=2 x pipeline_parallel=2",
            64,
            [f"pipeline_parallel {stage}, data_parallel_shard {shard}" for stage in range(2) for shard in range(2)],
        ),
        ({"context_parallel": 2}, {}, "context_parallel=2", 256, ["context_parallel 0", "context_parallel 1"]),
        (
            {"data_parallel_shard": 4, "expert_parallel": 2},
            {"num_experts": 8},
            "data_parallel_shard=4 x expert_parallel=2",
            64,
            [f"data_parallel_shard {shard}, expert_parallel {shard % 2}" for shard in range(4)],
        ),
    ],
    ids=["PP2xFSDP2", "CP2", "FSDP4, EP2"],
)
def test_the_plan_shows_the_index_of_every_rank_in_each_dimension(degrees, fields, layout, multiple, places):
    config = tiny()
    config.trainer.model = replace(config.trainer.model, **fields)
    config.trainer.tokens_per_row = multiple
    for name, degree in degrees.items():
        setattr(config.trainer.parallelism, f"{name}_degree", degree)
    config.trainer.validate()
    text = describe_plan.describe(config)
    assert f"layout: {layout}\n" in text
    assert f"rows: at most {multiple} positions, multiples of {multiple}; packed" in text
    assert [line.split(": ")[1] for line in text.splitlines() if line.startswith("  trainer-")] == places
    assert f"  {'total':<12} {describe_plan.size_text(memory(config.trainer).total)}\n" in text


def test_a_long_list_of_ranks_is_shortened():
    config = tiny()
    config.trainer.parallelism.data_parallel_shard_degree = 40
    assert "trainer-15" in (text := describe_plan.describe(config)) and "trainer-16" not in text
    assert "  and 24 more trainer processes" in text


@pytest.fixture
def two_gpus(monkeypatch):
    """Makes torch report two GPUs of 140 GiB each."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=140 << 30))


def test_the_plan_says_what_each_gpu_holds_and_whether_that_is_too_much(two_gpus):
    config = qwen3_8b()
    first, second = (
        describe_plan.describe(config).split("\ntotals, not counting the memory of libraries:\n")[1].splitlines()
    )
    held = describe_plan.size_text(memory(config.trainer).total)
    assert first == f"  GPU 0: trainer-0 {held} + generator-0 35.0 GiB of 140.0 GiB"
    assert second == f"  GPU 1: trainer-1 {held} of 140.0 GiB"
    describe_plan.require_memory(config)
    config.generator.gpu_memory_utilization = 0.85
    assert f"  GPU 0: trainer-0 {held} + generator-0 119.0 GiB of 140.0 GiB: too much\n" in describe_plan.describe(
        config
    )
    refusal = "GPU 0 has 140.0 GiB, but its processes need 216.9 GiB .*; to take less, lower --trainer.tokens-per-row"
    with pytest.raises(ValueError, match=refusal):
        describe_plan.require_memory(config)
    config.generator.gpu = 2
    assert "  generator-0  GPU 2, which this machine does not have, vLLM in bfloat16\n" in describe_plan.describe(
        config
    )


def test_the_plan_has_every_replica_of_the_generator_with_its_gpus(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = qwen3_8b()
    config.generator.gpu, config.generator.replicas, config.generator.tensor_parallel = 1, 2, 2
    text = describe_plan.describe(config)
    assert "  generator-0  GPU 1 and GPU 2, vLLM in bfloat16, 2 ranks\n" in text
    assert "  generator-1  GPU 3 and GPU 4, vLLM in bfloat16, 2 ranks\n" in text
    taken = [demand.taken for demand in describe_plan.demands(config)]
    assert [[name for name in one if name.startswith("generator")] for one in taken] == [
        [],
        *[["generator-0"]] * 2,
        *[["generator-1"]] * 2,
    ]


def test_the_total_of_a_gpu_does_not_count_the_memory_that_fsdp_keeps_on_the_host(two_gpus):
    config = qwen3_4b()
    config.trainer.fsdp_cpu_offload = True
    held = memory(config.trainer)
    text = describe_plan.describe(config)
    for name in ("parameters", "gradients", "optimizer"):
        size = describe_plan.size_text(getattr(held, name))
        assert f"  {name:<12} {size} in the host's memory, not in the total\n" in text
    assert f"  GPU 0: trainer-0 {describe_plan.size_text(held.buffers + held.activations)} of 140.0 GiB" in text


def test_if_trainer_and_generator_take_turns_the_plan_has_the_memory_of_every_phase(two_gpus):
    config = qwen3_8b_one_gpu()
    held = memory(config.trainer)
    weights = held.parameters + held.buffers
    passes = weights + held.gradients + held.activations
    size = describe_plan.size_text
    totals = describe_plan.describe(config).split("\ntotals, not counting the memory of libraries:\n")[1].splitlines()
    assert totals == [
        f"  GPU 0 generating: trainer-0 {size(weights)} + generator-0 91.0 GiB of 140.0 GiB",
        f"  GPU 0 in forward_backward: trainer-0 {size(passes)} of 140.0 GiB",
        f"  GPU 0 in optim_step: trainer-0 {size(weights + held.gradients + held.optimizer)} of 140.0 GiB",
    ]
    text = describe_plan.describe(config)
    assert f"  on the host          optimizer {size(held.optimizer)}, while the generator works" in text
    describe_plan.require_memory(config)
    several = replace(config, updates_per_step=2)
    assert f"GPU 0 in forward_backward: trainer-0 {size(passes + held.optimizer)} of" in describe_plan.describe(several)
    config.colocation.offload = ("optimizer", "weights")
    assert "  GPU 0 generating: generator-0 91.0 GiB of 140.0 GiB\n" in describe_plan.describe(config)
    config.colocation.enabled = False
    with pytest.raises(
        ValueError, match=r"GPU 0 has 140.0 GiB, but its processes need .* \(trainer-0 .* \+ generator-0 91.0 GiB\)"
    ):
        describe_plan.require_memory(config)


@pytest.mark.parametrize("make", CONFIGS["controllers.grpo"].values(), ids=CONFIGS["controllers.grpo"])
def test_every_grpo_config_fits_on_two_gpus_of_140_gib(two_gpus, make):
    describe_plan.require_memory(make())


@pytest.mark.parametrize("make", [qwen3_0_6b_ppo, qwen3_4b_ppo], ids=["0.6B", "4B"])
def test_ppo_with_two_pushed_versions_leaves_room_on_two_gpus_of_141_gb(two_gpus, monkeypatch, make):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=141 * 10**9))
    config = make()
    config.validate()
    assert config.reference_kl > 0 and config.generator.gpus() == config.models()["critic"].gpus() == range(1, 2)
    first, second = describe_plan.demands(config)
    assert list(first.taken) == ["trainer-0", "reference-0"] and list(second.taken) == ["critic-0", "generator-0"]
    versions = 2 * 2 * memory(config.trainer).parameters // 4  # two pushed versions in bfloat16, on the trainer's GPU
    assert first.total + versions < 0.95 * first.capacity and second.total < 0.9 * second.capacity
    describe_plan.require_memory(config)
    config.critic.gpu = config.reference.gpu = config.generator.gpu = 0
    if make is qwen3_4b_ppo:
        with pytest.raises(ValueError, match="GPU 0 has 131.3 GiB, but its processes need .*"):
            describe_plan.require_memory(config)


def test_a_critic_that_takes_turns_is_on_the_host_while_trainer_or_generator_works(two_gpus):
    config = qwen3_4b_ppo()
    config.rollouts.max_staleness = 0
    config.critic.gpu, config.generator.gpu, config.reference_kl = None, 0, 0.0
    config.colocation.enabled = True
    config.validate()
    size = describe_plan.size_text
    held, critic = memory(config.trainer), memory(config.models()["critic"])
    weights = held.parameters + held.buffers
    lines = describe_plan.describe(config).split("\ntotals, not counting the memory of libraries:\n")[1].splitlines()
    assert lines == [
        f"  GPU 0 generating: trainer-0 {size(weights)} + generator-0 42.0 GiB of 140.0 GiB",
        f"  GPU 0 training the critic: trainer-0 {size(weights)} + critic-0 {size(critic.total)} of 140.0 GiB",
        # A step has several optimizer steps, so the optimizer's state is on the GPU during the later backward passes.
        f"  GPU 0 in forward_backward: trainer-0 {size(held.total)} of 140.0 GiB",
        f"  GPU 0 in optim_step: trainer-0 {size(weights + held.gradients + held.optimizer)} of 140.0 GiB",
    ]
    config.critic.gpu = 1  # no other model is on this GPU, so the critic keeps its memory
    places = {(demand.place, demand.phase): list(demand.taken) for demand in describe_plan.demands(config)}
    assert places["GPU 1", "generating"] == places["GPU 1", "in optim_step"] == ["critic-0"]
    assert ("GPU 0", "training the critic") not in places
    config.generator.gpu_memory_utilization = 0.95
    with pytest.raises(ValueError, match=r"GPU 0 has 140.0 GiB, but its processes need .* GiB while generating \("):
        describe_plan.require_memory(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with GPUs the plan counts the memory of each GPU")
def test_without_gpus_all_processes_share_the_memory_of_the_machine(monkeypatch):
    config = replace(tiny(), reference_kl=0.1)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    config.generator.dtype, config.generator.kv_cache_bytes = "bfloat16", 1 << 30
    (demand,) = describe_plan.demands(config)
    reference = memory(replace(config.trainer, optimizer=None)).total
    whole = memory(tiny().trainer).parameters
    assert demand.taken == {
        "trainer-0 to trainer-1": 2 * memory(config.trainer).total,
        "reference-0 to reference-1": 2 * reference,
        "generator-0": whole // 2 + (1 << 30),
    }
    monkeypatch.setattr(describe_plan.psutil, "virtual_memory", lambda: SimpleNamespace(total=demand.total))
    describe_plan.require_memory(config)
    monkeypatch.setattr(describe_plan.psutil, "virtual_memory", lambda: SimpleNamespace(total=demand.total - 1))
    with pytest.raises(
        ValueError, match="this machine has .*, but its processes need .*; to take less, choose a smaller model"
    ):
        describe_plan.require_memory(config)


def test_the_reference_model_is_on_the_trainers_gpus(two_gpus):
    config = replace(qwen3_4b(), reference_kl=0.1)
    held = describe_plan.size_text(memory(replace(config.trainer, optimizer=None)).total)
    assert f" + reference-0 {held} of 140.0 GiB" in describe_plan.describe(config)


def test_the_plan_of_ppo_has_every_rank_on_the_gpus_that_the_config_names(two_gpus):
    config = qwen3_0_6b_ppo()
    models = config.models()
    assert {name: model.gpus() for name, model in models.items()} == {
        "trainer": range(0, 1),
        "reference": range(0, 1),
        "critic": range(1, 2),
    }
    size = {name: describe_plan.size_text(memory(model).total) for name, model in models.items()}
    assert memory(models["reference"]).total < memory(models["critic"]).total < memory(models["trainer"]).total
    text = describe_plan.describe(config)
    lines = text.splitlines()
    assert "  trainer-0    GPU 0" in lines
    assert f"  reference-0  GPU 0, at most {size['reference']} of memory" in lines
    assert f"  critic-0     GPU 1, at most {size['critic']} of memory" in lines
    share = describe_plan.size_text(round(config.generator.gpu_memory_utilization * (140 << 30)))
    first, second = text.split("\ntotals, not counting the memory of libraries:\n")[1].splitlines()
    assert first == f"  GPU 0: trainer-0 {size['trainer']} + reference-0 {size['reference']} of 140.0 GiB"
    assert second.startswith(f"  GPU 1: critic-0 {size['critic']} + generator-0 {share} of 140.0 GiB")


def test_the_first_rank_of_a_trainer_has_the_gpu_of_its_config_and_the_others_the_next_gpus(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = qwen3_8b()
    config.trainer.gpu, config.generator.gpu = 2, 0
    text = describe_plan.describe(config)
    assert "  trainer-1    GPU 3: data_parallel_shard 1\n" in text
    places = [(demand.place, list(demand.taken)) for demand in describe_plan.demands(config)]
    assert places == [("GPU 0", ["generator-0"]), ("GPU 2", ["trainer-0"]), ("GPU 3", ["trainer-1"])]


def test_the_plan_has_the_size_of_a_checkpoint_which_is_the_same_in_every_layout():
    config = tiny()
    held = memory(config.trainer)
    line = f"checkpoints: {describe_plan.size_text(held.parameters + held.optimizer)} each on disk, every 25 steps; the newest 2 are kept"
    assert line in describe_plan.describe(config)
    config.trainer.parallelism.data_parallel_shard_degree = 2
    assert line in describe_plan.describe(config)
    ppo = replace(qwen3_0_6b_ppo(), checkpoint_every=5)
    both = [memory(model) for name, model in ppo.models().items() if name != "reference"]
    size = describe_plan.size_text(sum(each.parameters + each.optimizer for each in both))
    assert f"checkpoints: {size} each on disk, every 5 steps" in describe_plan.describe(ppo)
    assert "checkpoints:" not in describe_plan.describe(replace(config, checkpoint_every=0))


def test_the_command_line_prints_the_plan_and_writes_nothing(command_line, tmp_path):
    status, out, err = command_line("--config", "tiny", "--plan")
    assert status == 0, err
    assert out == describe_plan.describe(tiny()) + "\n"
    assert list(tmp_path.iterdir()) == []
