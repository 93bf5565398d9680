"""Preference pairs as samples, and the loss of direct preference optimization (DPO).

A pair is two samples that follow each other in a list: first the chosen answer, then the rejected answer.
T is the number of positions of one sample, P the number of pairs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from controllers.environments import Problem
from controllers.rollouts.tokenizer import Tokenizer
from rl_actors import Sample
from rl_actors.metrics import Partials


def pair(problem: Problem, rejected_column: str) -> list[Problem]:
    """Two problems: the given problem, and a copy of it with the rejected answer.

    The rejected answer is the entry `rejected_column` of the problem's metadata.
    Raises ValueError, naming the prompt, if the problem has no such entry.
    """
    if rejected_column not in problem.metadata:
        raise ValueError(
            f"the problem with the prompt {problem.prompt[:80]!r} has no {rejected_column!r} in its metadata"
        )
    return [problem, replace(problem, answer=str(problem.metadata[rejected_column]))]


def to_samples(problems: Iterable[Problem], tokenizer: Tokenizer, rejected_column: str) -> list[Sample]:
    """Two samples of every problem: first the chosen answer, then the rejected answer."""
    samples = []
    for problem in problems:
        samples += [tokenizer.to_sample(each) for each in pair(problem, rejected_column)]
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """Direct preference optimization, Rafailov et al., arXiv 2305.18290, eq. 7: the sum over pairs of -log sigmoid(margin).

    log pi is the sum of a completion's logprobs under the policy, and log ref their sum under the reference. The reward
    of a completion is beta * (log pi - log ref). The margin of a pair is the reward of the chosen completion minus the
    reward of the rejected one. The gradient is -beta * sigmoid(-margin) at each logprob of the chosen completion, and
    beta * sigmoid(-margin) at each logprob of the rejected one.

    Samples need the columns loss_weights and ref_logprobs. The loss weight is 1 at each token of a completion, and 0
    elsewhere. With other loss weights, both sums and the gradients are weighted.

    The two samples of a pair may be in different microbatches or on different ranks. So this loss is for
    TrainerClient.forward_backward_custom, which calls the loss with all samples at once.

    Example: one pair, one token in each completion, and beta 0.5. log pi - log ref is 2 for the chosen completion and 0
    for the rejected one. Then the margin is 1, the loss is log(1 + exp(-1)) = 0.3133, and the gradients are -0.1345 and
    0.1345.
    """

    beta: float = 0.1

    def __call__(self, samples: list[Sample], logprobs: list[Tensor]) -> tuple[Tensor, Partials]:
        """(the sum of the loss over the pairs, the metrics). logprobs: [T] for each sample. Raises ValueError for an odd number of samples."""
        if len(samples) % 2:
            raise ValueError(
                f"{len(samples)} samples cannot form pairs; each chosen sample must be followed by its rejected sample"
            )
        rewards = []
        for sample, logprobs_T in zip(samples, logprobs, strict=True):
            ratios_T = logprobs_T - torch.as_tensor(sample.columns["ref_logprobs"])
            rewards.append(self.beta * (ratios_T * torch.as_tensor(sample.columns["loss_weights"])).sum())
        chosen_P = torch.stack(rewards[::2])
        rejected_P = torch.stack(rewards[1::2])
        margins_P = chosen_P - rejected_P
        num_pairs = float(len(margins_P))
        metrics: Partials = {
            "dpo/accuracy:mean": (float((margins_P > 0).sum()), num_pairs),
            "dpo/margin:mean": (float(margins_P.detach().sum()), num_pairs),
            "dpo/reward_chosen:mean": (float(chosen_P.detach().sum()), num_pairs),
            "dpo/reward_rejected:mean": (float(rejected_P.detach().sum()), num_pairs),
        }
        return -logsigmoid(margins_P).sum(), metrics
