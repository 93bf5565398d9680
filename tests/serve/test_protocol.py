"""Tests of what the SDK `tinker` expects from a server.

Fake actors replace the real ones. Their model has one logit for each token of the vocabulary, so every position has the
same distribution.
"""

import asyncio
import os
import shutil
import time

import numpy as np
import pytest
from serving import LONGEST, forward_backward_body

from controllers.tinker_server.access import ANYONE
from controllers.tinker_server.caller import Caller
from controllers.tinker_server.checkpoints import copy_weights
from controllers.tinker_server.messages import CopyWeights
from controllers.tinker_server.store import Checkpoint, Version

TEXT = [([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})]
LOG_16 = float(np.log(16))  # a new model gives each of its 16 tokens the probability 1/16


def test_a_training_step_returns_logprobs_and_metrics_and_lowers_the_loss(api):
    async def use(api):
        model = await api.create_model()
        [row], metrics = await api.forward_backward(model, 1, TEXT)
        assert np.allclose(row, -LOG_16) and metrics["loss:sum"] == pytest.approx(3 * LOG_16)
        result = await api.optim_step(model, 2)
        assert result["metrics"]["unclipped_grad_l2:mean"] > 0
        _, after = await api.forward_backward(model, 3, TEXT, forward_only=True)
        assert after["loss:sum"] < metrics["loss:sum"]
        assert api.trainers[0].calls == ["forward_backward", "optim_step", "forward"]

    api(use)


def test_a_request_that_is_sent_again_adds_no_gradient(api):
    async def use(api):
        model = await api.create_model()
        first = await api.send_forward_backward(model, 1, TEXT)
        again = await api.send_forward_backward(model, 1, TEXT)
        assert again["request_id"] == first["request_id"]
        await api.output(first)
        late = await api.send_forward_backward(model, 1, TEXT)
        assert late["request_id"] == first["request_id"]
        body = {"model_id": model, "seq_id": 2, "adam_params": {}}
        steps = [await api.post("optim_step", **body) for _ in range(2)]
        await api.answer(steps[1])
        assert steps[0] == steps[1] and api.trainers[0].calls == ["forward_backward", "optim_step"]

    api(use)


def test_chunks_of_a_call_may_arrive_in_any_order_and_a_client_may_send_forty_steps_before_it_reads_an_answer(api):
    async def use(api):
        model = await api.create_model()
        promises = [await api.send_forward_backward(model, seq, TEXT) for seq in (2, 3, 1)]
        promises.append(await api.post("optim_step", model_id=model, seq_id=4, adam_params={}))
        for seq in range(5, 85, 2):
            promises.append(await api.send_forward_backward(model, seq, TEXT))
            promises.append(await api.post("optim_step", model_id=model, seq_id=seq + 1, adam_params={}))
        answers = [await api.fetch(promise) for promise in promises]
        assert [answer.status_code for answer in answers] == [200] * len(promises)
        assert api.trainers[0].calls == 2 * ["forward_backward"] + 41 * ["forward_backward", "optim_step"]

    api(use)


def test_a_client_that_asks_for_an_answer_too_early_gets_a_408(api):
    async def use(api):
        model = await api.create_model()
        api.trainers[0].gate.clear()
        promise = await api.send_forward_backward(model, 1, TEXT)
        response = await api.http.post("/retrieve_future", json={"request_id": promise["request_id"]})
        assert response.status_code == 408 and response.json()["type"] == "try_again"
        api.trainers[0].gate.set()
        _, metrics = await api.output(promise)
        assert metrics["loss:sum"] > 0
        unknown = await api.http.post("/retrieve_future", json={"request_id": "none"})
        assert unknown.status_code == 410

    api(use)


@pytest.mark.parametrize(
    ("data", "loss", "more", "error"),
    [
        (TEXT, "entropy", {}, "unknown loss 'entropy'"),
        (TEXT, "custom", {"config": {"loss_id": "x"}}, "custom is not supported"),
        (TEXT, "ppo", {}, "has no loss_fn_inputs"),
        (TEXT, "cross_entropy", {"config": {"beta": 1.0}}, "loss_fn_config has 'beta'"),
        ([], "cross_entropy", {}, "no datums"),
        ([([1, 2], {"target_tokens": [2]})], "cross_entropy", {}, "target_tokens has shape [1]"),
        ([([1], {"target_tokens": [2], "mask": [1.0]})], "cross_entropy", {}, "has loss_fn_inputs['mask']"),
        ([([1], {"target_tokens": [0.5]})], "cross_entropy", {}, "must be int64"),
        ([([1] * (LONGEST + 1), {"target_tokens": [2] * (LONGEST + 1)})], "cross_entropy", {}, "positions"),
    ],
)
def test_a_wrong_request_gets_a_failed_future_and_the_run_goes_on(api, data, loss, more, error):
    async def use(api):
        model = await api.create_model()
        assert error in await api.error(await api.send_forward_backward(model, 1, data, loss, **more))
        await api.forward_backward(model, 2, TEXT)
        await api.optim_step(model, 3)

    api(use)


def test_other_wrong_requests_get_failed_futures_or_a_4xx_status_that_the_sdk_does_not_retry(api):
    async def use(api):
        model = await api.create_model()
        empty = await api.post("optim_step", model_id=model, seq_id=1, adam_params={})
        assert "no gradients" in await api.error(empty)
        dimuon = await api.post("optim_step", model_id=model, seq_id=2, optimizer_params={"type": "dimuon"})
        assert "dimuon" in await api.error(dimuon)
        unknown = await api.send_forward_backward("other:train:0", 1, TEXT)
        assert "there is no training run other:train:0" in await api.error(unknown)
        wrong_base = await api.post("create_model", session_id=api.session, model_seq_id=8, base_model="other")
        assert "this server has letters" in await api.error(wrong_base)
        name = await api.post("save_weights", model_id=model, path="a/b", seq_id=3)
        assert "'a/b' is not possible" in await api.error(name)
        for route, body, status in [
            ("get_info", {"model_id": "none"}, 404),
            ("get_info", {"model_id": "none", "extra": 1}, 422),
            ("create_sampling_session", {"session_id": api.session, "sampling_session_seq_id": 1}, 400),
            ("session_heartbeat", {"session_id": "none"}, 404),
            ("copy_weights", {"source_path": "x"}, 404),
            ("audit", {}, 404),
        ]:
            response = await api.http.post(f"/{route}", json=body)
            assert response.status_code == status, (route, response.text)
        bad = await api.http.post("/forward_backward", content=b"\xff\xff")
        assert bad.status_code == 400

    api(use)


def test_an_error_in_the_trainer_drops_the_gradients_and_the_run_goes_on(api):
    async def use(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        trainer = api.trainers[0]
        sound = trainer._run

        def fail(samples, loss):
            raise RuntimeError("out of memory")

        trainer._run = fail
        answer = await api.answer(await api.send_forward_backward(model, 2, TEXT))
        assert answer["category"] == "server" and "gradients since the last optim_step are dropped" in answer["error"]
        trainer._run = sound
        step = await api.post("optim_step", model_id=model, seq_id=3, adam_params={})
        assert "no gradients" in await api.error(step)
        await api.forward_backward(model, 4, TEXT)
        await api.optim_step(model, 5)

    api(use)


def test_a_dead_trainer_is_closed_and_the_error_names_the_last_saved_state(api):
    async def use(api):
        model = await api.create_model()
        await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=1))
        trainer = api.trainers[0]

        trainer.is_dead = True
        answer = await api.answer(await api.send_forward_backward(model, 2, TEXT))
        assert answer["category"] == "server" and f"tinker://{model}/weights/a" in answer["error"]
        assert "its last saved state" in await api.error(await api.send_forward_backward(model, 3, TEXT))
        assert trainer.is_closed and api.server.trainers.residents == {}

    api(use)


def test_a_server_that_stops_in_the_middle_of_a_call_saves_the_run(api, tmp_path):
    async def before(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        await api.optim_step(model, 2)
        api.trainers[0].gate.clear()
        await api.send_forward_backward(model, 3, TEXT)
        await asyncio.sleep(0.01)
        return model

    async def after(api):
        _, metrics = await api.forward_backward(model, 4, TEXT, forward_only=True)
        assert metrics["loss:sum"] < 3 * LOG_16 - 0.1

    model = api(before, tmp_path)
    api(after, tmp_path)


def test_a_position_may_have_several_targets_and_each_datum_its_own_number_of_them(api):
    async def use(api):
        model = await api.create_model()
        data = [
            ([1, 2], {"target_tokens": [[2, 3], [4, 5]], "weights": [[0.5, 0.5], [1.0, 0.0]]}),
            ([1], {"target_tokens": [[7]], "weights": [[2.0]]}),
        ]
        rows, metrics = await api.forward_backward(model, 1, data)
        assert [row.shape for row in rows] == [(2, 2), (1, 1)]
        assert metrics["loss:sum"] == pytest.approx(4 * LOG_16)

    api(use)


def test_a_client_may_get_the_size_of_a_large_answer_before_the_answer(api, monkeypatch):
    monkeypatch.setattr("controllers.tinker_server.routes.INLINE_BYTES", 10)

    async def use(api):
        model = await api.create_model()
        promise = await api.send_forward_backward(model, 1, TEXT)
        await api.fetch(promise)
        ask = {"request_id": promise["request_id"], "allow_metadata_only": True}
        peek = (await api.http.post("/retrieve_future", json=ask)).json()
        assert peek["status"] == "complete_metadata" and peek["response_payload_size"] > 10
        rows, _ = await api.output(promise)
        assert len(rows) == 1

    api(use)


def test_zstd_bodies_are_read_and_broken_bodies_and_bodies_that_are_too_large_are_refused(api):
    zstandard = pytest.importorskip("zstandard")

    async def use(api):
        model = await api.create_model()

        async def send(body: bytes, encoding: str):
            headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": encoding}
            return await api.http.post("/forward_backward", content=body, headers=headers)

        compress = zstandard.ZstdCompressor().compress
        body = forward_backward_body(model, 1, TEXT, "cross_entropy")
        promise = (await send(compress(body), "zstd")).json()
        await api.output(promise)
        assert (await send(compress(bytes(api.config.max_body_bytes + 1)), "zstd")).status_code == 413
        too_long = bytes(api.config.max_body_bytes + 1)
        assert (await send(too_long, "identity")).status_code == 413
        response = await api.http.post("/asample", content=too_long, headers={"Content-Type": "application/json"})
        assert response.status_code == 413 and "max_json_bytes=1048576" in response.json()["detail"]
        for broken in (b"12345", compress(body)[:-3], compress(body) + b"12345"):
            assert (await send(broken, "zstd")).status_code == 400
        assert (await send(body, "br")).status_code == 415

    api(use, max_body_bytes=1 << 20)


def test_a_new_run_continues_from_a_saved_state_with_or_without_the_optimizer_state(api):
    async def use(api):
        model = await api.create_model(rank=4, seed=3)
        await api.forward_backward(model, 1, TEXT)
        await api.optim_step(model, 2)
        saved = await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=3))
        assert saved["path"] == f"tinker://{model}/weights/a"
        taken = await api.post("save_weights", model_id=model, path="a", seq_id=4)
        assert "exists" in await api.error(taken)
        await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=5, overwrite=True))
        results = {}
        for seq, optimizer in ((1, True), (2, False)):
            load = await api.post(
                "load_weights", session_id=api.session, model_seq_id=seq, path=saved["path"], optimizer=optimizer
            )
            other = (await api.answer(load))["model_id"]
            assert other == f"{api.session}:train:{seq}"
            info = await api.post("get_info", model_id=other)
            assert info["lora_rank"] == 4 and api.trainers[0].seeds[other] == 3
            results[optimizer] = await continue_from(api, other)
        expected = await continue_from(api, model, seq=6)
        assert results[True] == expected != results[False]
        assert len(api.trainers) == 1

    async def continue_from(api, model, seq=1):
        await api.forward_backward(model, seq, [([1], {"target_tokens": [9]})])
        await api.optim_step(model, seq + 1)
        rows, _ = await api.forward_backward(model, seq + 2, [([1], {"target_tokens": [9]})], forward_only=True)
        return rows[0].tobytes()

    api(use, max_trainers=4)


def test_an_optim_step_uses_the_adam_params_of_its_request(api):
    async def use(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        given = {"learning_rate": 0.5, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4}
        await api.optim_step(model, 2, **given, grad_clip_norm=0.01)
        [group] = api.trainers[0].optimizer.param_groups
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 0.3, 0.4)
        before = api.trainers[0].numbers.detach().clone()
        await api.forward_backward(model, 3, TEXT)
        await api.optim_step(model, 4, learning_rate=0.0)
        assert api.trainers[0].numbers.equal(before)

    api(use)


def test_a_run_that_went_to_disk_to_make_room_goes_on_where_it_was(api):
    async def use(api):
        first = await api.create_model(0)
        await api.forward_backward(first, 1, TEXT)
        await api.optim_step(first, 2)
        second = await api.create_model(1)  # there is only one trainer, so the first run goes to disk
        assert api.trainers[0].is_closed
        await api.forward_backward(second, 1, TEXT)
        blocked = await api.send_forward_backward(first, 3, TEXT)
        assert "max_trainers=1" in await api.error(blocked)  # the second run has gradients, and keeps its trainer
        await api.optim_step(second, 2)
        await api.forward_backward(first, 4, TEXT)
        await api.optim_step(first, 5)
        assert torch_equal(api.trainers[-1], api.trainers[1]) is False
        alone = await api.create_model(2)
        for seq in (1, 3):
            await api.forward_backward(alone, seq, TEXT)
            await api.optim_step(alone, seq + 1)
        # The first run has the weights of a run that made the same two steps and was never on disk.
        assert torch_equal(api.trainers[-1], api.trainers[-2])

    def torch_equal(one, other):
        return one.numbers.detach().equal(other.numbers.detach())

    api(use, max_trainers=1)


def test_a_restarted_server_still_has_its_runs_and_samplers(api, tmp_path):
    async def before(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        await api.optim_step(model, 2)
        saved = await api.post("save_weights_for_sampler", model_id=model, path="w", seq_id=3)
        sampler = await api.sampler(model_path=(await api.answer(saved))["path"])
        return model, sampler, (await api.sample(sampler, 1, params={"seed": 1})).SerializeToString()

    async def after(api):
        rows, metrics = await api.forward_backward(model, 1, TEXT, forward_only=True)
        assert metrics["loss:sum"] < 3 * LOG_16 - 0.1  # the weights are the trained ones
        assert (await api.sample(sampler, 1, params={"seed": 1})).SerializeToString() == answer

    model, sampler, answer = api(before, tmp_path)
    api(after, tmp_path)


def test_after_a_kill_the_error_names_the_last_saved_state_and_this_state_can_be_loaded(api, tmp_path):
    async def before(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        await api.optim_step(model, 2)
        await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=3))
        api.server.trainers.homes.clear()  # so the server stops without writing the run, as if by kill -9
        return model

    async def after(api):
        error = await api.error(await api.send_forward_backward(model, 4, TEXT))
        assert f"its last saved state is tinker://{model}/weights/a" in error
        load = await api.post(
            "load_weights", session_id=api.session, model_seq_id=0, path=f"tinker://{model}/weights/a", optimizer=True
        )
        await api.answer(load)

    model = api(before, tmp_path)
    api(after, tmp_path)


def test_runs_and_checkpoints_are_listed_and_a_deleted_checkpoint_cannot_be_loaded(api):
    async def use(api):
        model = await api.create_model(rank=2)
        for seq, name in enumerate(("a", "b"), start=1):
            await api.answer(await api.post("save_weights", model_id=model, path=name, seq_id=seq, ttl_seconds=3600))
        get = api.http.get
        [run] = (await get("/training_runs")).json()["training_runs"]
        assert run["training_run_id"] == model and run["last_checkpoint"]["checkpoint_id"] == "weights/b"
        listed = (await get(f"/training_runs/{model}/checkpoints")).json()["checkpoints"]
        assert [each["tinker_path"] for each in listed] == [f"tinker://{model}/weights/{name}" for name in "ba"]
        assert listed[0]["expires_at"] is not None and listed[0]["size_bytes"] > 0
        assert (await get("/checkpoints")).json()["cursor"]["total_count"] == 2
        info = await api.post("weights_info", tinker_path=f"tinker://{model}/weights/a")
        assert info["lora_rank"] == 2 and info["train_mlp"] is True
        assert (await get(f"/sessions/{api.session}")).json()["training_run_ids"] == [model]
        at = f"/training_runs/{model}/checkpoints/weights/a"
        assert (await api.http.put(f"{at}/ttl", json={"ttl_seconds": None})).status_code == 204
        assert (await api.http.post(f"{at}/publish")).status_code == 204
        assert (await api.http.delete(at)).status_code == 204
        assert (await api.http.delete(at)).status_code == 404
        load = await api.post(
            "load_weights", session_id=api.session, model_seq_id=5, path=f"tinker://{model}/weights/a", optimizer=True
        )
        assert "there is no checkpoint" in await api.error(load)

    api(use)


def test_copied_weights_can_be_used_after_the_originals_are_deleted(api):
    async def use(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, TEXT)
        await api.optim_step(model, 2)
        state = (await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=3)))["path"]
        saved = await api.post("save_weights_for_sampler", model_id=model, path="w", seq_id=4)
        weights = (await api.answer(saved))["path"]
        copies = [(await api.post("copy_weights", source_path=path))["tinker_path"] for path in (state, weights)]
        for segment, name in (("weights", "a"), ("sampler_weights", "w")):
            await api.http.delete(f"/training_runs/{model}/checkpoints/{segment}/{name}")
        load = await api.post("load_weights", session_id=api.session, model_seq_id=7, path=copies[0], optimizer=True)
        other = (await api.answer(load))["model_id"]
        rows, _ = await api.forward_backward(other, 1, TEXT, forward_only=True)
        assert rows[0][0] > -LOG_16
        await api.sample(await api.sampler(model_path=copies[1]), 1)
        copied = copies[0].removeprefix("tinker://").partition("/")[0]
        assert "ended" in await api.error(await api.send_forward_backward(copied, 1, TEXT))

    api(use)


def test_a_copy_weights_request_that_failed_can_be_sent_again(api, monkeypatch):
    async def use(api):
        model = await api.create_model()
        saved = await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=1))
        fields = {"source_path": saved["path"], "session_id": api.session, "model_seq_id": 8}

        def fail(source: str, target: str) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(os, "link", fail)
            with pytest.raises((OSError, shutil.Error), match="the disk is full"):
                await copy_weights(CopyWeights(**fields), Caller(api.server, ANYONE))
        await api.post("copy_weights", **fields)

    api(use)


def test_weights_that_are_being_written_are_not_forgotten(api):
    async def use(api):
        model = await api.create_model()
        number = api.store.put(Version(run_id=model, is_ephemeral=True))
        assert api.store.forgotten_versions(time.time() + 60) == []
        api.store.update(Version, number, directory="directory")
        assert [each.number for each in api.store.forgotten_versions(time.time() + 60)] == [number]

    api(use)


def test_expired_checkpoints_and_the_unnamed_weights_of_silent_sessions_are_deleted(api):
    async def use(api):
        model = await api.create_model()
        await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=1, ttl_seconds=60))
        save = {"model_id": model, "sampling_session_seq_id": 5}
        sampler = (await api.answer(await api.post("save_weights_for_sampler", seq_id=2, **save)))[
            "sampling_session_id"
        ]
        api.server.sweep(time.time())
        await api.sample(sampler, 1)
        assert len(api.store.find(Checkpoint)) == 1
        api.server.sweep(time.time() + 2 * 24 * 3600)
        assert api.store.find(Checkpoint) == []
        assert "were dropped" in await api.error(await api.send_sample(sampler, 2))

    api(use)


def test_concurrent_runs_do_not_wait_for_each_other(api):
    async def use(api):
        first, second = await api.create_model(0), await api.create_model(1)
        api.trainers[0].gate.clear()
        waiting = await api.send_forward_backward(first, 1, TEXT)
        await api.forward_backward(second, 1, TEXT)
        api.trainers[0].gate.set()
        await api.output(waiting)

    api(use)


def test_the_server_reports_its_health_and_its_model(api):
    async def use(api):
        assert (await api.http.get("/healthz")).json() == {"status": "ok"}
        [model] = (await api.http.get("/get_server_capabilities")).json()["supported_models"]
        assert model["model_name"] == "letters" and model["max_context_length"] == LONGEST
        await asyncio.gather(*[api.post("session_heartbeat", session_id=api.session) for _ in range(3)])
        assert (await api.post("telemetry", events=[]))["status"] == "accepted"

    api(use)
