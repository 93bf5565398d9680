"""Config fields that choose the policy loss and its options, the correction and the aggregation.

The correction accounts for the difference between the generator's and the trainer's probabilities. The aggregation says how the losses of
tokens are combined. rl_actors.losses computes the losses. An example of the flags:

`--loss cispo --loss.ratio-high 4 --correction icepop --aggregation sequence_mean`
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from controllers.environments import own_code
from rl_actors import (
    CISPO,
    DRO,
    GSPO,
    KL,
    PPO,
    IcePop,
    ImportanceSampling,
    Reinforce,
    Sample,
    TruncatedImportanceSampling,
    num_loss_tokens,
)
from rl_actors.losses import Loss, PolicyLoss, resolve
from rl_actors.losses.options import Correction, Level

POLICY_LOSSES: dict[str, type[PolicyLoss]] = {
    "ppo": PPO,
    "cispo": CISPO,
    "gspo": GSPO,
    "importance_sampling": ImportanceSampling,
    "reinforce": Reinforce,
    "dro": DRO,
}
CORRECTIONS: dict[str, type[Correction]] = {"tis": TruncatedImportanceSampling, "icepop": IcePop}
SHARED_OPTIONS = ("kl", "entropy_coefficient", "correction", "sequence_mean")
"""Fields that every policy loss has. LossConfig leaves them out, because other fields of the config set them."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(kw_only=True)
class LossConfig:
    name: Annotated[str, tyro.conf.arg(name="")] = "ppo"
    """ppo, cispo, gspo, importance_sampling, reinforce, dro, or module:name. docs/algorithms.md has the formulas and papers. module:name is a
    subclass of PolicyLoss, or a loss as trainer.forward_backward takes it: a function of logprobs [B, L] and columns, which returns a sum
    and metrics."""
    ratio_low: float | None = None
    """For ppo, cispo and gspo: lower bound of the ratio of a token's current to its old probability. For gspo the ratio is the geometric mean
    over a sample. None: 0.8 for ppo, 0 for cispo, 1 - 3e-4 for gspo."""
    ratio_high: float | None = None
    """For ppo, cispo and gspo: upper bound of the ratio that ratio_low describes. None: 1.28 for ppo, 4 for cispo, 1 + 4e-4 for gspo."""
    dual_clip: float | None = None
    """For ppo and gspo: lower bound of a token's objective if its advantage A is negative. The bound is dual_clip * A. None: no bound."""
    beta: float | None = None
    """For dro: beta / 2 is the weight of the squared difference between a token's current and old logprob. None: beta is 0.05."""

    def build(self, *, kl: KL | None, entropy_bonus: float, correction: Correction | None, sequence_mean: bool) -> Loss:
        """The loss. Raises ValueError if the user has set an option that the loss does not have, or if a value is out of its limits."""
        cls = self._loss()
        if not (isinstance(cls, type) and issubclass(cls, PolicyLoss)):
            shared = {
                "reference_kl in the loss": kl,
                "entropy_bonus": entropy_bonus or None,
                "correction": correction,
                "aggregation=sequence_mean": sequence_mean or None,
            }
            for name, value in shared.items():
                if value is not None:
                    raise ValueError(f"loss={self.name} is no PolicyLoss, so it has no {name}")
            _options("loss", self.name, self, None, ())
            return resolve(cls() if isinstance(cls, type) else cls)
        options = _options("loss", self.name, self, cls, SHARED_OPTIONS)
        return cls(
            kl=kl, entropy_coefficient=entropy_bonus, correction=correction, sequence_mean=sequence_mean, **options
        )

    def _loss(self) -> Callable:
        """The class or function of this name. Raises ValueError for an unknown name."""
        if self.name in POLICY_LOSSES:
            return POLICY_LOSSES[self.name]
        if ":" not in self.name:
            near = difflib.get_close_matches(self.name, POLICY_LOSSES) or list(POLICY_LOSSES)
            raise ValueError(f"loss={self.name!r}; did you mean {', '.join(near)}, or module:name?")
        return own_code.imported("loss", self.name)


@dataclass(kw_only=True)
class CorrectionConfig:
    name: Annotated[Literal["none", "tis", "icepop"] | None, tyro.conf.arg(name="")] = None
    """Correction for the difference between the generator's and the trainer's probability of a token. q is p_trainer / p_generator. tis,
    truncated importance sampling: the objective is multiplied by min(q, cap). icepop: tokens with q outside [low, high] are dropped. none:
    no correction. If no name is given: tis if rollouts.max_staleness is above 0, otherwise no correction."""
    cap: float | None = None
    """For tis: the largest factor. None: 2."""
    low: float | None = None
    """For icepop: the smallest q of a token that is kept. None: 0.5."""
    high: float | None = None
    """For icepop: the largest q of a token that is kept. None: 5."""
    reweights: bool | None = None
    """For icepop. True: the objective of a kept token is multiplied by q. None: False."""
    level: Level | None = None
    """Which q the correction uses. token: each token has its own q. sequence: all tokens of a sample have the geometric mean of q over the
    sample's trained tokens. None: token."""

    def chosen(self, *, is_stale: bool) -> str:
        """The name of the correction. is_stale: True if a step may train on completions that older weights generated."""
        return self.name or ("tis" if is_stale else "none")

    def build(self, *, is_stale: bool) -> Correction | None:
        """The correction, or None if there is none. Raises ValueError if the user has set an option that the correction does not have, or if a
        value is out of its limits."""
        name = self.chosen(is_stale=is_stale)
        cls = CORRECTIONS.get(name)
        options = _options("correction", name, self, cls, ())
        return None if cls is None else cls(**options)


def grad_divisor(aggregation: Aggregation, samples: Sequence[Sample], max_tokens: int) -> float:
    """The number by which the summed gradient of these samples is divided.

    token_mean: the number of trained tokens, so that every token counts the same (DAPO, arXiv 2503.14476).
    sequence_mean: the number of samples. The loss has already divided each sample's sum by the number of the sample's trained tokens (GRPO, arXiv
    2402.03300).
    sequence_sum: the number of samples (RLOO, arXiv 2402.14740).
    constant: the number of samples times max_tokens. This divisor does not depend on the lengths of completions (Dr. GRPO, arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        return num_loss_tokens(samples)
    if aggregation == "constant":
        return len(samples) * max_tokens
    return len(samples)


def _options(
    flag: str, chosen: str, config: LossConfig | CorrectionConfig, cls: type | None, shared: Sequence[str]
) -> dict:
    """The options that the user has set, by name. Raises ValueError if `cls` lacks one of these options. The error lists the options of `cls`.

    flag: "loss" or "correction", for the error. chosen: the name of `cls` on the command line. cls: None for the correction "none".
    shared: fields of `cls` that are not options of this flag.
    """
    known = [] if cls is None else [each.name for each in fields(cls) if each.name not in shared]
    given = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "name"}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ValueError(f"{flag}.{name}={value}: {flag}={chosen} has no such option; {has}")
    return given
