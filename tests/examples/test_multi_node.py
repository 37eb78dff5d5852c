"""The script of docs/integrations.md, with stand-ins for SLURM's commands: two machines, which are both this one."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SCRIPT = """
import torch
import torch.distributed as dist
from ddp_compile import ddp_compile

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = ddp_compile(torch.nn.Linear(3, 3), backend="eager")
model(torch.randn(2, 3)).sum().backward()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {model.weight.grad.sum():.6f}\\n", end="")
dist.destroy_process_group()
"""
STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames $SLURM_JOB_NODELIST" && printf "localhost\\nother\\n"',
    "srun": '"$@" & "$@" & wait -n && wait -n',  # on both machines
}


@pytest.mark.long  # four interpreters import torch
def test_the_batch_script_starts_all_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]  # that is free
    assert script.count("29500") == 1
    (tmp_path / "train.sbatch").write_text(script.replace("29500", str(port)))
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": 7, "JOB_NODELIST": "a[1-2]", "NNODES": 2, "GPUS_ON_NODE": 1, "CPUS_PER_TASK": 1}
    environment = {
        **os.environ,
        **{f"SLURM_{name}": str(value) for name, value in slurm.items()},
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        ["bash", "train.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    said = dict(re.findall(r"rank (\d) of 2: (\S+)", done.stdout))
    assert set(said) == {"0", "1"} and said["0"] == said["1"]
