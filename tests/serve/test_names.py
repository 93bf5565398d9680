"""Two calls that are accepted one after the other and make something of the same name: the first gets it, the second fails."""

import asyncio
import contextlib

import pytest

from controllers.tinker_server.store import Checkpoint

DATUM = ([1, 2], {"target_tokens": [2, 3]})


@contextlib.asynccontextmanager
async def working(api, model: str):
    """In this block another request to the run is at work, so the work of new requests begins and then waits. It goes on after the block."""
    async with api.server.trainers._turn(model):
        yield
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("route", "segment"),
    [
        ("save_weights", "weights"),
        ("save_weights_for_sampler", "sampler_weights"),
        ("save_weights_external", "external_weights"),
    ],
)
def test_of_two_saves_under_one_name_that_are_not_awaited_the_second_fails(api, route, segment):
    async def use(api):
        model = await api.create_model()
        async with working(api, model):
            first = await api.post(route, model_id=model, path="same", seq_id=1)
            second = await api.post(route, model_id=model, path="same", seq_id=2)
        path = f"tinker://{model}/{segment}/same"
        assert (await api.answer(first))["path"] == path
        assert f"an earlier call is about to make {path}" in await api.error(second)
        assert f"{path} exists" in await api.error(await api.post(route, model_id=model, path="same", seq_id=3))
        assert (await api.answer(await api.post(route, model_id=model, path="other", seq_id=4)))["path"].endswith(
            "other"
        )

    api(use)


def test_a_name_is_free_again_after_a_save_that_failed(api):
    async def use(api):
        model = await api.create_model()
        await api.forward_backward(model, 1, [DATUM])
        assert "call optim_step" in await api.error(await api.post("save_weights", model_id=model, path="a", seq_id=2))
        await api.optim_step(model, 3)
        await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=4))
        assert not api.server.taken

    api(use)


def test_saves_that_overwrite_run_in_their_order_and_keep_others_out(api):
    async def use(api):
        model = await api.create_model()
        async with working(api, model):
            promises = [
                await api.post("save_weights", model_id=model, path="a", seq_id=1),
                await api.post(
                    "save_weights", model_id=model, path="a", seq_id=2, overwrite=True, user_metadata={"by": "2"}
                ),
                await api.post(
                    "save_weights", model_id=model, path="a", seq_id=3, overwrite=True, user_metadata={"by": "3"}
                ),
                await api.post("save_weights", model_id=model, path="a", seq_id=4),
            ]
        assert "earlier call" in await api.error(promises.pop())
        for promise in promises:
            assert "path" in await api.answer(promise)
        assert api.store.get(Checkpoint, f"tinker://{model}/weights/a").user_metadata == {"by": "3"}

    api(use)


def test_a_run_is_created_once_whichever_two_calls_create_it(api):
    async def use(api):
        model = await api.create_model()
        path = (await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=1)))["path"]
        new = {"session_id": api.session, "model_seq_id": 5}
        async with working(api, f"{api.session}:train:5"):
            made = await api.post("create_model", base_model="letters", lora_config={"rank": 0}, **new)
            loaded = await api.post("load_weights", path=path, optimizer=True, **new)
            await asyncio.sleep(0)
            copied = await api.http.post("/copy_weights", json={"source_path": path, **new})
        assert loaded["request_id"] != made["request_id"]
        assert (await api.answer(made))["model_id"] == f"{api.session}:train:5"
        assert "earlier call is about to make" in await api.error(loaded)
        assert copied.status_code == 400 and f"{api.session}:train:5 exists" in copied.text
        repeated = await api.post("load_weights", path=path, optimizer=True, **new)  # the SDK sends a request again
        assert repeated["request_id"] == loaded["request_id"]

    api(use)


def test_a_sampler_of_a_save_and_a_sampling_session_share_no_id(api):
    async def use(api):
        model = await api.create_model()
        session = {"session_id": api.session, "sampling_session_seq_id": 3}
        async with working(api, model):
            saved = await api.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=3)
            refused = await api.http.post("/create_sampling_session", json=session | {"base_model": "letters"})
            assert refused.status_code == 400 and "earlier call is about to make" in refused.text
        sampler = (await api.answer(saved))["sampling_session_id"]
        refused = await api.http.post("/create_sampling_session", json=session | {"base_model": "letters"})
        assert refused.status_code == 400 and f"{sampler} exists" in refused.text
        again = await api.post("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=3)
        assert f"{sampler} exists" in await api.error(again)

    api(use)


def test_a_sampling_session_that_is_asked_for_twice_is_the_same_and_another_one_is_refused(api):
    async def use(api):
        model = await api.create_model()
        path = (await api.answer(await api.post("save_weights_for_sampler", model_id=model, path="a", seq_id=1)))[
            "path"
        ]
        session = {"session_id": api.session, "sampling_session_seq_id": 3}
        first = await api.post("create_sampling_session", model_path=path, **session)
        assert first == await api.post("create_sampling_session", model_path=path, **session)
        refused = await api.http.post("/create_sampling_session", json=session | {"base_model": "letters"})
        assert refused.status_code == 400 and "exists" in refused.text

    api(use)
