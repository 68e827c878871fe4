"""The Slurm script in docs/clusters.md, run with fake versions of `srun`, `scontrol` and `python`."""

import os
import re
import subprocess

import pytest

from support import ROOT

_PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": 'echo "scontrol $*"',
    "python": 'for argument in "$@"; do echo "python: $argument"; done; exit $STATUS'}


@pytest.mark.parametrize("status", [0, 2, 75])
def test_the_slurm_script_executes_one_command_and_requeues_stopped_runs(status, tmp_path):
    script = re.search("```bash\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)[1]
    (tmp_path / "table.sbatch").write_text(script)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'PATH="{tmp_path}:$PATH"')
    for name, content in _PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "stage1.txt").write_text("".join(
        f"python --only=color/{index} '--flags=--data_dir=\"a b\"'\n" for index in (1, 2, 3)))
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "17", "STATUS": str(status)}
    process = subprocess.run(["bash", "table.sbatch", "stage1.txt"], cwd=tmp_path, env=environment,
                             capture_output=True, text=True)
    assert process.returncode == status and not process.stderr
    assert process.stdout.splitlines() == [
        "python: --only=color/2", 'python: --flags=--data_dir="a b"', *["scontrol requeue 17"] * (status == 75)]
