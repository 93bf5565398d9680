"""Preference pairs as samples, each chosen one before its rejected one, and the loss of DPO.

T positions of a sample, P pairs.
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
    """The problem, and a copy with the answer metadata[rejected_column]. Raises ValueError without."""
    if rejected_column not in problem.metadata:
        raise ValueError(
            f"the problem with the prompt {problem.prompt[:80]!r} has no {rejected_column!r} in its metadata"
        )
    return [problem, replace(problem, answer=str(problem.metadata[rejected_column]))]


def to_samples(problems: Iterable[Problem], tokenizer: Tokenizer, rejected_column: str) -> list[Sample]:
    return [tokenizer.to_sample(answered) for problem in problems for answered in pair(problem, rejected_column)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    """DPO (Rafailov et al., arXiv 2305.18290, eq. 7): the sum over pairs of -log sigmoid(margin).

    The reward of a completion is beta * sum(logprobs - ref_logprobs), weighted by loss_weights (1
    at its tokens, else 0); the margin is the chosen reward minus the rejected. The gradient at each
    logprob is -beta * sigmoid(-margin) for the chosen completion, + for the rejected.
    Columns: loss_weights, ref_logprobs. For forward_backward_custom, which sees whole pairs.
    """

    beta: float = 0.1

    def __call__(self, samples: list[Sample], logprobs: list[Tensor]) -> tuple[Tensor, Partials]:
        """(sum, metrics) over pairs. logprobs: [T] by sample. Raises ValueError if odd in number."""
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
