"""Presets of a GRPO config by algorithm: `--algorithm dapo` sets the values of the DAPO paper.

A preset sets loss and ratio bounds, aggregation, advantages, reference KL, dynamic sampling and the
penalty on long completions. Other flags override it.
"""

from collections.abc import Mapping

from controllers.run.config import Algorithm, RunConfig


def _objective(
    *,
    loss: str = "ppo",
    ratio_low: float | None = None,
    ratio_high: float | None = None,
    aggregation: str,
    advantage: str = "grpo",
    reference_kl: float = 0.0,
) -> dict[str, object]:
    """Fields that every preset sets. None removes the ratio bounds that the config had."""
    return {
        "loss.name": loss,
        "loss.ratio_low": ratio_low,
        "loss.ratio_high": ratio_high,
        "aggregation": aggregation,
        "rollouts.advantage": advantage,
        "reference_kl": reference_kl,
        "rollouts.overlong_buffer": 0,
    }


def _grpo(config: RunConfig) -> Mapping[str, object]:
    return _objective(ratio_low=0.8, ratio_high=1.2, aggregation="sequence_mean", reference_kl=0.04) | {
        "reference_kl_in": "loss",
        "reference_kl_estimator": "k3",
        "rollouts.dynamic_sampling_rounds": 0,
    }


def _dapo(config: RunConfig) -> Mapping[str, object]:
    return _objective(ratio_low=0.8, ratio_high=1.28, aggregation="token_mean") | {
        "rollouts.dynamic_sampling_rounds": 3,
        "rollouts.overlong_buffer": config.max_tokens // 5,  # 4,096 of the paper's 20,480
        "rollouts.overlong_penalty": 1.0,
    }


def _dr_grpo(config: RunConfig) -> Mapping[str, object]:
    objective = _objective(ratio_low=0.8, ratio_high=1.2, aggregation="constant", advantage="dr_grpo")
    return objective | {"rollouts.dynamic_sampling_rounds": 0}


def _gspo(config: RunConfig) -> Mapping[str, object]:
    objective = _objective(loss="gspo", ratio_low=1 - 3e-4, ratio_high=1 + 4e-4, aggregation="sequence_mean")
    return objective | {"rollouts.dynamic_sampling_rounds": 0}


def _cispo(config: RunConfig) -> Mapping[str, object]:
    objective = _objective(loss="cispo", ratio_low=0.0, ratio_high=4.0, aggregation="token_mean")
    return objective | {"rollouts.dynamic_sampling_rounds": 3}


def _rloo(config: RunConfig) -> Mapping[str, object]:
    objective = _objective(loss="reinforce", aggregation="sequence_sum", advantage="rloo")
    return objective | {"rollouts.dynamic_sampling_rounds": 0}


ALGORITHMS = {
    "grpo": Algorithm(paper="Shao et al., DeepSeekMath, arXiv 2402.03300", fields=_grpo),
    "dapo": Algorithm(paper="Yu et al., DAPO, arXiv 2503.14476", fields=_dapo),
    "dr_grpo": Algorithm(paper="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783", fields=_dr_grpo),
    "gspo": Algorithm(paper="Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071", fields=_gspo),
    "cispo": Algorithm(paper="MiniMax-M1, arXiv 2506.13585", fields=_cispo),
    "rloo": Algorithm(paper="Ahmadian et al., Back to Basics, arXiv 2402.14740", fields=_rloo),
}
