"""The loss of a value model.

In shapes, B is the number of rows of the batch, and L is the length of a row. A position is trained if its loss weight is not 0.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rl_actors.metrics import Partials


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The sum of w_i l_i over all positions i, where l_i = (V_i - R_i)^2 / 2. w_i is the loss weight of position i, V_i the value of the
    model, and R_i the return.

    With a clip c, l_i = max((V_i - R_i)^2, (C_i - R_i)^2) / 2, where C_i is V_i limited to [O_i - c, O_i + c]. O_i is the old value: the
    value that the model gave before the first optimizer step on the batch. OpenAI's baselines clip the values in this way.
    The metric value_clip_fraction:mean is the share of the trained positions where (C_i - R_i)^2 is larger than (V_i - R_i)^2.
    Other metrics of this loss are the input of the function explained_variance.
    """

    clip: float | None = None

    output: ClassVar[str] = "values"
    """The loss reads the output of a value model's head."""

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"ValueLoss.clip={self.clip}; it must be finite and above 0, or None")

    def columns(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the required and of the optional arguments of `__call__`, without values_BL."""
        required = {"loss_weights", "returns"} | ({"old_values"} if self.clip is not None else set())
        return frozenset(required), frozenset({"old_values"} - required)

    def __call__(
        self, values_BL: Tensor, *, loss_weights: Tensor, returns: Tensor, old_values: Tensor | None = None
    ) -> tuple[Tensor, Partials]:
        is_trained_BL = loss_weights != 0
        # Returns and old values may be NaN at positions that are not trained. Such a NaN would make the sum NaN, even with a weight of 0.
        # So the model's own values replace returns and old values at these positions.
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
    """1 - Var(R - V) / Var(R) over the trained positions, from the metrics of ValueLoss. NaN if all returns are equal.

    The result is 1 if values and returns differ only by a constant. It is 0 if the values predict the returns no better and no worse
    than a constant does, and negative if they predict the returns worse.
    """
    variance = metrics["return_square:mean"] - metrics["return:mean"] ** 2
    unexplained = metrics["value_error_square:mean"] - metrics["value_error:mean"] ** 2
    return 1 - unexplained / variance if variance > 1e-12 else math.nan
