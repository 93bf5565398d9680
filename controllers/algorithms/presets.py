"""Presets of a GRPO config: `--algorithm dapo` sets the DAPO paper's values, before other flags."""

from controllers.run.config import Algorithm

# what every preset sets; None removes the ratio bounds that the config had
BASE: dict[str, object] = {
    "loss.name": "ppo",
    "loss.ratio_low": None,
    "loss.ratio_high": None,
    "aggregation": "sequence_mean",
    "rollouts.advantage": "grpo",
    "reference_kl": 0.0,
    "rollouts.overlong_buffer": 0,
    "rollouts.dynamic_sampling_rounds": 0,
}

ALGORITHMS = {
    "grpo": Algorithm(
        paper="Shao et al., DeepSeekMath, arXiv 2402.03300",
        fields=BASE
        | {"loss.ratio_low": 0.8, "loss.ratio_high": 1.2}
        | {"reference_kl": 0.04, "reference_kl_in": "loss", "reference_kl_estimator": "k3"},
    ),
    "dapo": Algorithm(
        paper="Yu et al., DAPO, arXiv 2503.14476",
        fields=BASE
        | {"loss.ratio_low": 0.8, "loss.ratio_high": 1.28, "aggregation": "token_mean"}
        | {"rollouts.dynamic_sampling_rounds": 3, "rollouts.overlong_penalty": 1.0},
        overlong_part=5,  # 4,096 of the paper's 20,480 tokens
    ),
    "dr_grpo": Algorithm(
        paper="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783",
        fields=BASE
        | {"loss.ratio_low": 0.8, "loss.ratio_high": 1.2}
        | {"aggregation": "constant", "rollouts.advantage": "dr_grpo"},
    ),
    "gspo": Algorithm(
        paper="Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071",
        fields=BASE | {"loss.name": "gspo", "loss.ratio_low": 1 - 3e-4, "loss.ratio_high": 1 + 4e-4},
    ),
    "cispo": Algorithm(
        paper="MiniMax-M1, arXiv 2506.13585",
        fields=BASE
        | {"loss.name": "cispo", "loss.ratio_low": 0.0, "loss.ratio_high": 4.0}
        | {"aggregation": "token_mean", "rollouts.dynamic_sampling_rounds": 3},
    ),
    "rloo": Algorithm(
        paper="Ahmadian et al., Back to Basics, arXiv 2402.14740",
        fields=BASE | {"loss.name": "reinforce", "aggregation": "sequence_sum", "rollouts.advantage": "rloo"},
    ),
}
