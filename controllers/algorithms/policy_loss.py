"""Config fields of the policy loss, the correction for off-policy tokens, and the aggregation.

`--loss cispo --loss.ratio-high 4 --correction icepop --aggregation sequence_mean`
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from controllers.environments import own_code
from rl_actors import KL, IcePop, Sample, TruncatedImportanceSampling, num_loss_tokens
from rl_actors.losses import LOSSES, Loss, PolicyLoss, resolve
from rl_actors.losses.options import Correction, Level

POLICY_LOSSES: dict[str, type[PolicyLoss]] = {
    name: loss for name, loss in LOSSES.items() if issubclass(loss, PolicyLoss)
}
CORRECTIONS: dict[str, type[Correction]] = {"tis": TruncatedImportanceSampling, "icepop": IcePop}
SHARED_OPTIONS = ("kl", "entropy_coefficient", "correction", "sequence_mean")
"""Fields of every policy loss that other fields of the config set."""
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


@dataclass(kw_only=True)
class LossConfig:
    name: Annotated[str, tyro.conf.arg(name="")] = "ppo"
    """ppo, cispo, gspo, importance_sampling, reinforce, dro (docs/algorithms.md), or module:name: a
    subclass of PolicyLoss, or a function of logprobs [B, L] and columns -> a sum and metrics."""
    ratio_low: float | None = None
    """For ppo, cispo, gspo: lower bound of p_current / p_old. None: 0.8, 0, 1 - 3e-4."""
    ratio_high: float | None = None
    """For ppo, cispo, gspo: upper bound of that ratio. None: 1.28, 4, 1 + 4e-4."""
    dual_clip: float | None = None
    """For ppo, gspo: a token with an advantage A < 0 has at least dual_clip * A. None: no bound."""
    beta: float | None = None
    """For dro: beta / 2 weights the squared difference of current and old logprob. None: 0.05."""

    def build(self, *, kl: KL | None, entropy_bonus: float, correction: Correction | None, sequence_mean: bool) -> Loss:
        """Raises ValueError for an option that the loss does not have, or out of its limits."""
        cls = self._loss()
        if not (isinstance(cls, type) and issubclass(cls, PolicyLoss)):
            shared = {
                "reference_kl in the loss": kl,
                "entropy_bonus": entropy_bonus,
                "correction": correction,
                "aggregation=sequence_mean": sequence_mean,
            }
            if given := next((name for name, value in shared.items() if value), ""):
                raise ValueError(f"loss={self.name} is no PolicyLoss, so it has no {given}")
            _options("loss", self.name, self, None)
            return resolve(cls() if isinstance(cls, type) else cls)
        options = _options("loss", self.name, self, cls)
        return cls(
            kl=kl, entropy_coefficient=entropy_bonus, correction=correction, sequence_mean=sequence_mean, **options
        )

    def _loss(self) -> Callable:
        """The class or function. Raises ValueError for an unknown name."""
        if self.name in POLICY_LOSSES:
            return POLICY_LOSSES[self.name]
        if ":" not in self.name:
            near = difflib.get_close_matches(self.name, POLICY_LOSSES) or list(POLICY_LOSSES)
            raise ValueError(f"loss={self.name!r}; did you mean {', '.join(near)}, or module:name?")
        return own_code.imported("loss", self.name)


@dataclass(kw_only=True)
class CorrectionConfig:
    name: Annotated[Literal["none", "tis", "icepop"] | None, tyro.conf.arg(name="")] = None
    """By q = p_trainer / p_generator: tis multiplies the objective by min(q, cap), icepop drops
    tokens with q outside [low, high]. None: tis if rollouts.max_staleness is above 0, or with
    generator.quantization."""
    cap: float | None = None
    """For tis: the largest factor. None: 2."""
    low: float | None = None
    """For icepop: smallest kept q. None: 0.5."""
    high: float | None = None
    """For icepop: largest kept q. None: 5."""
    reweights: bool | None = None
    """For icepop: multiply the objective of kept tokens by q. None: False."""
    level: Level | None = None
    """sequence: q is the geometric mean over the sample's trained tokens. None: token."""

    def chosen(self, *, is_off_policy: bool) -> str:
        """is_off_policy: a step may train on completions of older or of quantized weights."""
        return self.name or ("tis" if is_off_policy else "none")

    def build(self, *, is_off_policy: bool) -> Correction | None:
        """Raises ValueError for an option that the correction lacks, or out of its limits."""
        name = self.chosen(is_off_policy=is_off_policy)
        cls = CORRECTIONS.get(name)
        options = _options("correction", name, self, cls)
        return None if cls is None else cls(**options)


def grad_divisor(aggregation: Aggregation, samples: Sequence[Sample], max_tokens: int) -> float:
    """What the summed gradient of these samples is divided by.

    token_mean: trained tokens (DAPO, arXiv 2503.14476).
    sequence_mean: samples, each already divided by its trained tokens (GRPO, arXiv 2402.03300).
    sequence_sum: samples (RLOO, arXiv 2402.14740).
    constant: samples * max_tokens (Dr. GRPO, arXiv 2503.20783).
    """
    if aggregation == "token_mean":
        return num_loss_tokens(samples)
    if aggregation == "constant":
        return len(samples) * max_tokens
    return len(samples)


def _options(flag: str, chosen: str, config: LossConfig | CorrectionConfig, cls: type | None) -> dict:
    """The options that the user has set. Raises ValueError for one that `cls` (None: "none") lacks.

    flag, chosen: for the error.
    """
    names = [] if cls is None else [option.name for option in fields(cls) if option.name not in SHARED_OPTIONS]
    given = {}
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name == "name" or value is None:
            continue
        if option.name not in names:
            has = f"its options are {', '.join(names)}" if names else "it has no options"
            raise ValueError(f"{flag}.{option.name}={value}: {flag}={chosen} has no such option; {has}")
        given[option.name] = value
    return given
