"""Environment variables of processes on GPUs, vLLM's options there, and errors for configs that a machine cannot run.

The tests need no GPU.
"""

import re
import sys
from dataclasses import replace

import pytest
import torch

from configs.qwen3 import MODELS, qwen3_0_6b, qwen3_0_6b_one_gpu, qwen3_8b
from controllers.program.launch import start_loop
from controllers.run.actors import shares_gpu
from rl_actors import (
    GeneratorClient,
    GeneratorConfig,
    MemoryTransport,
    ModelConfig,
    ReferenceClient,
    TrainerClient,
    TrainerConfig,
    ValueTrainerClient,
    validation,
)
from rl_actors.clients import ranks
from rl_actors.clients.generator import config_of_engine
from rl_actors.clients.one_generator import process_environment
from rl_actors.processes import mps, threads
from rl_actors.seeds import hashed_seed
from rl_actors.vllm import cpu, gpu
from rl_actors.vllm.start import require_machine


def on_gpus(monkeypatch, count: int, visible: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_the_first_gpu_that_a_generator_sees_is_the_gpu_of_its_config(monkeypatch):
    on_gpus(monkeypatch, 2, "5,7")
    assert process_environment(GeneratorConfig(gpu=1, num_threads=3)) == {
        "CUDA_VISIBLE_DEVICES": "7,5",  # the GPU of the config first
        "OMP_NUM_THREADS": "3",
    }
    assert process_environment(GeneratorConfig()) == {}
    on_gpus(monkeypatch, 2, "")
    assert process_environment(GeneratorConfig(gpu=1)) == {"CUDA_VISIBLE_DEVICES": "1,0"}


def test_processes_on_a_gpu_have_four_host_threads_unless_omp_num_threads_is_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads.gpu_environment() == {}  # on a CPU the threads compute the model, so they are not limited
    on_gpus(monkeypatch, 1, "")
    assert threads.gpu_environment() == {"OMP_NUM_THREADS": "4"}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        threads.prepare_gpu_process()
        assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "9")
        assert threads.gpu_environment() == {}
        torch.set_num_threads(6)
        threads.prepare_gpu_process()
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_gpus(monkeypatch):
    on_gpus(monkeypatch, 1, "")
    with pytest.raises(ValueError, match="generator.gpu=1, but this program sees 1 GPUs"):
        process_environment(GeneratorConfig(gpu=1))


def test_replicas_and_tensor_parallel_ranks_have_gpus_of_their_own(monkeypatch):
    on_gpus(monkeypatch, 6, "2,3,4,5,6,7")
    config = GeneratorConfig(gpu=1, replicas=2, tensor_parallel=2, seed=5)
    validation.require_gpu(config)
    replicas = [config_of_engine(config, index) for index in range(2)]
    visible = [process_environment(replica)["CUDA_VISIBLE_DEVICES"] for replica in replicas]
    assert visible == ["3,4,2,5,6,7", "5,6,2,3,4,7"]  # the two GPUs of each replica first
    assert [(replica.replicas, replica.seed) for replica in replicas] == [
        (1, hashed_seed(5, 0)),
        (1, hashed_seed(5, 1)),
    ]
    for too_many in (replace(config, replicas=3), replace(config, tensor_parallel=3)):
        with pytest.raises(ValueError, match=r"takes 6 GPUs from generator.gpu=1 on, but this program sees 6"):
            GeneratorClient.spawn(too_many)


def test_engines_of_a_replica_share_its_gpus_and_divide_sequences_and_memory(monkeypatch):
    on_gpus(monkeypatch, 4, "0,1,2,3")
    config = GeneratorConfig(replicas=2, engines_per_gpu=2, max_num_seqs=255, gpu_memory_utilization=0.8)
    validation.require_gpu(config)
    engines = [config_of_engine(config, index) for index in range(config.num_engines)]
    assert [engine.gpu for engine in engines] == [0, 0, 1, 1]
    assert {(engine.replicas, engine.max_num_seqs, engine.gpu_memory_utilization) for engine in engines} == {
        (1, 128, 0.4)
    }
    assert len({engine.seed for engine in engines}) == 4
    folders = {process_environment(engine).get(mps.PIPES) for engine in engines}
    assert folders == {mps.environment().get(mps.PIPES)}  # all are clients of one daemon
    assert mps.PIPES not in process_environment(GeneratorConfig(gpu=0, engines_per_gpu=1))
    assert [config_of_engine(config, index, num_hosts=2).gpu for index in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "fields, number, why",
    [
        ({}, 2, "0.6 billion parameters, 256 sequences, 16 cores"),
        ({"max_num_seqs": 1024}, 2, "0.6 billion parameters, 1024 sequences, 16 cores"),
        ({"max_num_seqs": 64}, 1, "generator.max_num_seqs=64 is below 128"),
        ({"tensor_parallel": 2}, 1, "generator.tensor_parallel=2"),
        ({"model": MODELS["8b"]}, 1, "8.2 billion parameters keep the GPU busy"),
        ({"engines_per_gpu": 3}, 3, "generator.engines_per_gpu=3"),
    ],
)
def test_the_number_of_engines_on_a_gpu_is_chosen_with_a_reason(monkeypatch, fields, number, why):
    on_gpus(monkeypatch, 4, "0,1,2,3")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert GeneratorConfig(**fields).engines() == (number, why)


def test_on_a_cpu_a_replica_is_one_engine():
    assert GeneratorConfig().engines() == (1, "engines on a CPU would share its cores")


def test_replicas_on_different_hosts_may_have_the_same_gpu_index(monkeypatch):
    on_gpus(monkeypatch, 4, "0,1,2,3")
    config = GeneratorConfig(replicas=5, tensor_parallel=2)
    assert [config_of_engine(config, index, num_hosts=3).gpu for index in range(5)] == [0, 0, 0, 2, 2]
    validation.require_gpu(config, num_hosts=3)
    with pytest.raises(ValueError, match=r"takes 6 GPUs of each of 2 hosts, from generator.gpu=0 on, but .* sees 4"):
        validation.require_gpu(config, num_hosts=2)


def test_a_replica_on_a_machine_without_gpus_has_no_gpu():
    assert config_of_engine(GeneratorConfig(replicas=2), 1).gpu is None


@pytest.mark.parametrize("field", ["replicas", "tensor_parallel", "engines_per_gpu"])
def test_zero_replicas_or_tensor_parallel_ranks_are_refused(field):
    with pytest.raises(ValueError, match=f"generator.{field}=0; it must be positive"):
        GeneratorClient.spawn(GeneratorConfig(**{field: 0}))


def test_a_trainer_of_more_processes_than_gpus_is_refused_by_the_client(monkeypatch):
    config = TrainerConfig()
    config.parallelism.data_parallel_shard_degree = 2
    validation.require_gpus(config)  # on a CPU any number of processes may share the cores
    on_gpus(monkeypatch, 1, "")
    with pytest.raises(ValueError, match="data_parallel_shard=2 takes 2 GPUs, but this program sees 1"):
        TrainerClient.spawn(config)
    on_gpus(monkeypatch, 2, "")
    validation.require_gpus(config)


def test_the_gpus_that_a_trainers_config_chooses_come_first_in_cuda_visible_devices(monkeypatch):
    asked = {}

    async def spawn_processes(name, num_processes, *, env, **_):
        asked[name] = (num_processes, env)
        raise RuntimeError("nothing is started here")

    monkeypatch.setattr(ranks, "spawn_processes", spawn_processes)
    on_gpus(monkeypatch, 4, "3,2,1,0")
    usual, later = TrainerConfig(), TrainerConfig(gpu=1)
    later.parallelism.data_parallel_shard_degree = 2
    clients = {
        "usual": TrainerClient.spawn(usual, transport=MemoryTransport(), name="usual"),
        "critic": ValueTrainerClient.spawn(later, name="critic"),
        "reference": ReferenceClient.spawn(replace(usual, gpu=3), name="reference"),
    }
    for client in clients.values():
        with pytest.raises(RuntimeError, match="nothing is started here"):
            client.ready().result()
        client.close().result()
    assert asked == {
        "usual": (1, None),
        "critic": (2, {"CUDA_VISIBLE_DEVICES": "2,1,3,0"}),
        "reference": (1, {"CUDA_VISIBLE_DEVICES": "0,3,2,1"}),
    }


def test_a_trainer_with_too_few_gpus_from_its_first_gpu_on_is_refused(monkeypatch):
    config = TrainerConfig(gpu=1)
    config.parallelism.data_parallel_shard_degree = 2
    validation.require_gpus(config)  # on a CPU the field `gpu` has no effect
    on_gpus(monkeypatch, 2, "")
    refusal = "data_parallel_shard=2 takes 2 GPUs from gpu=1 on, but this program sees 2, numbered from 0"
    with pytest.raises(ValueError, match=refusal):
        ReferenceClient.spawn(config)
    with pytest.raises(ValueError, match=r"one process takes 1 GPU from critic.gpu=2 on, but this program sees 2"):
        validation.require_gpus(TrainerConfig(gpu=2), "critic")
    with pytest.raises(ValueError, match="gpu=-1; it must be at least 0"):
        TrainerClient.spawn(TrainerConfig(gpu=-1))


def test_the_gpus_of_every_model_of_a_run_are_checked_before_the_run_begins(monkeypatch, capsys, tmp_path):
    on_gpus(monkeypatch, 2, "")
    monkeypatch.chdir(tmp_path)
    flags = {"critic.gpu": "one process takes 1 GPU from critic.gpu=2 on", "reference.gpu": "from reference.gpu=2 on"}
    for flag, text in flags.items():
        command = ["ppo", "--config", "qwen3_0_6b_ppo", "--reference-kl", "0.1", f"--{flag}", "2"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            start_loop("controllers.ppo")
        assert ended.value.code == 2 and text in capsys.readouterr().err


def test_a_run_that_needs_more_gpus_than_there_are_is_refused_before_it_begins(monkeypatch, capsys, tmp_path):
    on_gpus(monkeypatch, 1, "")
    monkeypatch.chdir(tmp_path)
    for config, text in (("qwen3_0_6b", "generator.gpu=1, but"), ("qwen3_8b", "data_parallel_shard=2 takes 2 GPUs")):
        monkeypatch.setattr(sys, "argv", ["grpo", "--config", config])
        with pytest.raises(SystemExit) as ended:
            start_loop("controllers.grpo")
        assert ended.value.code == 2 and text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_shares_gpu_is_true_only_if_trainer_and_generator_have_a_gpu_in_common(monkeypatch):
    assert not shares_gpu(qwen3_0_6b_one_gpu())  # this machine has no GPU
    on_gpus(monkeypatch, 2, "")
    behind = qwen3_0_6b()
    behind.trainer.gpu = 1
    assert shares_gpu(behind)
    assert shares_gpu(qwen3_0_6b_one_gpu()) and shares_gpu(qwen3_8b()) and not shares_gpu(qwen3_0_6b())


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (48, [1, 2, 4, 8, 16, 32, 48]), (200, [1, 2, 4, 8, 16, 32, 64, 128, 192, 200])]
)
def test_cuda_graphs_are_captured_for_up_to_max_num_seqs_sequences(most, sizes):
    assert gpu.graph_sizes(most) == sizes


@pytest.mark.parametrize(
    ("num_seqs", "max_len", "tokens"), [(4, 130, 520), (256, 1024, 8192), (9000, 1024, 9000), (1, 16, 16)]
)
def test_a_step_of_vllm_is_never_larger_than_all_sequences_at_full_length(num_seqs, max_len, tokens):
    config = GeneratorConfig(max_num_seqs=num_seqs, max_model_len=max_len)
    assert gpu.batched_tokens(config) == tokens


HEAD_DIMS = "32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512"


@pytest.mark.parametrize("head_dim", [16, 20, 24, 40])
def test_a_head_dim_that_vllm_does_not_support_on_a_cpu_is_refused_before_a_process_starts(head_dim, monkeypatch):
    monkeypatch.setattr(GeneratorClient, "_start", None)  # a start would fail the test
    config = GeneratorConfig(model=ModelConfig(head_dim=head_dim))
    message = f"model.head_dim={head_dim} on a CPU: vLLM's attention on CPUs supports only head_dim {HEAD_DIMS}"
    with pytest.raises(ValueError, match=re.escape(message)):
        GeneratorClient.spawn(config)
    for possible in (32, 48, 128):
        require_machine(GeneratorConfig(model=ModelConfig(head_dim=possible)))
    on_gpus(monkeypatch, 1, "")
    require_machine(config)


def test_the_head_dim_of_the_model_in_a_generators_hf_path_is_checked(tmp_path):
    ModelConfig(head_dim=20).save(tmp_path)
    with pytest.raises(ValueError, match="model.head_dim=20 on a CPU"):
        GeneratorClient.spawn(GeneratorConfig(hf_path=str(tmp_path)))


@pytest.mark.parametrize("flag", ["--dry-run", "--plan"])
def test_a_run_whose_generator_cannot_run_on_a_cpu_is_refused_before_it_begins(flag, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo", "--config", "tiny", "--trainer.model.head-dim", "20", flag])
    with pytest.raises(SystemExit) as ended:
        start_loop("controllers.grpo")
    assert ended.value.code == 2 and "model.head_dim=20 on a CPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("client", "config", "message"),
    [
        (GeneratorClient, TrainerConfig(), "config is a TrainerConfig; GeneratorClient.spawn takes a GeneratorConfig"),
        (TrainerClient, GeneratorConfig(), "config is a GeneratorConfig; TrainerClient.spawn takes a TrainerConfig"),
        (TrainerClient, {"seed": 0}, "config is a dict; TrainerClient.spawn takes a TrainerConfig"),
    ],
)
def test_a_config_of_the_wrong_type_is_refused(client, config, message):
    with pytest.raises(TypeError, match=message):
        client.spawn(config)


@pytest.mark.parametrize(
    "field, named",
    [({"batch_invariant": True}, "batch_invariant=True"), ({"quantization": "fp8"}, 'quantization="fp8"')],
)
def test_what_vllm_does_not_support_on_a_machine_is_refused(monkeypatch, field, named):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    gpu.require_possible(GeneratorConfig())
    with pytest.raises(ValueError, match=f"{named} on a CPU"):
        cpu.require_possible(GeneratorConfig(**field))
    with pytest.raises(ValueError, match=f"{named} on a GPU of compute capability 8.6"):
        gpu.require_possible(GeneratorConfig(**field))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    gpu.require_possible(GeneratorConfig(**field))


def test_quantized_experts_are_refused():
    model = ModelConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with pytest.raises(ValueError, match='quantization="fp8" with model.num_experts=4'):
        GeneratorConfig(model=model, quantization="fp8").validate()
