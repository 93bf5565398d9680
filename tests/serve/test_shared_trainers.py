"""Training runs whose adapters have the same shape (LoRA rank and layers) share a trainer. Such a run is a tenant of
the trainer.

The actors are fakes. Their model has one number for each token id.
"""

import asyncio

import pytest

DATA = {seed: [([1, 2, 3], {"target_tokens": [2 + seed, 3, 4], "weights": [1.0, 0.5, 2.0]})] for seed in range(8)}
LORA = {"rank": 4, "seed": 3}


async def step(api, model: str, number: int, **params: float) -> float:
    """Do step `number` of a run. Returns the gradient norm."""
    await api.forward_backward(model, 2 * number + 1, DATA[number % 8])
    metrics = (await api.optim_step(model, 2 * number + 2, **params))["metrics"]
    return metrics["unclipped_grad_l2:mean"]


def numbers(api, model: str) -> list[float]:
    """The weights of a run whose state is in memory and not on disk."""
    return api.server.trainers.residents[model].client.numbers.tolist()


def test_runs_with_adapters_of_the_same_shape_share_a_trainer_and_other_runs_do_not(api):
    async def use(api):
        same = [await api.create_model(seq, rank=4, seed=seq) for seq in range(3)]
        for seq, lora in enumerate([{"rank": 8}, {"rank": 4, "train_mlp": False}, {"rank": 0}, {"rank": 0}], start=3):
            await api.create_model(seq, **lora)
        shared, *others = api.trainers
        assert shared.seeds == {model: seq for seq, model in enumerate(same)}
        assert shared.config.lora.rank == 4 and shared.config.lora.train_mlp
        assert [(other.config.lora.rank, len(other.tenants)) for other in others] == [(8, 1), (4, 1), (0, 0), (0, 0)]
        assert not others[1].config.lora.train_mlp

    api(use, max_trainers=5)


def test_runs_that_are_created_at_the_same_time_start_only_one_trainer(api):
    async def use(api):
        await asyncio.gather(*[api.create_model(seq, **LORA) for seq in range(4)])
        assert len(api.trainers) == 1 and len(api.trainers[0].tenants) == 4

    api(use)


def test_tenants_that_alternate_compute_the_same_numbers_as_runs_that_train_one_after_the_other(api):
    given = [{}, {"learning_rate": 0.5, "beta1": 0.1, "eps": 0.3, "weight_decay": 0.4, "grad_clip_norm": 0.01}]

    async def use(api):
        models = [await api.create_model(seq, **LORA) for seq in range(2)]
        norms = []
        for number in range(5):
            norms.append(
                [await step(api, model, number, **params) for model, params in zip(models, given, strict=True)]
            )
        for seq, params in enumerate(given):
            alone = await api.create_model(2 + seq, rank=8)
            assert [await step(api, alone, number, **params) for number in range(5)] == [each[seq] for each in norms]
            assert numbers(api, alone) == numbers(api, models[seq])

    api(use)


def test_calls_of_different_tenants_interleave_but_each_tenants_calls_keep_their_order(api):
    async def use(api):
        models = [await api.create_model(seq, **LORA) for seq in range(2)]
        api.trainers[0].calls.clear()
        promises = []
        for number in range(10):
            for model in models:
                promises.append(await api.send_forward_backward(model, 2 * number + 1, DATA[0]))
                promises.append(await api.post("optim_step", model_id=model, seq_id=2 * number + 2, adam_params={}))
        for promise in promises:
            assert (await api.fetch(promise)).status_code == 200
        calls = [call.split() for call in api.trainers[0].calls]
        for model in models:
            assert [call for name, call in calls if name == model] == 10 * ["forward_backward", "optim_step"]
        assert [name for name, _ in calls] != sorted(name for name, _ in calls)

    api(use)


def test_beyond_max_tenants_the_run_that_was_used_least_recently_waits_on_disk(api):
    async def use(api):
        first, second = [await api.create_model(seq, **LORA) for seq in range(2)]
        await step(api, first, 0)
        await step(api, second, 0)
        third = await api.create_model(2, **LORA)
        [trainer] = api.trainers
        assert list(trainer.tenants) == [second, third] and not trainer.is_closed
        await api.forward_backward(second, 3, DATA[0])
        await api.forward_backward(third, 1, DATA[0])
        assert "max_tenants=2" in await api.error(await api.send_forward_backward(first, 3, DATA[1]))
        await api.optim_step(third, 2)
        await api.forward_backward(first, 4, DATA[1])
        await api.optim_step(first, 5)
        assert list(trainer.tenants) == [second, first] and len(api.trainers) == 1
        other = await api.create_model(3, rank=8)
        for number in range(2):
            await step(api, other, number)
        assert numbers(api, other) == numbers(api, first)

    api(use, max_tenants=2)


def test_a_run_of_another_shape_takes_the_place_of_a_trainer_and_all_its_runs(api):
    async def use(api):
        runs = [await api.create_model(seq, **LORA) for seq in range(2)]
        for model in runs:
            await step(api, model, 0)
        whole = await api.create_model(2, rank=0)
        assert api.trainers[0].is_closed and list(api.server.trainers.residents) == [whole]
        await api.forward_backward(whole, 1, DATA[0])
        assert "max_trainers=1" in await api.error(await api.send_forward_backward(runs[0], 3, DATA[1]))
        await api.optim_step(whole, 2)
        await step(api, runs[1], 2)
        await step(api, runs[0], 2)
        assert list(api.trainers[2].tenants) == [runs[1], runs[0]] and len(api.trainers) == 3
        assert numbers(api, runs[0]) == numbers(api, runs[1])

    api(use, max_trainers=1)


def test_after_the_death_of_a_shared_trainer_each_error_names_the_last_saved_state_of_its_run(api):
    async def use(api):
        models = [await api.create_model(seq, **LORA) for seq in range(3)]
        for name, model in zip("ab", models[:2], strict=True):
            await api.answer(await api.post("save_weights", model_id=model, path=name, seq_id=1))
        api.trainers[0].is_dead = True
        answer = await api.answer(await api.send_forward_backward(models[0], 2, DATA[0]))
        assert answer["category"] == "server" and f"{models[0]} has ended" in answer["error"]
        assert f"its last saved state is tinker://{models[0]}/weights/a" in answer["error"]
        error = await api.error(await api.send_forward_backward(models[1], 2, DATA[0]))
        assert f"its last saved state is tinker://{models[1]}/weights/b" in error
        assert "it saved no state" in await api.error(await api.send_forward_backward(models[2], 2, DATA[0]))
        assert api.server.trainers.homes == [] and api.server.trainers.residents == {}
        load = {"session_id": api.session, "model_seq_id": 7, "path": f"tinker://{models[1]}/weights/b"}
        await step(api, (await api.answer(await api.post("load_weights", optimizer=True, **load)))["model_id"], 0)
        assert len(api.trainers) == 2

    api(use)


@pytest.mark.parametrize("call", ["forward", "optim_step", "save"])
def test_every_call_notices_the_death_of_the_trainer(api, call):
    async def use(api):
        model = await api.create_model(**LORA)
        await api.create_model(1, **LORA)
        await api.forward_backward(model, 1, DATA[0])
        if call == "save":
            await api.optim_step(model, 2)
        api.trainers[0].is_dead = True
        promise = {
            "forward": lambda: api.send_forward_backward(model, 3, DATA[0], forward_only=True),
            "optim_step": lambda: api.post("optim_step", model_id=model, seq_id=3, adam_params={}),
            "save": lambda: api.post("save_weights", model_id=model, path="a", seq_id=3),
        }[call]
        assert "has ended: trainer: the process of rank 0 ended" in (await api.answer(await promise()))["error"]
        assert api.server.trainers.residents == {}

    api(use)


def test_a_dead_trainer_makes_room_for_another_trainer(api):
    async def use(api):
        models = [await api.create_model(seq, **LORA) for seq in range(2)]
        api.trainers[0].is_dead = True
        whole = await api.create_model(2, rank=0)
        assert list(api.server.trainers.residents) == [whole] and len(api.server.trainers.homes) == 1
        for model in models:
            assert f"{model} has ended" in await api.error(await api.send_forward_backward(model, 1, DATA[0]))

    api(use, max_trainers=1)


def test_a_tenant_that_fails_for_good_leaves_the_trainer_to_the_other_runs(api):
    async def use(api):
        models = [await api.create_model(seq, **LORA) for seq in range(2)]
        await step(api, models[1], 0)

        def fail(*_):
            raise RuntimeError("inconsistent")

        broken = api.server.trainers.residents[models[0]].client
        broken._run = broken.discard_gradients = fail
        answer = await api.answer(await api.send_forward_backward(models[0], 1, DATA[0]))
        assert f"the training run {models[0]} has ended: inconsistent; it saved no state" in answer["error"]
        await step(api, models[1], 1)
        assert list(api.trainers[0].tenants) == [models[1]]

    api(use)


def test_a_run_whose_checkpoint_cannot_be_loaded_is_removed_from_its_trainer(api):
    async def use(api):
        model = await api.create_model(**LORA)
        path = (await api.answer(await api.post("save_weights", model_id=model, path="a", seq_id=1)))["path"]
        (file,) = api.folder.glob("runs/*/weights/a/state.pt")
        file.unlink()
        load = {"session_id": api.session, "model_seq_id": 1, "path": path, "optimizer": True}
        assert "error" in await api.answer(await api.post("load_weights", **load))
        assert list(api.trainers[0].tenants) == [model]
        await step(api, model, 1)

    api(use)
