"""Recovers a run inside its process: after a death it goes on from the newest complete checkpoint.

The dead actor is replaced, random states, trainer and loop state are loaded, and the training
function is called again; it repeats later steps with the same rollouts, as far as they are kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from controllers.run import checkpoints
from controllers.run.actors import Actors, Death
from controllers.run.interruption import Interrupted
from controllers.run.run import Run, make_colocation
from rl_actors import TrainerClient

Train = Callable[[Run[Any]], Awaitable[None]]


async def train_to_end(run: Run[Any], train: Train) -> None:
    """Train to the last step, wait until the last checkpoint is on disk, and recover from deaths.

    After a signal, writes a checkpoint of the last finished step and raises Interrupted. After too
    many deaths in an hour, raises the error of the first. With `--hosts`, raises StartAgainError.
    """
    actors = run.supervision.actors
    if actors is None:
        await _train(run, train)
        return
    work = _train(run, train)
    while True:
        try:
            await actors.until_death(work)
        except Death as death:
            await _kill_and_pause(run, actors, death.error)
            work = _go_on(run, actors, train)
        else:
            return


async def _train(run: Run[Any], train: Train) -> None:
    checkpoints = run.supervision.checkpoints
    try:
        await train(run)
    except Interrupted:
        last_state = run.supervision.last_state
        if run.config.checkpoint_every and last_state:
            with run.log.setup(f"writing checkpoint step-{last_state['step']}"):
                await run.save()
                await checkpoints.finish()
        raise
    await checkpoints.finish()


async def _kill_and_pause(run: Run[Any], actors: Actors, death: Exception) -> None:
    pause = actors.restarts.pause_after(death)
    run.supervision.recoveries.begin(run.log.folder.add_restart, death=death, step=run.log.last_step)
    limit = run.config.survival.max_restarts_per_hour
    run.log.note(f"{death}; restart {actors.restarts.total} (at most {limit} an hour) in {pause:g} s")
    run.supervision.last_state = {}  # so that a signal during the recovery does not write a checkpoint
    await actors.kill_for_restart()
    await asyncio.sleep(pause)


async def _go_on(run: Run[Any], actors: Actors, train: Train) -> None:
    """Replace the dead actors, and train from the newest complete checkpoint."""
    supervision = run.supervision
    await supervision.checkpoints.abandon()
    supervision.interruption.raise_if_asked()
    checkpoints.remove_incomplete(run.folder.checkpoints)
    for line in await asyncio.to_thread(checkpoints.set_aside_damaged, run.folder.checkpoints):
        run.log.note(line)
    newest = checkpoints.newest(run.folder.checkpoints)
    state = checkpoints.read(newest) if newest else {}
    if newest is None:
        await actors.kill_for_restart({"trainer", "critic"})  # a new trainer starts with the initial weights
    elif not (newest / checkpoints.CRITIC_FOLDER).is_dir():
        await actors.kill_for_restart({"critic"})  # the checkpoint has no critic, so training starts with a new critic
    trainer, generator = await actors.start(run.log.setup)
    colocation = make_colocation(run.config, trainer, generator, run.timer)
    supervision.partners.clear()
    for role in actors.clients.keys() & {"trainer", "critic"}:
        await cast(TrainerClient, actors.clients[role]).discard_gradients()
    if newest is None:
        checkpoints.seed_random(run.config.seed)
    else:
        checkpoints.restore_random_states(state["random"])
        with run.log.setup(f"going on from {newest}"):
            await trainer.load_checkpoint(str(newest / "trainer"))
    supervision.saved_step = state.get("step", 0)
    run.log.rewind(supervision.saved_step)
    run.timer.reset()
    supervision.interruption.raise_if_asked()
    await _train(replace(run, trainer=trainer, generator=generator, colocation=colocation, state=state), train)
