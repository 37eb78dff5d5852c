"""The verdicts on torch's own tests with ddp_compile; run.py runs the tests themselves."""

import ast

import pytest
from peer_suites.torch_suites import for_cpu, reaches_ddp
from peer_suites.verdict import COMPILED, FAILED, PASSED, REFUSED, Listed, judge

CREATE_GRAPH = Listed(REFUSED, "create_graph=True", "the mean does not lead back")
ZEROS = Listed(COMPILED, "zeros, not None", "AOTAutograd computes them")

TEST_CLASS = """
class Tests:
    def helper(self):
        net = torch.nn.parallel.DistributedDataParallel(self.model().cuda(self.rank), device_ids=[self.rank])

    def test_by_helper(self):
        self.helper()

    def test_of_something_else(self):
        self.model()
"""

FOR_GPUS = """
@skip_if_lt_x_gpu(2)
@require_world_size(2)
def test():
    torch.cuda.set_device(rank)
    x = torch.ones(2, device=rank).cuda(rank).to(torch.float64)
    net = nn.parallel.DistributedDataParallel(model.to(rank))
"""

FOR_CPUS = """
@require_world_size(2)
def test():
    _no_cuda.set_device(rank)
    x = torch.ones(2, device=_on_cpu(rank)).cpu().to(_on_cpu(torch.float64))
    net = DistributedDataParallel(model.to(_on_cpu(rank)))
"""


@pytest.mark.parametrize(
    ("passed", "error", "listed", "eagerly", "row"),
    [
        (True, "", None, True, PASSED),
        (False, "AssertionError: 1 != 2", None, True, FAILED),
        (False, "RuntimeError: backward(create_graph=True) is refused", CREATE_GRAPH, False, REFUSED),
        (True, "", CREATE_GRAPH, True, FAILED),
        (False, "AssertionError: 1 != 2", CREATE_GRAPH, True, FAILED),
        (False, "AssertionError: zeros, not None", ZEROS, True, COMPILED),
        (False, "AssertionError: zeros, not None", ZEROS, False, FAILED),
    ],
)
def test_a_listed_test_has_to_fail_as_it_says(
    passed: bool, error: str, listed: Listed | None, eagerly: bool, row: str
) -> None:
    assert judge(passed, error, listed, lambda: eagerly)[0] == row


def test_tests_are_found_by_their_helpers() -> None:
    assert reaches_ddp(TEST_CLASS, "Tests") == ["test_by_helper"]


def test_every_device_becomes_the_cpu() -> None:
    assert ast.unparse(for_cpu(FOR_GPUS)) == FOR_CPUS.strip()
