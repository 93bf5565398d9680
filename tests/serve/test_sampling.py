"""Tests of the Tinker server's samplers. A sampler samples from saved weights. All samplers share one generator.

The tests also cover stop conditions and the returned values. The fake model has one logit for each token, and does not
read the prompt. With untrained weights all 16 tokens have the logprob -log(16).
"""

import asyncio

import numpy as np
import pytest

from controllers.tinker_server import messages, requests, sampling, tinker_pb2
from controllers.tinker_server.requests import SamplingLimits
from rl_actors.vllm.requests import vllm_params

TEXT = [([1], {"target_tokens": [3]})]


async def train(api, model: str, seq: int, target: int = 3) -> None:
    await api.forward_backward(model, seq, [([1], {"target_tokens": [target]})])
    await api.optim_step(model, seq + 1, learning_rate=2.0)


async def ephemeral(api, model: str, seq: int, kind: str = "snapshot") -> str:
    """Save the model's weights without a name, and return the id of a sampler for them.

    kind: a "snapshot" sampler keeps these weights. All "inflight" samplers of a model use the weights of the newest
    save of this kind.
    """
    promise = await api.post(
        "save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq, kind=kind
    )
    return (await api.answer(promise))["sampling_session_id"]


def tokens_of(sequence) -> list[int]:
    return np.frombuffer(sequence.tokens, "<i4").tolist()


def logprobs_of(sequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, "<f4")


def test_samples_have_ids_and_logprobs_and_equal_seeds_give_equal_samples(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        promise = await api.send_sample(sampler, 1, num_samples=3)
        assert promise["sample_sequence_ids"] == [f"{sampler}:1:{index}" for index in range(3)]
        assert len((await api.sample(sampler, 1, num_samples=3)).sequences) == 3
        one, same, other = [
            await api.sample(sampler, 2 + seq, params={"seed": seed}) for seq, seed in enumerate((5, 5, 6))
        ]
        assert one == same != other
        assert np.allclose(logprobs_of(one.sequences[0]), -np.log(16))
        big = (1 << 40) + 7
        assert (await api.send_sample(sampler, big))["sample_sequence_ids"] == [f"{sampler}:{big}:0"]

    api(use)


def test_a_snapshot_keeps_its_weights_and_an_inflight_sampler_takes_those_of_the_newest_inflight_save(api):
    async def use(api):
        model = await api.create_model()
        snapshot = await ephemeral(api, model, 1)
        inflight = await ephemeral(api, model, 2, "inflight")
        await train(api, model, 3)
        newer = await ephemeral(api, model, 5, "inflight")

        trained = await seen(api, newer, 1)
        assert trained > -1 and await seen(api, inflight, 1) == trained
        assert await seen(api, snapshot, 1) == pytest.approx(-np.log(16))
        assert await seen(api, newer, 2) == trained  # the generator has switched back to this version

    api(use)


def test_an_inflight_sampler_keeps_its_weights_however_many_snapshots_are_saved_later(api):
    async def use(api):
        model = await api.create_model()
        await train(api, model, 1)
        inflight = await ephemeral(api, model, 3, "inflight")
        trained = await seen(api, inflight, 1)
        snapshots = [await ephemeral(api, model, seq) for seq in (4, 5, 6, 7)]
        assert trained > -1 and await seen(api, inflight, 2) == trained
        assert "samplers_kept" in await api.error(await api.send_sample(snapshots[0], 1))
        await seen(api, snapshots[-1], 1)
        newer = await ephemeral(api, model, 8, "inflight")
        assert await seen(api, inflight, 3) == await seen(api, newer, 1) == trained

    api(use, samplers_kept=2)


def test_simultaneous_requests_for_three_versions_each_use_their_own_version(api):
    async def use(api):
        model = await api.create_model()
        samplers = []
        for seq in (1, 11, 21):
            samplers.append(await ephemeral(api, model, seq))
            await train(api, model, seq + 1)
        promises = []
        for seq in range(100, 130):
            for sampler in samplers:
                promise = await api.send_sample(sampler, seq, [1, 3], prompt_logprobs=True)
                promises.append((sampler, promise))
        found = {sampler: set() for sampler in samplers}
        for sampler, promise in promises:
            response = tinker_pb2.SampleResponse.FromString((await api.fetch(promise)).content)
            found[sampler].add(float(np.frombuffer(response.prompt_logprobs, "<f4")[1]))
        assert [len(values) for values in found.values()] == [1, 1, 1]  # each sampler used a single version
        assert len(set.union(*found.values())) == 3

    api(use)


async def seen(api, sampler: str, seq: int) -> float:
    """The logprob of token 3, which `train` makes likelier, in the prompt [1, 3]."""
    response = await api.sample(sampler, seq, [1, 3], prompt_logprobs=True)
    return float(np.frombuffer(response.prompt_logprobs, "<f4")[1])


def test_samplers_of_adapters_and_of_the_base_model_answer_at_the_same_time_after_one_pull(api):
    async def use(api):
        models = [await api.create_model(seq, rank=4) for seq in (0, 1)]
        samplers = [await api.sampler(base_model="letters")]
        for first, model in zip((1, 21), models, strict=True):
            for seq in (first, first + 10):
                await train(api, model, seq)
                samplers.append(await ephemeral(api, model, seq + 2))
        await api.sample(samplers[0], 1)
        generator = api.server.generator
        assert generator.num_switches == 1  # the pull of the base model
        api.generator.gate.clear()
        sent = [await api.send_sample(sampler, seq, params={"seed": 1}) for sampler in samplers for seq in (5, 6)]
        while len(api.generator.calls) < 1 + len(sent):
            await asyncio.sleep(0)
        assert (generator.num_running, generator.num_waiting) == (10, 0)
        api.generator.gate.set()
        for promise in sent:
            assert (await api.fetch(promise)).status_code == 200
        found = [await seen(api, sampler, 3) for sampler in samplers]
        assert found[0] == pytest.approx(-np.log(16)) and found[1] > found[0]
        assert found[1:3] == found[3:5] and found[2] > found[1]  # both runs took the same steps
        assert generator.num_switches == 1 and api.generator.pulls == [api.server.base_version]
        assert len(api.generator.loads) == 4 == generator.num_adapters

    api(use)


def test_a_dropped_adapter_is_unloaded_and_deleted_after_its_last_request(api):
    async def use(api):
        model = await api.create_model(rank=4)
        old = await ephemeral(api, model, 1)
        await api.sample(old, 1)
        [name] = api.generator.adapters
        api.generator.gate.clear()
        running = await api.send_sample(old, 2)
        while len(api.generator.calls) < 2:
            await asyncio.sleep(0)
        for seq in (2, 3, 4):
            last = await ephemeral(api, model, seq)
        assert "samplers_kept" in await api.error(await api.send_sample(old, 3))
        directory = api.server.folder / "samplers" / "2"
        assert name in api.generator.adapters and directory.is_dir()
        api.generator.gate.set()
        assert (await api.fetch(running)).status_code == 200
        while directory.exists():
            await asyncio.sleep(0.001)
        assert name not in api.generator.adapters
        await api.sample(last, 1)

    api(use, samplers_kept=2)


def test_the_least_recently_used_adapter_is_unloaded_and_its_next_request_loads_it_again(api, monkeypatch):
    monkeypatch.setattr(sampling, "LOADED_ADAPTERS", 2)

    async def use(api):
        model = await api.create_model(rank=4)
        samplers = [await ephemeral(api, model, seq) for seq in (1, 2, 3)]
        for seq, place in enumerate((0, 1, 0, 2, 1), 1):
            await api.sample(samplers[place], seq)
        while len(api.generator.adapters) > 2:
            await asyncio.sleep(0)
        loaded = [name.split(",")[0] for name in api.generator.loads]
        assert loaded == ["version 2", "version 3", "version 4", "version 3"]
        assert sorted(name.split(",")[0] for name in api.generator.adapters) == ["version 3", "version 4"]

    api(use)


def test_an_inflight_sampler_takes_the_newest_adapter_and_a_running_request_keeps_its_own(api):
    async def use(api):
        model = await api.create_model(rank=4)
        inflight = await ephemeral(api, model, 1, "inflight")
        await train(api, model, 2)
        before = await seen(api, inflight, 1)
        api.generator.gate.clear()
        running = await api.send_sample(inflight, 2, params={"seed": 1})
        while len(api.generator.calls) < 1:
            await asyncio.sleep(0)
        newer = await ephemeral(api, model, 4, "inflight")
        api.generator.gate.set()
        response = tinker_pb2.SampleResponse.FromString((await api.fetch(running)).content)
        assert logprobs_of(response.sequences[0]) == pytest.approx(-np.log(16))
        assert await seen(api, inflight, 3) == await seen(api, newer, 1) > before

    api(use)


def test_runs_without_adapters_or_with_a_rank_above_vllms_limit_are_sampled_with_whole_weights(api):
    async def use(api):
        wide = await api.create_model(0, rank=9)
        whole = await api.create_model(1, rank=0)
        for switches, model in enumerate((wide, whole), 1):
            await train(api, model, 1)
            assert await seen(api, await ephemeral(api, model, 10 + switches), 1) > -np.log(16)
            assert api.server.generator.num_switches == switches and api.generator.loads == []

    api(use)


def test_a_failed_load_of_an_adapter_is_an_error_and_the_next_request_loads_it(api):
    async def use(api):
        model = await api.create_model(rank=4)
        sampler = await ephemeral(api, model, 1)
        [directory] = [file.parent for file in api.server.folder.glob("samplers/*/numbers.pt")]
        hidden = directory.with_name("hidden")
        directory.rename(hidden)
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        answer = await api.answer(await api.send_sample(sampler, 1))
        assert answer["category"] == "server" and "the adapter of version 2 cannot be loaded" in answer["error"]
        (directory / "adapter_config.json").unlink()
        directory.rmdir()
        hidden.rename(directory)
        await api.sample(sampler, 2)

    api(use)


def test_requests_that_come_at_nearly_the_same_time_share_calls_of_the_generator(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        await api.sample(sampler, 1)
        before = len(api.generator.calls)
        promises = await asyncio.gather(*[api.send_sample(sampler, seq, [seq % 16]) for seq in range(2, 42)])
        for promise in promises:
            await api.fetch(promise)
        assert len(api.generator.calls) - before < 20

    api(use)


def test_a_request_for_other_weights_starts_when_the_running_requests_have_ended(api):
    async def use(api):
        model = await api.create_model()
        first = await ephemeral(api, model, 1)
        await train(api, model, 2)
        second = await ephemeral(api, model, 4)
        await api.sample(first, 1)
        api.generator.gate.clear()
        running = await api.send_sample(first, 2)
        await asyncio.sleep(0.02)
        waiting = await api.send_sample(second, 1)
        await asyncio.sleep(0.02)
        assert api.server.generator.num_waiting == 1
        api.generator.gate.set()
        for promise in (running, waiting):
            assert (await api.fetch(promise)).status_code == 200

    api(use)


def test_a_request_that_is_cancelled_when_its_version_has_come_is_not_counted_as_running():
    class Pulls:
        async def pull_model_state_dict(self, version: int) -> None: ...

    async def use() -> None:
        versions = sampling.VersionedGenerator(Pulls())

        async def request() -> None:
            async with versions.using(1):
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        while not versions.num_running:  # ends when the request is counted, before its task runs again
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert versions.num_running == 0
        async with versions.using(2):
            assert versions.num_running == 1

    asyncio.run(asyncio.wait_for(use(), 60))


def test_sampling_from_dropped_or_deleted_weights_is_an_error_with_the_reason(api):
    async def use(api):
        model = await api.create_model()
        old = await ephemeral(api, model, 1)
        for seq in (2, 3, 4):
            last = await ephemeral(api, model, seq)
        assert "samplers_kept" in await api.error(await api.send_sample(old, 1))
        await api.sample(last, 1)
        path = (await api.answer(await api.post("save_weights_for_sampler", model_id=model, path="n", seq_id=9)))[
            "path"
        ]
        named = await api.sampler(model_path=path)
        await api.sample(named, 1)
        await api.http.delete(f"/training_runs/{model}/checkpoints/sampler_weights/n")
        assert "were dropped" in await api.error(await api.send_sample(named, 2))
        gone = await api.http.post(
            "/create_sampling_session",
            json={"session_id": api.session, "sampling_session_seq_id": 99, "model_path": path},
        )
        assert gone.status_code == 404 and "there is no checkpoint" in gone.text

    api(use, samplers_kept=2)


def test_a_sample_ends_at_a_stop_token_a_stop_string_or_the_end_token(api):
    async def use(api):
        model = await api.create_model()
        for seq in (1, 3):
            await train(api, model, seq, target=3)
        sampler = await ephemeral(api, model, 9)

        async def sample(seq: int, stop, max_tokens: int = 30):
            response = await api.sample(sampler, seq, params={"stop": stop, "max_tokens": max_tokens, "seed": 4})
            [sequence] = response.sequences
            return tokens_of(sequence), sequence.stop_reason == 0

        whole, stopped = await sample(1, [])
        assert len(whole) == 30 and not stopped
        tokens, stopped = await sample(2, [3])
        assert tokens == whole[: whole.index(3) + 1] and stopped
        tokens, stopped = await sample(3, "dd")
        assert tokens == whole[: "".join(map(str, whole)).index("33") + 2] and stopped
        tokens, stopped = await sample(4, ["zz", "d"])
        assert tokens == whole[: whole.index(3) + 1] and stopped
        tokens, stopped = await sample(5, None)
        assert stopped == (0 in whole)
        assert (await sample(6, "zz"))[1] is False

    api(use)


def test_prompt_logprobs_cover_the_whole_prompt_or_its_last_tokens(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        response = await api.sample(sampler, 1, [1, 2, 3, 4], prompt_logprobs=True)
        scores = np.frombuffer(response.prompt_logprobs, "<f4")
        assert np.isnan(scores[0]) and np.allclose(scores[1:], -np.log(16))
        response = await api.sample(sampler, 2, [1, 2, 3, 4], prompt_logprobs=True, prompt_logprobs_last_n=2)
        assert np.isnan(np.frombuffer(response.prompt_logprobs, "<f4")).tolist() == [True, True, False, False]
        assert not (await api.sample(sampler, 3)).HasField("prompt_logprobs")

    api(use)


@pytest.mark.parametrize(
    ("prompt", "more", "error"),
    [
        ([], {}, "1 to"),
        ([99], {}, "holds the id 99"),
        ([1] * 64, {}, "has 64 tokens"),
        ([1], {"params": {"temperature": -1.0}}, "temperature=-1.0"),
        ([1], {"params": {"top_p": 0.0}}, "top_p=0.0"),
        ([1], {"params": {"stop": [""]}}, "empty string"),
        ([1], {"params": {"stop": [99]}}, "stop_token_ids"),
        ([1], {"params": {"seed": 1 << 62}}, "seed=4611686018427387904; it must be an integer in [0, 2**62)"),
        ([1], {"params": {"seed": -1}}, "seed=-1"),
        ([1, 2], {"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ([1], {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
    ],
)
def test_a_wrong_request_fails_with_a_reason_and_the_next_request_succeeds(api, prompt, more, error):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        assert error in await api.error(await api.send_sample(sampler, 1, prompt, **more))
        await api.sample(sampler, 2)

    api(use)


def test_too_many_waiting_requests_get_a_429_with_retry_after(api):
    async def use(api):
        sampler = await api.sampler(base_model="letters")
        api.generator.gate.clear()
        await api.send_sample(sampler, 1)
        body = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": sampler, "seq_id": 2}
        response = await api.http.post("/asample", json=body)
        assert response.status_code == 429 and response.headers["retry-after"] == "1"
        api.generator.gate.set()

    api(use, max_waiting=1)


def test_a_request_gets_the_logprobs_of_the_tokens_that_it_names(api):
    async def use(api):
        model = await api.create_model()
        await train(api, model, 1)
        sampler = await ephemeral(api, model, 3)

        async def score(token: int) -> float:
            response = await api.sample(sampler, 100 + token, [1, token], prompt_logprobs=True)
            return np.frombuffer(response.prompt_logprobs, "<f4")[1]

        expected = [await score(token) for token in range(6)]
        dense = {"data": [3, 5, 2, -1], "dtype": "int64", "shape": [2, 2]}
        response = await api.sample(sampler, 10, [1, 3, 2], target_prompt_logprobs=dense)
        tensor = response.target_prompt_logprobs
        found = np.frombuffer(tensor.dense, "<f4")
        assert list(tensor.shape) == [2, 2] and found == pytest.approx([expected[3], expected[5], expected[2], 0.0])

        rows = {"sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [0, 4]}
        sparse = {"data": [5, 4], "dtype": "int64", "shape": [2, 5]} | rows
        tensor = (await api.sample(sampler, 11, [1, 3, 2], target_prompt_logprobs=sparse)).target_prompt_logprobs
        assert list(tensor.shape) == [2, 5]
        assert np.frombuffer(tensor.sparse_csr.values, "<f4") == pytest.approx([expected[5], expected[4]])
        assert np.frombuffer(tensor.sparse_csr.crow_indices, "<i8").tolist() == [0, 0, 2]
        assert np.frombuffer(tensor.sparse_csr.col_indices, "<i8").tolist() == [0, 4]

        for fault, text in (
            ({"shape": [3, 2]}, "a row for each token"),
            ({"data": [3, 5, 2, 16]}, "tokens 2 to 16"),
            ({"data": [3, 5, 2]}, "holds 3 numbers"),
            ({"dtype": "float32"}, "is float32"),
            ({"sparse_crow_indices": [0, 2, 4]}, "lacks sparse_col_indices"),
            ({"sparse_col_indices": [0, 1, 0, 1]}, "lacks sparse_crow_indices"),
        ):
            wrong = await api.send_sample(sampler, 20 + len(text), [1, 3, 2], target_prompt_logprobs=dense | fault)
            assert text in await api.error(wrong)

    api(use)


def test_a_request_gets_the_likeliest_tokens_of_the_prompt_and_of_the_samples(api):
    async def use(api):
        model = await api.create_model()
        await train(api, model, 1)
        sampler = await ephemeral(api, model, 3)
        more = {
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 3,
            "prompt_logprobs": True,
            "prompt_logprobs_last_n": 1,
        }
        response = await api.sample(sampler, 10, [1, 2, 3], params={"max_tokens": 4, "stop": []}, **more)
        own = np.frombuffer(response.prompt_logprobs, "<f4")[2]
        prompt, samples = response.topk_prompt_logprobs, response.sequences[0].topk_sampled_logprobs
        assert (prompt.length, prompt.k, samples.length, samples.k) == (3, 2, 4, 3)
        logprobs = np.frombuffer(prompt.logprobs, "<f4").reshape(3, 2)
        assert (
            (logprobs[:2] == requests.NO_LOGPROB).all()
            and logprobs[2, 0] == pytest.approx(own)
            and own > logprobs[2, 1]
        )
        assert np.frombuffer(prompt.token_ids, "<i4").reshape(3, 2)[2, 0] == 3
        assert np.frombuffer(samples.token_ids, "<i4").reshape(4, 3)[:, 0].tolist() == [3] * 4
        wrong = await api.send_sample(sampler, 11, topk_prompt_logprobs=17)
        assert "topk_prompt_logprobs=17; it must be at most 16" in await api.error(wrong)

    api(use)


def test_two_requests_with_neighbouring_seeds_share_no_seed_of_a_completion():
    limits = SamplingLimits(max_model_len=64, vocab_size=16, end_token_ids=(1,), tokenizer=None)

    def seeds(seed: int) -> list[int | None]:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"seed": seed, "max_tokens": 4},
            "num_samples": 8,
        }
        params = limits.read(messages.SampleRequest.model_validate(body)).params
        return [request.seed for request in vllm_params(params, prompt=0)]

    found = [seed for given in range(20) for seed in seeds(given)]
    assert len(set(found)) == 20 * 8 and seeds(3) == found[24:32]
