"""A program for the tests of hosts. It trains two steps on two ranks, moves the weights to a generator, and samples
greedily.

The program has four arguments:
1. the addresses for hosts.connect, separated by commas; "": all actors run on this machine, without hosts
2. a folder for the logs
3. a folder of TLS certificates; "": no TLS
4. the fields of JobConfig as JSON

It prints one line of JSON. "steps" has the loss and the gradient norm of each step. "tokens" has the tokens of the
completion. "above" has one list for each rank: the process ids of all ancestors of the rank's process.
"""

import json
import sys
from pathlib import Path

import psutil
import support

from rl_actors import GeneratorClient, IndexTransport, OptimParams, SamplingParams, TrainerClient
from rl_actors.clients.call import in_background
from rl_actors.processes import hosts
from rl_actors.processes.output import LogRoute


async def opened() -> IndexTransport:
    transport = IndexTransport()
    await transport.open()
    return transport


def main() -> None:
    addresses, folder, certificates = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    job = hosts.JobConfig(**json.loads(sys.argv[4]))
    all_hosts = hosts.connect(addresses.split(","), certificates=certificates, job=job) if addresses else None
    last = None if all_hosts is None else all_hosts.part(len(all_hosts) - 1, len(all_hosts))
    transport, logs = in_background(opened(), "open").result(), LogRoute(directory=folder)
    trainer = TrainerClient.spawn(support.trainer_config(shard=2), transport=transport, logs=logs, hosts=all_hosts)
    generator = GeneratorClient.spawn(support.generator_config(), transport=transport, logs=logs, hosts=last)
    steps = []
    for seed in range(2):
        output = trainer.forward_backward(support.random_samples(seed=seed), loss="cross_entropy").result()
        result = trainer.optim_step(OptimParams(learning_rate=1e-2, grad_divisor=96)).result()
        steps.append([output.metrics["loss:sum"], result.grad_norm])
    generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
    [[completion]] = generator.generate([[3, 7]], SamplingParams(max_tokens=6, temperature=0.0)).result()
    pids = [info.pid for info in trainer.info().result()]
    above = [[parent.pid for parent in psutil.Process(pid).parents()] for pid in pids]
    print(json.dumps({"steps": steps, "tokens": completion.tokens, "above": above}), flush=True)
    generator.close().result()
    trainer.close().result()
    if all_hosts is not None:
        all_hosts.close()


if __name__ == "__main__":
    main()
