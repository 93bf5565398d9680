"""Tests of which operators each policy of activation_checkpointing recomputes in the backward pass."""

from collections import Counter

import pytest
import torch
from layout_work import MODELS
from references import random_samples
from torch.utils._python_dispatch import TorchDispatchMode

MATRIX_PRODUCT, ACTIVATION = torch.ops.aten.mm.default, torch.ops.aten.silu.default
PRODUCT_OF_EXPERTS = torch.ops.aten._grouped_mm.default


class CountedOperators(TorchDispatchMode):
    """A mode that counts the operators that run while the mode is active.

    An operator whose result the forward pass has stored does not run again in the backward pass, so it is counted only once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator] += 1
        return operator(*args, **(kwargs or {}))


def counts_of(engine) -> Counter:
    """Counts of the operators of one forward and backward pass."""
    with CountedOperators() as counted:
        engine.forward_backward(random_samples([31]), "cross_entropy")
    return counted.counts


def test_each_policy_recomputes_its_share_of_the_five_matrix_products_of_a_block(make_engine):
    counts = {}
    for policy in ("none", "products", "selective", "full"):
        engine = make_engine(activation_checkpointing=policy)
        counts[policy] = counts_of(engine)
    num_blocks = engine.config.model.num_hidden_layers
    again = {}
    for policy, count in counts.items():
        count = count - counts["none"]
        again[policy] = (count[MATRIX_PRODUCT] / num_blocks, count[ACTIVATION] / num_blocks)
    # The five products of a block are wqkv, wo, w1, w3 and w2. The selective policy recomputes every second product.
    assert again == {"none": (0, 0), "products": (0, 1), "selective": (2, 1), "full": (5, 1)}


@pytest.mark.parametrize(("policy", "recomputes"), [("products", False), ("selective", True), ("full", True)])
def test_only_the_policies_selective_and_full_recompute_products_of_experts(make_engine, policy, recomputes):
    model, fields = MODELS["experts"]
    once = counts_of(make_engine("", model=model, **fields))[PRODUCT_OF_EXPERTS]
    again = (
        counts_of(make_engine("", model=model, **fields, activation_checkpointing=policy))[PRODUCT_OF_EXPERTS] - once
    )
    assert once > 0 and (again > 0) == recomputes
