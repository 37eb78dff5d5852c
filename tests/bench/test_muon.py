"""The benchmark with Muon: which parameters it steps, and the ways to distribute it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from test_simulated_link import FAST, simulated_group
from torch import Tensor, nn

from ddp_compile.bench.implementations import implementation_named
from ddp_compile.bench.muon_owners import MuonOwners, let_owners_step
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import Float32NewtonSchulz, Training, make_optimizers
from ddp_compile.bench.workloads import make_workload

TINY = {"depth": 2, "width": 64, "batch_size": 1}


def test_muon_steps_hidden_matrices_and_adamw_the_rest() -> None:
    model = make_workload(WorkloadSettings(model="gpt-small", **TINY)).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw, muon = make_optimizers("muon", model)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    mine, others = ({names[id(p)] for group in each.param_groups for p in group["params"]} for each in (muon, adamw))
    of_block = ("qkv", "projection", "mlp.0", "mlp.2")
    assert mine == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in of_block}
    assert mine | others == set(names.values()) and not mine & others


def test_models_without_others_or_without_matrices() -> None:
    (muon,) = make_optimizers("muon", nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert isinstance(muon, torch.optim.Muon)
    with pytest.raises(ValueError, match="optimizer='muon' steps the weights of linear layers, and the model has none"):
        make_optimizers("muon", make_workload(WorkloadSettings(model="cnn")).model)
    with pytest.raises(ValueError, match="muon-owners has nothing to distribute without Muon"):
        let_owners_step([torch.optim.SGD(nn.Linear(2, 2).parameters())])


def orthogonalised(matrix: Tensor, group: dict) -> Tensor:
    a, b, c = group["ns_coefficients"]
    x = matrix / matrix.norm()
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("enters", [True, False])
def test_newton_schulz_iterates_in_float32_if_asked(enters: bool) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.randn(8, 8)
    muon = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    gradient = parameter.grad.clone()
    if enters:
        with Float32NewtonSchulz():
            muon.step()
    else:
        muon.step()
    error = (parameter.detach() + orthogonalised(gradient, muon.param_groups[0])).abs().max().item()
    assert torch.equal(parameter.grad, gradient)
    assert error < 1e-5 if enters else 1e-3 < error < 0.1


@on_ranks(3)
def test_owners_step_as_all_ranks_would() -> None:
    torch.manual_seed(0)
    sizes = [(5, 7), (9, 4), (3, 3), (8, 8)]
    model = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])
    reference = copy.deepcopy(model)
    (owned,) = let_owners_step([torch.optim.Muon(model, lr=0.1)])
    replicated = torch.optim.Muon(reference, lr=0.1)
    for _ in range(3):
        for mine, theirs in zip(model, reference, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        owned.step()
        replicated.step()
        for mine, theirs in zip(model, reference, strict=True):
            assert torch.equal(mine, theirs)
        owned.zero_grad()
        assert all(mine.grad is None for mine in model)
    assert isinstance(owned, MuonOwners)
    stepped = [muon for muon, _ in owned._turns if muon is not None and muon.state]
    assert len(stepped) == (2 if dist.get_rank() == 0 else 1)  # four matrices: two turns


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize("name", ["ddp_compile-sharded", "muon-owners"])
def test_on_a_simulated_link_only_this_ranks_part_is_trained(name: str) -> None:
    settings = WorkloadSettings(model="gpt-small", optimizer="muon-float32", **TINY)
    workload = make_workload(settings)
    before = {name: parameter.detach().clone() for name, parameter in workload.model.named_parameters()}
    with simulated_group(FAST):
        built = implementation_named(name)(workload.model, Case(implementation=name))
        training = Training(built, workload.model, workload, settings, 0, 1)
        for _ in range(3):
            training.step()
        changed = {name for name, p in workload.model.named_parameters() if not torch.equal(p, before[name])}
        assert all(parameter.isfinite().all() for parameter in workload.model.parameters())
    matrices = {name for name in before if name.startswith("blocks") and before[name].dim() == 2}
    # Eight matrices on four ranks.
    assert len(changed & matrices) == 2 and training.loss is not None and training.loss.isfinite()
