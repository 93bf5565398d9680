"""Calls on a GeneratorClient: samples, logprobs, pulls, refusals, and failures of vLLM."""

import asyncio
from dataclasses import replace
from itertools import chain

import pytest
import support
import torch
from support import MAX_MODEL_LEN, VOCAB_SIZE, reference_logprobs
from test_validation import BAD_PULLS, BAD_SAMPLING_PARAMS, assert_in_order
from waiting import GUARD

from rl_actors import Completion, GeneratorClient, MemoryTransport, Sample, SamplingParams

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
SAMPLED = SamplingParams(max_tokens=24, n=4, seed=7)


def trainer_logprobs(trainer, prompts, groups, temperature=1.0) -> list[torch.Tensor]:
    """Logprobs of every completion, from the trainer's forward."""
    completions = flat(groups)
    samples = []
    for prompt, completion in support.with_prompts(prompts, groups):
        samples.append(Sample.from_tokens(prompt, completion.tokens, temperature=temperature))
    logprobs = trainer.forward(samples).result().logprobs
    return [values[-len(one.tokens) :] for values, one in zip(logprobs, completions, strict=True)]


def flat(groups) -> list[Completion]:
    """The completions of all groups."""
    return list(chain.from_iterable(groups))


def test_greedy_completions_equal_those_of_transformers(generator, policy):
    groups = generator.generate(PROMPTS, SamplingParams(max_tokens=32, temperature=0.0)).result()
    for prompt, [completion] in zip(PROMPTS, groups, strict=True):
        tokens = list(prompt)
        for _ in range(32):
            tokens.append(int(support.logits_TV(policy, tokens)[-1].argmax()))
        assert completion.tokens == tokens[len(prompt) :]
        expected = reference_logprobs(policy, prompt, completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_the_trainers_forward(generator, trainer, synced, temperature):
    groups = generator.generate(PROMPTS, replace(SAMPLED, temperature=temperature)).result()
    expected = trainer_logprobs(trainer, PROMPTS, groups, temperature)
    for completion, logprobs in zip(flat(groups), expected, strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.7, "temperature": 0.7}], ids=str
)
def test_logprobs_under_top_p_and_top_k_are_those_of_the_renormalized_distribution(generator, policy, options):
    groups = generator.generate(PROMPTS, replace(SAMPLED, **options)).result()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            expected = reference_logprobs(policy, prompt, completion.tokens, **options)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_seed_gives_n_different_completions_and_the_same_ones_in_every_call(generator, synced):
    first, second = (generator.generate(PROMPTS, SAMPLED).result() for _ in range(2))
    other = generator.generate(PROMPTS, replace(SAMPLED, seed=1007)).result()
    assert first == second
    assert [len(group) for group in first] == [4, 4, 4]
    assert len({tuple(completion.tokens) for completion in flat(first) + flat(other)}) == 24


def test_without_a_seed_no_two_completions_are_the_same(generator, synced):
    unseeded = replace(SAMPLED, seed=None)
    completions = flat(generator.generate([PROMPTS[0]] * 2, unseeded).result())
    completions += flat(generator.generate([PROMPTS[0]], unseeded).result())
    assert len({tuple(completion.tokens) for completion in completions}) == 12


def test_a_stop_token_is_the_last_token(generator, synced):
    plain = generator.generate(PROMPTS[:1], SAMPLED).result()[0][0]
    stop = plain.tokens[10]
    stopped = generator.generate(PROMPTS[:1], replace(SAMPLED, stop_token_ids=(stop,))).result()[0][0]
    length = plain.tokens.index(stop) + 1
    assert stopped.finish_reason == "stop"
    assert (stopped.tokens, stopped.logprobs) == (plain.tokens[:length], plain.logprobs[:length])
    assert len(stopped.policy_versions) == length


def test_a_completion_of_max_tokens_has_the_finish_reason_length(generator, synced):
    for completion in flat(generator.generate(PROMPTS, SAMPLED).result()):
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.policy_versions) == 24


def test_a_completion_that_fills_the_context_has_the_finish_reason_length(generator, synced):
    [[completion]] = generator.generate([[3] * (MAX_MODEL_LEN - 4)], SamplingParams(max_tokens=100)).result()
    assert (len(completion.tokens), completion.finish_reason) == (4, "length")


def test_every_token_carries_the_version_of_its_weights(generator, synced):
    completions = flat(generator.generate(PROMPTS, SAMPLED).result())
    assert {version for completion in completions for version in completion.policy_versions} == {synced}


def test_during_a_pull_running_completions_change_from_the_old_to_the_new_policy(
    generator, generator_mesh, trainer, policy, synced
):
    new = support.step(trainer, seed=1)
    trainer.push_model_state_dict().result()
    call = generator.generate(PROMPTS, SamplingParams(max_tokens=400, n=2, seed=1))
    support.wait_until(lambda: min(generator_mesh.num_tokens_under_way.call_one().get(), default=0) > 3)
    generator.pull_model_state_dict(new).result()
    groups = call.result()

    new_logprobs = iter(trainer_logprobs(trainer, PROMPTS, groups))
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            num_old = completion.policy_versions.count(synced)
            assert 3 < num_old < 400
            assert completion.policy_versions == [synced] * num_old + [new] * (400 - num_old)
            logprobs, of_new = torch.tensor(completion.logprobs), next(new_logprobs)
            of_old = reference_logprobs(policy, prompt, completion.tokens)
            torch.testing.assert_close(logprobs[:num_old], of_old[:num_old], atol=3e-5, rtol=0)
            torch.testing.assert_close(logprobs[num_old:], of_new[num_old:], atol=3e-5, rtol=0)
            assert (of_old - of_new).abs().max() > 0.1


def test_concurrent_calls_give_the_same_completions_as_calls_one_after_another(generator, synced):
    params = [SamplingParams(max_tokens=1 + index % 7, seed=index) for index in range(32)]
    prompts = [[1 + index % 40, 2, 3] for index in range(32)]

    async def generate_together() -> list[list[list[Completion]]]:
        calls = [generator.generate([prompt], one) for prompt, one in zip(prompts, params, strict=True)]
        return await asyncio.gather(*calls)

    alone = []
    for prompt, one in zip(prompts[:4], params[:4], strict=True):
        [[completion]] = generator.generate([prompt], one).result()
        alone.append(completion.tokens)
    together = [completion.tokens for [[completion]] in asyncio.run(generate_together())]
    assert [len(tokens) for tokens in together] == [1 + index % 7 for index in range(32)]
    assert together[:4] == alone


def test_compute_logprobs_gives_the_logprobs_of_the_trainers_forward(generator, trainer, synced):
    """The last sequence has max_model_len tokens. It is a prompt with the longest completion that the generator can give for this prompt."""
    [[completion]] = generator.generate([[3] * 5], SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_stop=True)).result()
    sequences = [[5, 6], list(range(30)), [3] * 5 + completion.tokens]
    assert len(sequences[-1]) == MAX_MODEL_LEN
    samples = [Sample.from_tokens(tokens[:1], tokens[1:]) for tokens in sequences]
    expected = trainer.forward(samples).result().logprobs
    for _ in range(2):  # the second call uses the prefixes that the first call has cached
        for ours, theirs in zip(generator.compute_logprobs(sequences).result(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_pull_of_the_version_that_the_generator_has_changes_nothing(generator, generator_mesh, synced):
    call = generator.generate([PROMPTS[0]], SamplingParams(max_tokens=50))
    assert generator.pull_model_state_dict(synced).result() == synced
    assert set(call.result()[0][0].policy_versions) == {synced}


def test_after_a_pull_a_request_uses_the_new_weights_and_no_old_cached_prefix(
    generator, generator_mesh, trainer, synced
):
    block_size = generator_mesh.cache_block_size.call_one().get(timeout=GUARD)
    # vLLM caches only whole blocks. This prompt fills two blocks.
    prompt = [index % VOCAB_SIZE for index in range(2 * block_size + 1)]
    params = SamplingParams(max_tokens=8, seed=3)
    before = generator.generate([prompt], params).result()
    new = support.step(trainer, seed=3)
    generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
    after = generator.generate([prompt], params).result()
    assert after[0][0].policy_versions == [new] * 8
    assert after[0][0].logprobs != before[0][0].logprobs
    [expected] = trainer_logprobs(trainer, [prompt], after)
    torch.testing.assert_close(torch.tensor(after[0][0].logprobs), expected, atol=1e-5, rtol=0)


def test_a_pull_with_in_flight_false_waits_until_running_requests_have_ended(
    generator, generator_mesh, trainer, synced
):
    new = support.step(trainer, seed=2)
    trainer.push_model_state_dict().result()
    running = generator.generate(PROMPTS, SamplingParams(max_tokens=200, n=2, seed=1))
    pull = generator.pull_model_state_dict(new, in_flight=False)
    support.wait_until(lambda: generator_mesh.num_waiting_pulls.call_one().get(timeout=GUARD))
    later = generator.generate(PROMPTS, SAMPLED)
    assert {version for one in flat(running.result()) for version in one.policy_versions} == {synced}
    assert pull.result() == new
    assert {version for one in flat(later.result()) for version in one.policy_versions} == {new}
    assert later.result() == generator.generate(PROMPTS, SAMPLED).result()


def test_new_requests_never_use_the_old_cached_prefix_of_a_running_request(generator, generator_mesh, trainer, synced):
    block_size = generator_mesh.cache_block_size.call_one().get(timeout=GUARD)
    prompt = [index % VOCAB_SIZE for index in range(2 * block_size + 1)]
    new = support.step(trainer, seed=4)
    trainer.push_model_state_dict().result()
    # Without recompute_running, the running request keeps its keys and values of the old weights.
    generator_mesh.recompute_running.call_one(False).get(timeout=GUARD)
    try:
        running = generator.generate([prompt], SamplingParams(max_tokens=200, seed=1))
        support.wait_until(lambda: min(generator_mesh.num_tokens_under_way.call_one().get(), default=0) > 3)
        generator.pull_model_state_dict(new).result()
        after = generator.generate([prompt], SAMPLED).result()
        # The running request went on. The old policy sampled its first tokens, and the new policy its last tokens.
        assert set(running.result()[0][0].policy_versions) == {synced, new}
    finally:
        generator_mesh.recompute_running.call_one(True).get(timeout=GUARD)
    for completion, expected in zip(after[0], trainer_logprobs(trainer, [prompt], after), strict=True):
        assert set(completion.policy_versions) == {new}
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def misfits(weights):
    """Weights that do not fit the model. Maps the kind of misfit to (the changed weights, a pattern of the error)."""
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {n: w for n, w in weights.items() if n != name}
    return {
        "missing": (missing, rf"{name} is missing"),
        "misshapen": ({**weights, name: weights[name][:-1]}, rf"{name} is \(127, 64\)"),
        "unknown": ({**weights, "model.extra": torch.zeros(3)}, r"model\.extra is unknown"),
        "integers": ({**weights, name: weights[name].to(torch.int64)}, rf"{name} is .*int64"),
    }


@pytest.mark.parametrize("kind", ["missing", "misshapen", "unknown", "integers"])
def test_a_pull_of_weights_that_do_not_fit_the_model_fails_and_keeps_the_old_weights(
    generator, transport, synced, kind
):
    weights, message = misfits(support.random_weights(tied=True, seed=1))[kind]
    before = generator.generate(PROMPTS, SAMPLED).result()
    latest = asyncio.run(transport.get_object("latest"))
    support.publish_from_here(transport, weights, stream=f"misfit_{kind}", version=900)
    try:
        with pytest.raises(ValueError, match=f"version 900 does not fit the model: .*{message}"):
            generator.pull_model_state_dict(900).result()
    finally:
        asyncio.run(transport.put_object("latest", latest))
    assert generator.generate(PROMPTS, SAMPLED).result() == before
    assert generator.pull_model_state_dict(synced).result() == synced


def test_a_pull_of_an_unpublished_version_times_out_and_names_the_newest_version(generator, synced):
    with pytest.raises(TimeoutError, match=rf"version 999 was not published within 0\.2 s; the newest is {synced}"):
        generator.pull_model_state_dict(999, timeout=0.2).result()


@pytest.mark.slow
def test_a_pull_replaces_all_weights_of_an_untied_model():
    """Here the head has weights of its own. In most other tests the head is tied to the embedding."""
    transport = MemoryTransport()
    asyncio.run(transport.open())
    with GeneratorClient.spawn(support.generator_config(tied=False), transport=transport) as generator:
        for version in (1, 2):
            weights = support.random_weights(tied=False, seed=version)
            support.publish_from_here(transport, weights, stream="untied", version=version)
            generator.pull_model_state_dict(version).result()
            model = support.hf_model(weights, tied=False)
            for prompt, group in zip(PROMPTS, generator.generate(PROMPTS, SAMPLED).result(), strict=True):
                for completion in group:
                    expected = reference_logprobs(model, prompt, completion.tokens)
                    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    asyncio.run(transport.close())


OK = SamplingParams()
# (prompts, params, type of the error, words of its message in order)
BAD_REQUESTS = [
    ([], OK, ValueError, ["prompts is []", "give a list of at least 1 prompt"]),
    ([5, 6], OK, TypeError, ["prompt 0 is 5", "it must be a list of token ids"]),
    ([[5], ["x"]], OK, TypeError, ["prompt 1 is ['x']", "a list of token ids"]),
    ([[5], [True]], OK, TypeError, ["prompt 1 is [True]", "a list of token ids"]),
    ([[5], []], OK, ValueError, ["prompt 1 has 0 tokens", f"it must have 1 to {MAX_MODEL_LEN - 1}"]),
    (
        [[5] * MAX_MODEL_LEN],
        OK,
        ValueError,
        [f"prompt 0 has {MAX_MODEL_LEN} tokens", f"1 to {MAX_MODEL_LEN - 1}", f"max_model_len={MAX_MODEL_LEN}"],
    ),
    ([[5, VOCAB_SIZE]], OK, ValueError, [f"prompt 0 holds the id {VOCAB_SIZE}", f"ids are 0 to {VOCAB_SIZE - 1}"]),
    ([[-1]], OK, ValueError, ["prompt 0 holds the id -1", f"ids are 0 to {VOCAB_SIZE - 1}"]),
    ([[5]], {"max_tokens": 3}, TypeError, ["params is a dict", "it must be SamplingParams"]),
]
for _field, _value, _error, _limit in BAD_SAMPLING_PARAMS:
    BAD_REQUESTS.append(([[5]], SamplingParams(**{_field: _value}), _error, [f"{_field}={_value!r}", _limit]))


@pytest.mark.parametrize(("prompts", "params", "error", "words"), BAD_REQUESTS)
def test_a_bad_request_raises_in_the_callers_thread_and_the_error_has_value_and_limit(
    generator, prompts, params, error, words
):
    generator.ready().result()
    with pytest.raises(error) as raised:
        generator.generate(prompts, params)
    assert_in_order(str(raised.value), words)


@pytest.mark.parametrize(("prompts", "params", "error", "words"), BAD_REQUESTS)
def test_a_bad_request_to_the_actors_endpoint_raises_the_same_error(generator_mesh, prompts, params, error, words):
    with pytest.raises(Exception) as raised:  # noqa: B017  # Monarch wraps it
        generator_mesh.start_generate.call_one(prompts, params).get(timeout=GUARD)
    assert type(raised.value.exception) is error
    assert_in_order(str(raised.value.exception), words)


@pytest.mark.parametrize(("version", "timeout", "error", "words"), BAD_PULLS)
def test_a_bad_pull_is_refused_before_anything_waits(generator, generator_mesh, version, timeout, error, words):
    with pytest.raises(error) as raised:
        generator.pull_model_state_dict(version, timeout)
    assert_in_order(str(raised.value), words)
    with pytest.raises(Exception) as raised:  # noqa: B017  # Monarch wraps it
        generator_mesh.pull_model_state_dict.call_one(version, timeout).get(timeout=GUARD)
    assert type(raised.value.exception) is error


def test_a_sequence_longer_than_the_model_allows_is_refused(generator, generator_mesh):
    sequence = [5] * (MAX_MODEL_LEN + 1)
    words = f"sequence 0 has {MAX_MODEL_LEN + 1} tokens; it must have 1 to {MAX_MODEL_LEN}"
    generator.ready().result()
    with pytest.raises(ValueError, match=words):
        generator.compute_logprobs([sequence])
    with pytest.raises(Exception, match=words):
        generator_mesh.compute_logprobs.call_one([sequence]).get(timeout=GUARD)


def test_spawn_generator_refuses_a_trainers_config(trainer):
    with pytest.raises(TypeError, match=r"config is a TrainerConfig; GeneratorClient.spawn takes a GeneratorConfig"):
        trainer.spawn_generator(support.trainer_config())


def test_a_pull_logs_no_warning_about_layers_that_have_no_weights_to_load(generator, generator_mesh, trainer, synced):
    """A tied head and the rotary embedding have no weights to load. vLLM warns about both modules when it reloads weights.

    rl_actors/vllm/weights.py drops these warnings.
    """
    generator_mesh.vllm_log.call_one().get(timeout=GUARD)
    support.step(trainer)
    generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
    lines = generator_mesh.vllm_log.call_one().get(timeout=GUARD)
    assert lines  # the recorder works
    assert [line for line in lines if "Failed to load" in line] == []


def test_a_generator_answers_the_call_after_one_that_timed_out(generator_mesh, synced):
    hasty = GeneratorClient(generator_mesh, call_timeout=1e-6)
    with pytest.raises(TimeoutError, match="generate did not answer within 1e-06 s"):
        hasty.generate([[5, 6, 7]], SamplingParams(max_tokens=1)).result()
    assert "ready" in repr(hasty)
    client = GeneratorClient(generator_mesh, call_timeout=GUARD)
    # The engine may still compute the request of the call that timed out. That request asks for one token. The next request began later and
    # asks for more tokens, so it ends last. So no request runs when the test ends.
    assert client.generate([[5]], SamplingParams(max_tokens=8)).result()


def test_calls_raise_the_error_of_a_failed_engine_step_and_later_calls_succeed(generator, generator_mesh, synced):
    before = generator.generate(PROMPTS, SAMPLED).result()
    generator_mesh.fail_next_forward.call_one("the kernel is broken").get()
    calls = [generator.generate([prompt], SamplingParams(max_tokens=400)) for prompt in PROMPTS * 3]
    outcomes = [call._future.exception(GUARD) for call in calls]
    failed = [error for error in outcomes if error is not None]
    # Requests that arrive after the failing step do not fail, so some calls may succeed.
    assert failed and {(type(error), str(error)) for error in failed} == {(RuntimeError, "the kernel is broken")}
    assert generator.generate(PROMPTS, SAMPLED).result() == before


def test_every_running_call_raises_the_error_of_a_failed_engine_step_with_the_generators_name(
    generator, generator_mesh, synced
):
    calls = [generator.generate([prompt], SamplingParams(max_tokens=490)) for prompt in PROMPTS]
    support.wait_until(lambda: len(generator_mesh.num_tokens_under_way.call_one().get()) == len(PROMPTS))
    generator_mesh.fail_next_forward.call_one("the kernel is broken").get()
    for call in calls:
        with pytest.raises(RuntimeError, match="the kernel is broken") as raised:
            call.result()
        assert any("generator" in note and "generate" in note for note in raised.value.__notes__)
