"""States of runs that wait on disk: how long they are kept, and how much room they take."""

import time

import pytest

from controllers.tinker_server.store import Session, TrainingRun

DATUM = ([1, 2], {"target_tokens": [2, 3]})
HOUR = 3600.0


async def park_runs(api, count: int) -> list[str]:
    """Train some runs one after the other. All but the last wait on disk. Returns their ids, oldest first."""
    models = []
    for seq in range(count + 1):
        models.append(await api.create_model(seq))
        await api.forward_backward(models[-1], 1, [DATUM])
        await api.optim_step(models[-1], 2)
    assert [run.id for run in api.store.parked_runs()] == models[:-1]
    return models[:-1]


def folders(api) -> int:
    return len(list((api.folder / "parked").iterdir()))


def test_the_state_of_a_run_is_deleted_a_week_after_its_last_request_if_its_client_is_gone(api):
    async def use(api):
        first, second = await park_runs(api, 2)
        now = time.time()
        api.store.update(TrainingRun, first, last_request=now - 8 * 24 * HOUR)
        api.server.sweep(now)
        assert folders(api) == 2  # its session has just sent a request
        api.store.update(Session, api.session, last_seen=now - 8 * 24 * HOUR)
        api.server.sweep(now)
        assert folders(api) == 1 and [run.id for run in api.store.parked_runs()] == [second]
        assert "has ended; it saved no state" in await api.error(await api.send_forward_backward(first, 3, [DATUM]))
        await api.forward_backward(second, 3, [DATUM])

    api(use, max_trainers=1)


def test_above_the_quota_the_oldest_states_go_whose_clients_are_gone(api):
    async def use(api):
        models = await park_runs(api, 4)
        sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (api.folder / "parked").iterdir()]
        api.config.max_parked_bytes = sum(sizes) - 1
        api.server.sweep(time.time())
        assert folders(api) == 4  # the client is there
        api.store.update(Session, api.session, finished="done")
        api.store.update(TrainingRun, models[0], last_request=time.time())  # used last
        api.server.sweep(time.time())
        assert {run.id for run in api.store.parked_runs()} == {models[0], models[2], models[3]} and folders(api) == 3

    api(use, max_trainers=1)


def test_folders_that_no_run_names_are_deleted_at_the_start(api):
    async def use(api):
        models = await park_runs(api, 1)
        (api.folder / "parked" / "half").mkdir()
        api.server.begin()
        assert folders(api) == 1
        await api.forward_backward(models[0], 3, [DATUM])

    api(use, max_trainers=1)


@pytest.mark.parametrize("field", ["keep_parked_hours", "max_parked_bytes"])
def test_a_limit_of_zero_is_refused(api, field):
    async def use(api):
        setattr(api.config, field, 0)
        with pytest.raises(ValueError, match=f"{field}=0; it must be positive"):
            api.config.validate()

    api(use)
