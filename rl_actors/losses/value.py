"""The loss of a value model.

B rows, L row length. A position is trained if its loss weight is not 0.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """sum_i w_i (V_i - R_i)^2 / 2, with loss weight w, value V and return R.

    With a clip c: w_i max((V_i - R_i)^2, (C_i - R_i)^2) / 2, where C_i is V_i limited to [O_i - c,
    O_i + c] around the old value O_i, as in OpenAI's baselines. value_clip_fraction:mean is the
    share of trained positions where the clipped term is larger.
    """

    clip: float | None = None

    output: ClassVar[str] = "values"

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"ValueLoss.clip={self.clip}; it must be finite and above 0, or None")

    def columns(self) -> tuple[frozenset[str], frozenset[str]]:
        """(required, optional) columns."""
        required = {"loss_weights", "returns"} | ({"old_values"} if self.clip is not None else set())
        return frozenset(required), frozenset({"old_values"} - required)

    def __call__(
        self, values_BL: Tensor, *, loss_weights: Tensor, returns: Tensor, old_values: Tensor | None = None
    ) -> tuple[Tensor, Partials]:
        is_trained_BL = loss_weights != 0
        # NaN at untrained positions would survive a weight of 0
        returns_BL = torch.where(is_trained_BL, returns, values_BL.detach())
        error_BL = (values_BL - returns_BL).square()
        was_clipped_BL = torch.zeros_like(is_trained_BL)
        if self.clip is not None and old_values is not None:
            old_BL = torch.where(is_trained_BL, old_values, values_BL.detach())
            is_outside_BL = (values_BL - old_BL).abs() > self.clip
            limited_BL = old_BL + (values_BL - old_BL).clamp(-self.clip, self.clip)
            limited_error_BL = torch.where(is_outside_BL, (limited_BL - returns_BL).square(), error_BL)
            was_clipped_BL = is_trained_BL & (limited_error_BL > error_BL)
            error_BL = torch.maximum(error_BL, limited_error_BL)
        loss = (loss_weights * error_BL).sum() / 2
        count = is_trained_BL.sum()
        found_BL = values_BL.detach()
        residual_BL = returns_BL - found_BL

        def mean(numbers_BL: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(is_trained_BL, numbers_BL, 0.0).sum(), count

        return loss, {
            "loss:sum": loss.detach(),
            "num_loss_tokens:sum": count,
            "value:mean": mean(found_BL),
            "return:mean": mean(returns_BL),
            "return_square:mean": mean(returns_BL.square()),
            "value_error:mean": mean(residual_BL),
            "value_error_square:mean": mean(residual_BL.square()),
            "value_clip_fraction:mean": mean(was_clipped_BL.float()),
        }


def explained_variance(metrics: dict[str, float]) -> float:
    """1 - Var(R - V) / Var(R), from the metrics of ValueLoss. NaN if all returns are equal."""
    variance = metrics["return_square:mean"] - metrics["return:mean"] ** 2
    unexplained = metrics["value_error_square:mean"] - metrics["value_error:mean"] ** 2
    return 1 - unexplained / variance if variance > 1e-12 else math.nan
