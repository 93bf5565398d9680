"""Rollouts of episodes of several turns; the episodes of a problem form a group."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from controllers.environments import EpisodeEnvironment
from controllers.environments.together import together
from controllers.observe.timeline import Timeline
from controllers.rollouts.episodes import Player, Sampled, TurnSender
from controllers.rollouts.groups import (
    Deliver,
    GenerationError,
    Group,
    Penalty,
    RolloutConfig,
    Rollouts,
    Take,
    consecutive,
)
from rl_actors import Completion, GeneratorClient


class EpisodeRollouts(Rollouts):
    """Plays group_size episodes of every problem at once.

    Seeds depend on the config, the problem, the place in the group and the turn, not on the order
    of finishing.
    """

    def __init__(
        self,
        config: RolloutConfig,
        environment: EpisodeEnvironment,
        generator: GeneratorClient,
        player: Player,
        *,
        seed: int,
        penalty: Penalty | None = None,
        timeline: Timeline | None = None,
        take: Take = consecutive,
    ) -> None:
        super().__init__(
            config,
            environment,
            player.tokenizer,
            generator,
            max_tokens=player.limits.max_tokens_per_turn,
            seed=seed,
            penalty=penalty,
            scorer=player.scorer,
            timeline=timeline,
            take=take,
        )
        self.episodes = environment
        self.player = player

    async def _complete_all(self, indices: Sequence[int], tasks: asyncio.TaskGroup, keep: Deliver) -> None:
        """Play the episodes of these problems, which score themselves without `tasks`."""

        async def play(place: int, index: int) -> None:
            keep(place, await self._play(index, sender))

        params = self.sampling_params(n=1)
        async with TurnSender(self.generator, params, self.generating.call) as sender:
            await together(play(place, index) for place, index in enumerate(indices))

    async def _play(self, index: int, sender: TurnSender) -> Group:
        problem = self.episodes.problem(index)
        size = self.config.group_size
        max_turns = self.player.limits.max_turns
        policies = [_Policy(sender=sender, first_number=(index * size + place) * max_turns) for place in range(size)]
        played = await together(self.player.play(self.episodes, problem, policy) for policy in policies)
        totals = [episode.reward for episode in played]
        lengths = [len(episode.prompt) + len(episode.completion.tokens) for episode in played]
        rewards, overlong = self.penalised(totals, lengths, self.player.limits.max_tokens)
        return Group(
            problem=problem,
            prompt=played[0].prompt,
            prompt_text=self.tokenizer.decode_prompt(played[0].prompt),
            completions=[episode.completion for episode in played],
            texts=[episode.text for episode in played],
            task_rewards=totals,
            rewards=rewards,
            overlong_penalties=overlong,
            num_retries=sum(episode.num_retries for episode in played),
            drop_if_equal=self.config.advantage != "gae",
            episodes=played,
        )


@dataclass(frozen=True, kw_only=True)
class _Policy(Sampled):
    """The generator's errors become GenerationError, which the queue retries."""

    async def __call__(self, tokens: list[int], turn: int) -> Completion:
        try:
            return await super().__call__(tokens, turn)
        except (ValueError, TypeError):
            raise  # refused inputs would be refused again
        except Exception as error:
            raise GenerationError(error) from error
