"""The official SDK against a server with real trainers and a real vLLM: losses, states, samplers, and a server that is killed."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

tinker = pytest.importorskip("tinker")
types = tinker.types
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
START_SECONDS = 900
ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = list(b"the cat")
RANK = 4


class Process:
    """A server as a program."""

    def __init__(self, state: Path, *arguments: str) -> None:
        command = [
            str(ROOT / ".venv/bin/python"),
            "-m",
            "controllers.serve",
            "--config",
            "tiny_chat",
            "--address",
            "127.0.0.1:0",
        ]
        self.log = state.with_suffix(".log")
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*command, "--state", str(state), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.url = self._read_url()

    def _read_url(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            if not line:
                break
            if line.startswith("export TINKER_BASE_URL="):
                return line.strip().partition("=")[2]
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-4000:]}")

    def service(self):
        return tinker.ServiceClient(base_url=self.url, api_key="tml-test")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=300)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Process(tmp_path_factory.mktemp("serve") / "state", "--max-trainers", "3")
    yield made
    assert made.end() == 0


@pytest.fixture(scope="module")
def service(server):
    return server.service()


@pytest.fixture(scope="module")
def client(service):
    return service.create_lora_training_client("tiny_chat", rank=0).result()


def datum(tokens, targets, **inputs):
    named = {"target_tokens": targets} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=named)


def policy_data(seed: int = 0) -> list:
    """Three datums of different lengths, with numbers near those of an untrained model."""
    draw = np.random.default_rng(seed)
    data = []
    for length in (5, 17, 40):
        tokens = draw.integers(0, 256, length + 1)
        data.append(
            datum(
                tokens[:-1].tolist(),
                tokens[1:].tolist(),
                logprobs=(-5.5 + draw.normal(0, 0.4, length)).tolist(),
                advantages=draw.normal(0, 1, length).tolist(),
            )
        )
    return data


def column(each, name: str) -> torch.Tensor:
    return each.loss_fn_inputs[name].to_torch().double()


def closed_form(loss: str, each, lp: torch.Tensor) -> float:
    """The loss of a datum by the formulas of docs/tinker.md."""
    q, a = column(each, "logprobs"), column(each, "advantages")
    r = (lp - q).exp()
    if loss == "importance_sampling":
        return -(r * a).sum().item()
    if loss == "ppo":
        return -torch.minimum(r * a, r.clamp(0.7, 1.4) * a).sum().item()
    if loss == "cispo":
        return -(r.clamp(0.5, 1.5) * a * lp).sum().item()
    if loss == "dro":
        return -(lp * a - 0.5 * 0.1 * (lp - q) ** 2).sum().item()
    if loss == "gspo":
        s = ((lp - q).mean()).exp()
        return -torch.minimum(s * a, s.clamp(0.9, 1.1) * a).sum().item()
    near = (r >= 1 / 8) & (r <= 8)
    return -(torch.where(near, r.clamp(max=2), 0.0) * a * lp).sum().item() + 0.3 * 0.5 * ((lp - q) ** 2).sum().item()


CONFIGS = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.1},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "stable_reinforce": {"kl_coeff": 0.3},
}


@pytest.mark.parametrize("loss", CONFIGS)
def test_the_loss_is_its_closed_form_over_the_returned_logprobs(client, loss):
    data = policy_data()
    if loss == "gspo":
        for each in data:
            ones = [1.0] * each.model_input.length
            each.loss_fn_inputs["sequence_ratio_mask"] = types.TensorData(data=ones, dtype="float32")
    if loss == "stable_reinforce":
        data = [with_provenance(each) for each in data]
    output = client.forward(data, loss, CONFIGS[loss] or None).result()
    total = 0.0
    for each, record in zip(data, output.loss_fn_outputs, strict=True):
        total += closed_form(loss, each, record["logprobs"].to_torch().double())
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4)


def with_provenance(each):
    span = types.SampledProvenanceSpan(sequence_id="x", length=each.model_input.length)
    return each.with_provenance(model_input=[span], loss_fn_inputs=[span])


def test_cross_entropy_with_weights_with_many_targets_and_sparse_ones(client):
    weights = [0.0, 1.0, -0.5, 2.0]
    one = datum([1, 2, 3, 4], [2, 3, 4, 5], weights=weights)
    output = client.forward([one], "cross_entropy").result()
    lp = output.loss_fn_outputs[0]["logprobs"].to_torch()
    assert output.metrics["loss:sum"] == pytest.approx(-float((lp * torch.tensor(weights)).sum()), rel=1e-4)

    ids, values = torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 9)
    for position, target in enumerate([2, 3, 4, 5]):
        ids[position, position], values[position, position] = target, weights[position]
    wide = datum([1, 2, 3, 4], ids, weights=values)
    sparse = wide.loss_fn_inputs["weights"].sparse_crow_indices is not None
    result = client.forward([wide], "cross_entropy").result()
    assert sparse and result.metrics["loss:sum"] == pytest.approx(output.metrics["loss:sum"], rel=1e-4)
    assert result.loss_fn_outputs[0]["logprobs"].shape == [4, 9]


def logprobs_of(client) -> bytes:
    data = [datum(list(range(1, 30)), list(range(2, 31)))]
    return client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy().tobytes()


def test_a_learning_rate_of_zero_changes_nothing(client):
    before = logprobs_of(client)
    client.forward_backward(policy_data(), "ppo").result()
    norm = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["unclipped_grad_l2:mean"]
    assert norm > 0 and logprobs_of(client) == before


def test_split_calls_and_a_custom_loss_have_the_gradient_of_one_call(client):
    data = policy_data()
    norms = []

    def importance_sampling(data, logprobs):
        pairs = zip(data, logprobs, strict=True)
        return sum(
            -(
                (lp - each.loss_fn_inputs["logprobs"].to_torch()).exp() * each.loss_fn_inputs["advantages"].to_torch()
            ).sum()
            for each, lp in pairs
        ), {}

    ways = {
        "one": lambda: [client.forward_backward(data, "importance_sampling")],
        "split": lambda: [client.forward_backward([each], "importance_sampling") for each in data],
        "custom": lambda: [client.forward_backward_custom(data, importance_sampling)],
    }
    losses = []
    for start in ways.values():
        losses.append(sum(future.result().metrics["loss:sum"] for future in start()))
        step = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        norms.append(step.metrics["unclipped_grad_l2:mean"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4) and losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_a_supervised_loop_lowers_its_loss_and_the_sampler_says_what_it_learned(service, client):
    tokenizer = client.get_tokenizer()
    tokens = tokenizer.encode("the cat drinks milk<|im_end|>")
    data = [datum(tokens[:-1], tokens[1:])] * 4
    losses = []
    for _ in range(40):
        output = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        losses.append(output.result().metrics["loss:sum"])
    assert losses[-1] < 0.05 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("the cat"))
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=40, temperature=0)).result().sequences[0]
    assert tokenizer.decode(answer.tokens) == " drinks milk<|im_end|>" and answer.stop_reason == "stop"
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert -sum(scores[1:]) == pytest.approx(
        client.forward(data[:1], "cross_entropy").result().metrics["loss:sum"], abs=1e-3
    )
    base = service.create_sampling_client(base_model="tiny_chat").result()
    untrained = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert -sum(untrained[1:]) > 50
    assert (
        sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result() == scores
    )  # the snapshot is still there


def test_a_state_with_optimizer_continues_bit_for_bit(service):
    client = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
    other = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()

    def steps(each, seeds) -> bytes:
        for seed in seeds:
            each.forward_backward(policy_data(seed), "importance_sampling")
            each.optim_step(ADAM).result()
        return logprobs_of(each)

    # Two tenants, one step of each in turn: each equals the other's run without interruption.
    for seed in range(3):
        assert steps(client, [seed]) == steps(other, [seed])
    path = client.save_state("middle").result().path
    again = service.create_training_client_from_state_with_optimizer(
        path
    ).result()  # makes room by writing a run to disk
    expected = steps(client, [3, 4])
    assert steps(again, [3, 4]) == expected == steps(other, [3, 4])


def test_a_killed_server_goes_on_from_the_last_saved_state(tmp_path):
    state = tmp_path / "state"
    first = Process(state)
    client = first.service().create_lora_training_client("tiny_chat", rank=RANK, seed=1).result()
    client.forward_backward(policy_data(), "ppo")
    client.optim_step(ADAM).result()
    path = client.save_state("a").result().path
    weights = client.save_weights_for_sampler("w").result().path
    before = logprobs_of(client)
    client.forward_backward(policy_data(1), "ppo").result()
    first.end(signal.SIGKILL)

    second = Process(state)
    service = second.service()
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs_of(again) == before
    sampler = service.create_sampling_client(model_path=weights).result()
    score = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1]
    assert math.isfinite(score)
    assert second.end() == 0
