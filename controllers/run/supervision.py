"""What keeps an open run going, and what ends it: actors, restarts, checkpoints, signals, the gate."""

from collections.abc import Callable
from dataclasses import dataclass, field

from controllers.observe.run_folder import RunFolder
from controllers.run.actors import Actors
from controllers.run.checkpoints import Checkpoints, State
from controllers.run.gate import Gate
from controllers.run.interruption import Interruption
from controllers.run.slow_rank import SlowRank
from controllers.run.survival import Recoveries, ReplayBuffer
from rl_actors import ReferenceClient, TrainerClient, ValueTrainerClient
from rl_actors.types import Transfer


def _no_actor() -> "ReferenceClient | ValueTrainerClient":
    raise RuntimeError("this run has no other actors than its trainer and its generator")


@dataclass(kw_only=True)
class Supervision:
    """One object for the whole run. A recovery makes a new Run, which gets the same Supervision."""

    folder: RunFolder
    checkpoints: Checkpoints
    actors: Actors | None = None  # None: the death of an actor ends the run
    spawn_reference: Callable[[], ReferenceClient] = _no_actor  # type: ignore[assignment]
    spawn_critic: Callable[[], ValueTrainerClient] = _no_actor  # type: ignore[assignment]
    interruption: Interruption = field(default_factory=Interruption)
    gate: Gate | None = None
    replay_buffer: ReplayBuffer = field(default_factory=ReplayBuffer)
    recoveries: Recoveries = field(default_factory=Recoveries)
    slow_rank: SlowRank = field(default_factory=SlowRank)
    # Other trainers whose state belongs to a checkpoint, by the name of their folder in it.
    partners: dict[str, TrainerClient] = field(default_factory=dict)
    # The loop's state after the newest finished step. Empty before the first step, and after a death
    # until the next step has ended.
    last_state: State = field(default_factory=dict)
    saved_step: int = 0  # of the last checkpoint
    transfers: tuple[Transfer | None, Transfer | None] = (None, None)  # newest push and pull on record
