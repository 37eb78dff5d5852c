"""``check_finite_gradients`` on one rank, and features that it excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_net import backward, replicated

from ddp_compile import NonFiniteGradientError, ReplicationError
from ddp_compile.algorithms import Decentralized

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_one_rank_alone_is_checked_though_nothing_is_sent() -> None:
    model = replicated(check_finite_gradients=True)
    backward(model)
    model.zero_grad()
    with pytest.raises(NonFiniteGradientError, match=r"on rank 0 in bucket 0 \(second.bias, second.weight, .*first"):
        (model(torch.randn(4, 6)) * float("inf")).sum().backward()
    model.zero_grad()
    backward(model)


def test_what_is_not_finite_is_let_through_unless_that_is_asked_for() -> None:
    (replicated()(torch.randn(4, 6)) * float("inf")).sum().backward()


def test_an_algorithm_that_reduces_no_gradients_does_not_follow() -> None:
    model: Any = replicated(check_finite_gradients=True)
    with pytest.raises(ReplicationError, match=r"rank 0: check_finite_gradients=True .* the decentralized"):
        model.set_comm_algorithm(Decentralized())
