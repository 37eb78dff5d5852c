"""Tensors on a CUDA device for the tests of the kernels, and expected results, computed in float64."""

import functools

import kernel_values
import pytest
import torch
from kernel_values import FINITE
from torch import Tensor

POISON = 77.0
NON_FINITE = [float("inf"), -float("inf"), float("nan")]

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

values_of = functools.partial(kernel_values.values_of, special=FINITE, exponents=(-6, 4), device="cuda")


def rounded_product(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The product with ``scale`` as float32, rounded to float32 and then to ``dtype``: in float64 it is exact."""
    return (values.double() * torch.tensor(scale, dtype=torch.float32).double().item()).float().to(dtype)
