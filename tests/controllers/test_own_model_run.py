"""A run of a user's own model starts from the model's Hugging Face Hub id. The run needs no network, because the model is in the local Hub
cache. vLLM's server then serves the export of the run."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import portpicker
import pytest
from own_models import put_in_hub_cache, save_model
from waiting import GUARD, wait_until

from controllers import config_file
from controllers.environments import build_environment
from controllers.grpo import GRPOConfig
from controllers.observe.run_folder import read_jsonl
from controllers.program import export
from controllers.rollouts.tokenizer import load_tokenizer
from rl_actors import SamplingParams, TrainerClient
from rl_actors.processes.output import LogRoute

ROOT = Path(__file__).parents[2]
ID = "Qwen/Qwen3-Tiny"
SHAPE = {
    "max-tokens": 16,
    "trainer.max-sequence-length": 128,
    "trainer.tokens-per-row": 128,
    "generator.max-model-len": 128,
    "generator.max-num-seqs": 64,
}
FLAGS = {
    **SHAPE,
    "steps": 3,
    "rollouts.groups-per-step": 4,
    "rollouts.group-size": 4,
    "schedule.learning-rate": 1e-3,
    "environment.task": "tests.fakes:parity_reward",
    "environment.options": "{}",
    "environment.num-held-out": 8,
    "evaluate-every": 3,
}


def start(environment: dict[str, str], controller: str, *arguments: object) -> str:
    command = [sys.executable, "-m", f"controllers.{controller}", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=GUARD
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> dict[str, str]:
    """Environment variables that forbid requests to the Hub, and that name a cache with the model."""
    cache = tmp_path_factory.mktemp("hub")
    save_model(put_in_hub_cache(cache, ID))
    return {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}


@pytest.fixture(scope="module")
def run(offline, tmp_path_factory) -> Path:
    """The folder of a run of three steps. The run uses the chat template."""
    folder = tmp_path_factory.mktemp("run") / "mine"
    start(offline, "grpo", "--config", "qwen3", "--trainer.hf-path", ID, *flags(FLAGS), "--output-dir", folder)
    return folder


def flags(values: dict[str, object]) -> list[object]:
    return [text for name, value in values.items() for text in (f"--{name}", value)]


@pytest.mark.slow
def test_a_run_with_a_hub_id_trains_from_the_cache_without_a_network(run, offline):
    config = json.loads((run / "config.json").read_text())
    assert config["trainer"]["hf_path"].startswith(offline["HF_HUB_CACHE"]) and config["chat"]["enabled"]
    first, *records = read_jsonl(run / "metrics.jsonl")
    # Step 0 is the evaluation before the first step.
    assert [record["step"] for record in records] == [1, 2, 3] and first["step"] == 0
    assert all(record["logprob_diff/mean"] < 1e-5 for record in records if not record.get("skipped"))


@pytest.mark.slow
def test_an_evaluation_gives_the_accuracy_of_the_run_and_starts_no_trainer(run, offline):
    output = start(offline, "grpo", "--eval-only", run)
    assert f"eval/reward {read_jsonl(run / 'metrics.jsonl')[-1]['eval/reward']:.4f}" in output
    logs = run / "checkpoints/step-3/logs"
    assert {path.stem for path in logs.iterdir()} == {"evaluation", "generator-0"}


@pytest.mark.slow
def test_supervised_training_on_conversations_teaches_the_assistants_turns(offline, tmp_path):
    values = {
        **SHAPE,
        "steps": 40,
        "sft.batch-size": 6,
        "sft.schedule.learning-rate": 1e-2,
        "environment.task": "tests.fakes:conversations",
        "environment.options": "{}",
        "environment.num-held-out": 3,
        "evaluate-every": 40,
    }
    folder = tmp_path / "run"
    start(offline, "sft", "--config", "qwen3", "--trainer.hf-path", ID, *flags(values), "--output-dir", folder)
    records = [record for record in read_jsonl(folder / "metrics.jsonl") if record["step"] > 0]
    accuracies = [record["eval/reward"] for record in records if record.get("eval/reward") is not None]
    assert accuracies[-1] == 1.0
    assert records[-1]["answer_probability"] > 0.9 > 0.1 > records[0]["answer_probability"]


@pytest.mark.slow
def test_vllms_server_with_the_export_generates_the_same_tokens_as_the_generator(run, tmp_path):
    config = config_file.read(GRPOConfig, run / "config.json")
    tokenizer = load_tokenizer(config.trainer.hf_path, config.chat)
    prompts = [tokenizer.encode_prompt(problem) for problem in build_environment(config.environment).held_out()]
    assert len(prompts) == 8
    answers = answers_of_the_generator(run, config, prompts, tokenizer.stop_token_ids, tmp_path)
    export.main([str(run), str(tmp_path / "export")])
    with server(tmp_path / "export", tmp_path / "server.log") as address:
        served = [completion(address, str(tmp_path / "export"), prompt) for prompt in prompts]
    assert served == answers
    assert len({tuple(tokens) for tokens in served}) > 1


def answers_of_the_generator(
    run: Path, config: GRPOConfig, prompts: list[list[int]], stop_token_ids: tuple[int, ...], logs: Path
) -> list[list[int]]:
    """Greedy completions by new actors with the run's config and the weights of the run's last step."""
    with TrainerClient.spawn(config.trainer, logs=LogRoute(directory=logs)) as trainer:
        trainer.load_checkpoint(str(run / "checkpoints/step-3/trainer")).result()
        with trainer.spawn_generator(config.generator, logs=LogRoute(directory=logs)) as generator:
            params = SamplingParams(max_tokens=16, temperature=0.0, stop_token_ids=stop_token_ids)
            return [group[0].tokens for group in generator.generate(prompts, params).result()]


@contextmanager
def server(model: Path, log: Path) -> Iterator[str]:
    """Start vLLM's server for the model in a directory, and yield the server's address. All processes of the server end with the context."""
    port = portpicker.pick_unused_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=output, stderr=output, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=GUARD) as answer:
                return answer.status == 200
        except OSError:
            return False

    try:
        wait_until(is_up, "the server")
        yield address
    finally:
        process.terminate()
        process.wait(GUARD)
        with suppress(ProcessLookupError):  # raised if all processes of the group have ended
            os.killpg(process.pid, signal.SIGKILL)


def completion(address: str, model: str, prompt: list[int]) -> list[int]:
    values = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(values).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=GUARD) as answer:
        return json.loads(answer.read())["choices"][0]["token_ids"]
