"""Settings: capacities in MiB become bytes; arguments of DistributedDataParallel are taken or refused by name."""

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.config import DDP_ARGUMENTS_REPLACED, caps_from_mib, refuse_unknown_arguments

MIB = 2**20


@pytest.mark.parametrize(
    ("bucket_cap_mb", "first_bucket_cap_mb", "expected"),
    [
        (25, 1, (MIB, 25 * MIB)),
        (25.0, 1.0, (MIB, 25 * MIB)),
        (1.5, 1, (MIB, 3 * MIB // 2)),
        (0.5, 1, (MIB // 2, MIB // 2)),
        (2, 1000, (2 * MIB, 2 * MIB)),
        (1e-5, 1, (10, 10)),
        (1e-12, 1, (1, 1)),
        ([1, 25], 7, (MIB, 25 * MIB)),
        ((0.25,), 7, (MIB // 4,)),
    ],
)
def test_capacities(bucket_cap_mb: float, first_bucket_cap_mb: float, expected: tuple) -> None:
    assert caps_from_mib(bucket_cap_mb, first_bucket_cap_mb, "cpu") == expected


@pytest.mark.parametrize("value", [0, -1, 0.0, float("inf"), float("nan"), "automatic", "25", True, 1j])
def test_capacity_is_not_positive(value: object) -> None:
    with pytest.raises(ValueError) as error:
        caps_from_mib(value, 1.0, "cpu")  # type: ignore[arg-type]
    assert str(error.value) == (
        f"bucket_cap_mb={value!r} must be a positive and finite number of MiB; pass for example bucket_cap_mb=25"
    )


@pytest.mark.parametrize("name", DDP_ARGUMENTS_REPLACED)
def test_arguments_of_ddp_that_are_off(name: str) -> None:
    refuse_unknown_arguments({name: None})
    if name != "forward_sync_buffers":
        refuse_unknown_arguments({name: False})


def test_no_process_group() -> None:
    with pytest.raises(
        RuntimeError, match=r"init_process_group\(\).*torchrun --standalone --nproc-per-node"
    ) as refused:
        ddp_compile(nn.Linear(3, 3))
    assert isinstance(refused.value, ValueError)
    with pytest.raises(ValueError):
        DistributedDataParallel(nn.Linear(3, 3))
