"""A client of a service, which is a process that owns a trainer and usually a generator.

The arguments are the service's address, the folder of certificates (or ""), and the seed of the samples.

The program prints "attached". Then it reads commands from stdin, and prints one line of JSON for each command:
  open: calls forward_backward but not optim_step, so the step stays open; prints the loss
  steps N RATE: takes N whole steps with the learning rate RATE (default: 0); prints [policy_version, grad_norm] of each step
  forward: prints the policy_version and the sum of the logprobs
  generate: syncs the weights to the generator; prints the tokens and the policy_versions of a completion
"""

import json
import sys

import support

from rl_actors import GeneratorClient, OptimParams, SamplingParams, TrainerClient


def main() -> None:
    address, certificates, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
    trainer = TrainerClient.attach(address, certificates=certificates)
    samples = support.random_samples(seed=seed)

    def whole_step(learning_rate: float) -> list[float]:
        params = OptimParams(learning_rate=learning_rate, grad_divisor=96)
        trainer.forward_backward(samples, loss="cross_entropy").result()
        result = trainer.optim_step(params).result()
        return [result.policy_version, result.grad_norm]

    def answer(command: str, *arguments: str) -> object:
        match command:
            case "open":
                return trainer.forward_backward(samples, loss="cross_entropy").result().metrics["loss:sum"]
            case "steps":
                learning_rate = float(arguments[1]) if arguments[1:] else 0.0
                return [whole_step(learning_rate) for _ in range(int(arguments[0]))]
            case "forward":
                output = trainer.forward(samples).result()
                return [output.policy_version, sum(float(logprobs.sum()) for logprobs in output.logprobs)]
            case "generate":
                generator = GeneratorClient.attach(address, certificates=certificates)
                generator.pull_model_state_dict(trainer.push_model_state_dict().result()).result()
                [[completion]] = generator.generate([[3, 7]], SamplingParams(max_tokens=4, temperature=0.0)).result()
                return [completion.tokens, completion.policy_versions]
        raise ValueError(command)

    print(json.dumps("attached"), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*line.split())), flush=True)


if __name__ == "__main__":
    main()
