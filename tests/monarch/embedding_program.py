import asyncio

from monarch.actor import Actor, endpoint, this_host
from monarch.spmd import setup_torch_elastic_env_async

import rl_actors as rl


class Judge(Actor):
    @endpoint
    async def score(self, completions: list[list[int]]) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completions]


async def main() -> None:
    model = rl.ModelConfig(vocab_size=48, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32)
    config = rl.GeneratorConfig(model=model, max_model_len=256)
    transport = rl.TorchStoreTransport()  # opening it calls torchstore's initialize; you open it, you close it
    await transport.open()
    procs = [this_host().spawn_procs(per_host={"gpus": 1}) for _ in range(3)]
    judge = procs[2].spawn("judge", Judge)
    await setup_torch_elastic_env_async(procs[0])  # RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of the trainer's ranks
    trainer_mesh = procs[0].spawn("trainer", rl.PolicyTrainer, rl.TrainerConfig(model=model), transport)
    trainer = rl.TrainerClient(trainer_mesh)
    generator = rl.GeneratorClient(procs[1].spawn("generator", rl.Generator, config, transport), config=config)
    prompt = [5, 6, 7]
    for _ in range(2):
        await generator.pull_model_state_dict(await trainer.push_model_state_dict())
        [group] = await generator.generate([prompt], rl.SamplingParams(n=4, max_tokens=8))
        rewards = await judge.score.call_one([completion.tokens for completion in group])
        pairs = zip(group, [reward - sum(rewards) / 4 for reward in rewards], strict=True)
        samples = [rl.Sample.from_tokens(prompt, c.tokens, old_logprobs=c.logprobs, advantages=a) for c, a in pairs]
        output = await trainer.forward_backward(samples, loss=rl.PPO())
        await trainer.optim_step(rl.OptimParams(learning_rate=1e-3, grad_divisor=rl.num_loss_tokens(samples)))
        print(f"version {output.policy_version}: logprob_diff/max {output.metrics['logprob_diff:max']:.1e}")
    await asyncio.gather(*(mesh.stop() for mesh in procs))
    await transport.close()


asyncio.run(main())
