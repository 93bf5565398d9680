"""A Monarch program that takes GRPO steps. It spawns a trainer, a generator, and an actor of its own, the Judge.

The judge gets completions as lists of token ids. The score of a completion is the share of even ids. A model with random weights scores about 0.5.

python examples/judge_actor.py [STEPS]
"""

import asyncio
import statistics
import sys

from monarch.actor import Actor, ProcMesh, endpoint, shutdown_context, this_host
from monarch.spmd import setup_torch_elastic_env_async

import rl_actors as rl

GROUP_SIZE = 8
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14, 15, 16]]


class Judge(Actor):
    """Scores completions in a process of its own. Such an actor could also hold a reward model."""

    @endpoint
    async def score(self, completions: list[list[int]]) -> list[float]:
        return [statistics.fmean(token % 2 == 0 for token in tokens) for tokens in completions]


async def sample(generator: rl.GeneratorClient, judge: Judge, seed: int) -> tuple[list[rl.Sample], float]:
    """Generate a group of completions for each prompt.

    The judge scores a group while other groups are generated. Returns a Sample with advantages for each completion, and
    the mean reward.
    """
    params = rl.SamplingParams(n=GROUP_SIZE, max_tokens=8, seed=seed)
    samples, rewards = [], []
    async for index, group in generator.generate_each(PROMPTS, params):
        scores = await judge.score.call_one([completion.tokens for completion in group])
        mean, deviation = statistics.fmean(scores), statistics.pstdev(scores)
        for completion, score in zip(group, scores, strict=True):
            advantage = (score - mean) / (deviation + 1e-6)
            samples.append(
                rl.Sample.from_tokens(
                    PROMPTS[index], completion.tokens, old_logprobs=completion.logprobs, advantages=advantage
                )
            )
        rewards += scores
    return samples, statistics.fmean(rewards)


async def train(procs: list[ProcMesh], transport: rl.TorchStoreTransport, num_steps: int) -> None:
    model = rl.ModelConfig(vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32)
    judge = procs[0].spawn("judge", Judge)
    await setup_torch_elastic_env_async(procs[1])  # sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    trainer = rl.TrainerClient(procs[1].spawn("trainer", rl.PolicyTrainer, rl.TrainerConfig(model=model), transport))
    config = rl.GeneratorConfig(model=model, max_model_len=256)
    generator = rl.GeneratorClient(procs[2].spawn("generator", rl.Generator, config, transport))
    for step in range(num_steps):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        samples, reward = await sample(generator, judge, seed=step)
        await trainer.forward_backward(samples, loss=rl.PPO())
        result = await trainer.optim_step(rl.OptimParams(learning_rate=3e-3, grad_divisor=rl.num_loss_tokens(samples)))
        print(f"step {step + 1}: reward {reward:.3f}, policy_version {result.policy_version}", flush=True)


async def main(num_steps: int) -> None:
    transport = rl.TorchStoreTransport()  # this program must open and close the transport
    await transport.open()
    procs = [this_host().spawn_procs(per_host={"gpus": 1}) for _ in range(3)]
    try:
        await train(procs, transport, num_steps)
    finally:
        await asyncio.gather(*(mesh.stop() for mesh in procs))
        await transport.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
    # At exit Monarch would wait only one second for its shutdown, which is too short on a busy machine.
    shutdown_context().get(timeout=15)
