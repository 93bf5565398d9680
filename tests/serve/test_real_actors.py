"""Tests of our server with Tinker's official SDK, real trainers and a real vLLM.

The tests cover losses, saved states of training runs, samplers, lost connections, and a server that is killed.
"""

import math
import os
import re
import signal
import subprocess
import sys
import urllib.request

import numpy as np
import pytest
import torch
from program import BUSY, LOST_ANSWER, LOST_REQUEST, Process, Proxy

tinker = pytest.importorskip("tinker")
types = tinker.types
pytestmark = pytest.mark.slow

ADAM = types.AdamParams(learning_rate=1e-3)
PROMPT = list(b"the cat")
RANK = 4


def service_of(url: str):
    return tinker.ServiceClient(base_url=url, api_key="tml-test")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Process(tmp_path_factory.mktemp("serve") / "state", "--max-trainers", "4")
    yield made
    assert made.end() == 0


@pytest.fixture(scope="module")
def service(server):
    return service_of(server.url)


@pytest.fixture(scope="module")
def client(service):
    return service.create_lora_training_client("tiny_chat", rank=0).result()


def datum(tokens, targets, **inputs):
    named = {"target_tokens": targets} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=named)


def policy_data(seed: int = 0) -> list:
    """Three random datums of different lengths. Their input logprobs are near the logprobs of an untrained model."""
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
    """The loss of a datum by the formulas of docs/tinker.md, which also explains the letters. lp: the trainer's logprobs."""
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
def test_each_loss_equals_its_formula_on_the_returned_logprobs(client, loss):
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


def test_cross_entropy_takes_weights_several_targets_per_position_and_sparse_tensors(client):
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


def test_supervised_training_lowers_the_loss_and_the_sampler_then_writes_the_trained_text(service, client):
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
    # The sampler of the base model has not changed the weights of the first sampler.
    assert sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result() == scores


def test_a_run_continues_bit_for_bit_from_a_state_with_optimizer(service):
    client = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
    other = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()

    def steps(each, seeds) -> bytes:
        for seed in seeds:
            each.forward_backward(policy_data(seed), "importance_sampling")
            each.optim_step(ADAM).result()
        return logprobs_of(each)

    # Two training runs with equal seeds take the same steps in turn, and their logprobs stay equal.
    for seed in range(3):
        assert steps(client, [seed]) == steps(other, [seed])
    path = client.save_state("middle").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    expected = steps(client, [3, 4])
    assert steps(again, [3, 4]) == expected == steps(other, [3, 4])


def queue_run(client, seed: int, adam) -> list:
    """Send the calls of three training steps without waiting for the results. Returns the futures."""
    futures = []
    for number in range(3):
        futures.append(client.forward_backward(policy_data(10 * seed + number), "importance_sampling"))
        futures.append(client.forward_backward(policy_data(10 * seed + number + 5), "ppo"))
        futures.append(client.optim_step(adam))
    return futures


def results_of(client, futures: list) -> list:
    """The loss or the gradient norm of each call. The last entry is the logprobs after all calls."""
    answers = [future.result().metrics for future in futures]
    losses = [metrics.get("loss:sum", metrics.get("unclipped_grad_l2:mean")) for metrics in answers]
    return [*losses, logprobs_of(client)]


def test_tenants_whose_calls_interleave_share_one_trainer_and_train_as_if_alone(server, service, tmp_path):
    params = [
        types.AdamParams(learning_rate=1e-3),
        types.AdamParams(learning_rate=5e-3, beta1=0.5, eps=1e-3, weight_decay=0.1, grad_clip_norm=0.3),
    ]
    num_trainers = len(server.trainers())

    def create(service, seed: int):
        return service.create_lora_training_client("tiny_chat", rank=6, seed=seed, train_unembed=False).result()

    clients = [create(service, seed) for seed in (1, 2)]
    sent = [queue_run(client, seed, adam) for seed, (client, adam) in enumerate(zip(clients, params, strict=True), 1)]
    together = [results_of(client, futures) for client, futures in zip(clients, sent, strict=True)]
    assert len(server.trainers()) == num_trainers + 1
    alone = Process(tmp_path / "alone", "--max-tenants", "1")
    try:
        for seed, adam in enumerate(params, 1):
            client = create(service_of(alone.url), seed)
            assert results_of(client, queue_run(client, seed, adam)) == together[seed - 1]
        assert len(alone.trainers()) == 1
    finally:
        assert alone.end() == 0


STEPS_OF_A_PROGRAM = """
import os, signal, sys
import tinker
from tinker import types

url, path, num_steps, ends_itself = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "killed"
service = tinker.ServiceClient(base_url=url, api_key="tml-test")
if path:
    client = service.create_training_client_from_state_with_optimizer(path).result()
else:
    client = service.create_lora_training_client("tiny_chat", rank=4, seed=5).result()
tokens = list(range(1, 31))
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})
pairs = []
for _ in range(num_steps):
    pairs.append(client.forward_backward([datum], "cross_entropy"))
    pairs.append(client.optim_step(types.AdamParams(learning_rate=1e-3)))
if ends_itself:
    pairs[num_steps].result()
    os.kill(os.getpid(), signal.SIGKILL)
for future in pairs:
    future.result()
output = client.forward([datum], "cross_entropy").result()
print("logprobs", output.loss_fn_outputs[0]["logprobs"].to_numpy().tobytes().hex())
"""
"""A program that takes steps on one datum without waiting for their results. It prints the datum's logprobs at the end, or kills itself
before the end."""


def run_program(url: str, num_steps: int, *, path: str = "", end: str = "normal") -> bytes:
    """Run STEPS_OF_A_PROGRAM, and return the logprobs that the program prints.

    path: the saved state with which the program begins; "" for a new run.
    end: "killed" makes the program kill itself. This function then returns b"".
    """
    command = [sys.executable, "-c", STEPS_OF_A_PROGRAM, url, path, str(num_steps), end]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"TINKER_TELEMETRY": "0"}
    )
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr[-4000:]
    printed = [line.removeprefix("logprobs ") for line in done.stdout.splitlines() if line.startswith("logprobs ")]
    return bytes.fromhex(printed[0]) if printed else b""


def chain_step(client) -> None:
    """Take one training step, the same as a step of STEPS_OF_A_PROGRAM."""
    tokens = list(range(1, 31))
    client.forward_backward([datum(tokens[:-1], tokens[1:])], "cross_entropy")
    client.optim_step(ADAM).result()


def test_another_program_continues_bit_for_bit_from_a_saved_state(server, service):
    client = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
    for _ in range(3):
        chain_step(client)
    path = client.save_state("for-another-program").result().path
    continued = run_program(server.url, 3, path=path)
    for _ in range(3):
        chain_step(client)
    # A program that takes all six steps without waiting for their results has the same logprobs.
    assert logprobs_of(client) == continued == run_program(server.url, 6)


def test_a_killed_client_does_not_disturb_other_clients(server, service):
    alone = run_program(server.url, 4)
    assert run_program(server.url, 40, end="killed") == b""
    client = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
    for _ in range(4):
        chain_step(client)
    assert logprobs_of(client) == alone


def test_lost_answers_and_lost_connections_add_no_gradient_twice(server, service):
    proxy = Proxy(server.url)
    try:
        through = service_of(proxy.url).create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
        undisturbed = service.create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
        proxy.faults += [BUSY, LOST_ANSWER, LOST_REQUEST, BUSY, BUSY, LOST_ANSWER]
        for seed in range(4):
            for client in (through, undisturbed):
                client.forward_backward(policy_data(seed), "importance_sampling")
                client.optim_step(ADAM).result()
        assert not proxy.faults
        assert logprobs_of(through) == logprobs_of(undisturbed)
    finally:
        proxy.close()


def test_one_call_of_2500_datums_has_the_gradient_of_three_smaller_calls(client):
    draw = np.random.default_rng(0)
    data = []
    for _ in range(2500):
        tokens = draw.integers(0, 256, 9).tolist()
        data.append(datum(tokens[:-1], tokens[1:]))

    def step(parts: list[list]) -> tuple[float, float, list]:
        futures = [client.forward_backward(part, "cross_entropy") for part in parts]
        norm = client.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["unclipped_grad_l2:mean"]
        outputs = [future.result() for future in futures]
        rows = [record for output in outputs for record in output.loss_fn_outputs]
        return sum(output.metrics["loss:sum"] for output in outputs), norm, rows

    loss, norm, rows = step([data])
    parts_loss, parts_norm, parts_rows = step([data[:700], data[700:1400], data[1400:]])
    assert (
        len(rows) == 2500
        and loss == pytest.approx(parts_loss, rel=1e-4)
        and norm == pytest.approx(parts_norm, rel=1e-3)
    )
    for one, other in zip(rows, parts_rows, strict=True):
        assert one["logprobs"].to_numpy() == pytest.approx(other["logprobs"].to_numpy(), abs=1e-4)


def test_an_unknown_loss_fails_only_its_own_call_and_the_run_goes_on(client):
    before = logprobs_of(client)
    with pytest.raises(tinker.RequestFailedError, match="unknown loss 'entropy'"):
        client.forward_backward(policy_data(), "entropy").result()
    assert logprobs_of(client) == before
    client.forward_backward(policy_data(), "ppo").result()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_logprobs_of_samples_match_the_distribution_at_the_sampling_temperature(service):
    sampler = service.create_sampling_client(base_model="tiny_chat").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    every = [sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, token])) for token in range(261)]
    at_one = torch.tensor([future.result()[-1] for future in every], dtype=torch.float64)
    assert at_one.exp().sum().item() == pytest.approx(1.0, abs=1e-4)
    # One request asks for the logprobs that all tokens would have in the place of the prompt's last token. It also asks for
    # the logprob of the prompt's second token.
    ids = torch.full((len(PROMPT) - 1, 261), -1)
    ids[-1], ids[0, 0] = torch.arange(261), PROMPT[1]
    wanted = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=wanted).result()
    named = answer.target_prompt_logprobs.to_torch()
    top = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=20).result()
    assert top.topk_prompt_logprobs[0] is None and len(top.topk_prompt_logprobs) == len(PROMPT)
    assert top.topk_prompt_logprobs_np.logprobs[-1] == pytest.approx(named[-1].topk(20).values.numpy(), abs=1e-4)
    assert named[-1].exp().sum().item() == pytest.approx(1.0, abs=1e-4)
    assert named[0, 0].item() == pytest.approx(sampler.compute_logprobs(prompt).result()[1], abs=1e-5)
    for temperature in (0.5, 0.7, 1.0, 1.2, 1.8):
        expected = torch.log_softmax(at_one / temperature, dim=0)
        params = types.SamplingParams(max_tokens=1, temperature=temperature, stop=[])
        for sequence in sampler.sample(prompt, 20, params, topk_sample_logprobs=5).result().sequences:
            assert sequence.topk_logprobs_np.logprobs[0] == pytest.approx(expected.topk(5).values.numpy(), abs=1e-4)
            (token,), (logprob,) = sequence.tokens, sequence.logprobs
            assert logprob == pytest.approx(expected[token].item(), abs=1e-4)


def num_pulls(server) -> int:
    """Number of times that the generator has loaded a version of the whole weights. Loading an adapter does not count."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        found = re.search(r"^rl_actors_serve_generator_pulls_total (\d+)", answer.read().decode(), re.MULTILINE)
    return int(found[1])


@pytest.mark.parametrize("train_unembed", [True, False])
def test_samplers_of_two_runs_at_two_versions_and_of_the_base_model_answer_together(server, service, train_unembed):
    clients = [
        service.create_lora_training_client("tiny_chat", rank=RANK, seed=seed, train_unembed=train_unembed).result()
        for seed in (1, 2)
    ]
    tokens = list(b"the cat sat on the mat, and then the dog came along")
    prompt, text = types.ModelInput.from_ints(PROMPT), types.ModelInput.from_ints(tokens)
    base = service.create_sampling_client(base_model="tiny_chat").result()
    samplers, expected = [base], [base.compute_logprobs(text).result()[1:]]
    pulls = num_pulls(server)
    for step in range(2):
        for client in clients:
            client.forward_backward(policy_data(step), "importance_sampling").result()
            client.optim_step(types.AdamParams(learning_rate=0.02)).result()
            samplers.append(client.save_weights_and_get_sampling_client().result())
            output = client.forward([datum(tokens[:-1], tokens[1:])], "cross_entropy").result()
            expected.append(output.loss_fn_outputs[0]["logprobs"].to_torch().tolist())
    params = types.SamplingParams(max_tokens=32, stop=[])
    asked = [(sampler.sample(prompt, 4, params), sampler.compute_logprobs(text)) for sampler in samplers for _ in "ab"]
    answers = [(sampled.result(), scores.result()[1:]) for sampled, scores in asked]
    for index, (sampled, scores) in enumerate(answers):
        assert scores == pytest.approx(expected[index // 2], abs=1e-4)
        sequence = sampled.sequences[0]
        again = samplers[index // 2].compute_logprobs(types.ModelInput.from_ints([*PROMPT, *sequence.tokens])).result()
        assert sequence.logprobs == pytest.approx(again[len(PROMPT) :], abs=1e-4)
    firsts = [scores for _, scores in answers[::2]]
    for place, one in enumerate(firsts):
        for other in firsts[:place]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2
    assert num_pulls(server) == pulls


def test_a_program_goes_on_from_its_last_saved_state_after_its_server_was_killed(tmp_path):
    state = tmp_path / "state"
    first = Process(state)
    client = service_of(first.url).create_lora_training_client("tiny_chat", rank=RANK, seed=5).result()
    for _ in range(4):
        chain_step(client)
    path = client.save_state("4").result().path
    weights = client.save_weights_for_sampler("w").result().path
    saved = logprobs_of(client)
    chain_step(client)  # this step is lost with the server
    client.forward_backward(policy_data(1), "ppo")  # the kill interrupts this call
    first.end(signal.SIGKILL)

    second = Process(state)
    service = service_of(second.url)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert logprobs_of(again) == saved
    for _ in range(4):
        chain_step(again)
    assert logprobs_of(again) == run_program(second.url, 8)
    sampler = service.create_sampling_client(model_path=weights).result()
    assert math.isfinite(sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()[1])
    assert second.end() == 0


def test_a_run_whose_weights_overflow_fails_its_own_samples_and_no_others(service):
    """Weights of 1e30 are finite, so they can be saved. The model overflows with them, and its KV cache then holds NaN."""
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=8, seed=5)

    def sample(sampler):
        [sequence] = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
        return sequence.tokens, sequence.logprobs

    base = service.create_sampling_client(base_model="tiny_chat").result()
    expected = sample(base)
    run = service.create_lora_training_client("tiny_chat", rank=RANK).result()
    run.forward_backward(policy_data(), "importance_sampling").result()
    run.optim_step(types.AdamParams(learning_rate=1e30)).result()
    spoiled = run.save_weights_and_get_sampling_client().result()
    for _ in range(3):
        with pytest.raises(tinker.RequestFailedError, match="is nan, for the prompt of 7 tokens"):
            sample(spoiled)
        assert sample(base) == expected
    assert sample(service.create_sampling_client(base_model="tiny_chat").result()) == expected
