"""The benchmark with Muon: which parameters it steps, in which precision, and sharded."""

import pytest
import torch
from simulated_groups import FAST, simulated_group
from torch import nn

from ddp_compile.bench.implementations import implementation_named
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import Training, make_optimizers
from ddp_compile.bench.workloads import make_workload

SETTINGS = WorkloadSettings(model="gpt-small", optimizer="muon", depth=2, width=64, batch_size=1)
MATRICES = {f"blocks.{block}.{name}.weight" for block in (0, 1) for name in ("qkv", "projection", "mlp.0", "mlp.2")}


def test_muon_steps_hidden_matrices_and_adamw_the_rest() -> None:
    model = make_workload(SETTINGS).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    adamw, muon = make_optimizers("muon", model)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    mine, others = ({names[id(p)] for group in each.param_groups for p in group["params"]} for each in (muon, adamw))
    assert mine == MATRICES and others == set(names.values()) - MATRICES


def test_models_without_others_or_without_matrices() -> None:
    (muon,) = make_optimizers("muon", nn.Sequential(nn.Linear(2, 2, bias=False)))
    assert isinstance(muon, torch.optim.Muon)
    with pytest.raises(ValueError, match="optimizer='muon' steps the weights of linear layers, and the model has none"):
        make_optimizers("muon", make_workload(WorkloadSettings(model="cnn")).model)


@torch.compiler.set_stance("force_eager")
def test_on_a_simulated_link_only_this_ranks_part_is_trained() -> None:
    workload = make_workload(SETTINGS)
    before = {name: parameter.detach().clone() for name, parameter in workload.model.named_parameters()}
    with simulated_group(FAST):
        built = implementation_named("ddp_compile-sharded")(workload.model, Case(implementation="ddp_compile-sharded"))
        training = Training(built, workload.model, workload, SETTINGS, 0, 1)
        for _ in range(3):
            training.step()
        changed = {name for name, p in workload.model.named_parameters() if not torch.equal(p, before[name])}
        assert all(parameter.isfinite().all() for parameter in workload.model.parameters())
    # Eight matrices on four ranks.
    assert len(changed & MATRICES) == 2 and training.loss is not None and training.loss.isfinite()
