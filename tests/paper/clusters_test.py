"""The scripts in docs/clusters.md, run with fake versions of `srun`, `scontrol` and `python`."""

import os
import re
import subprocess
import textwrap

import pytest

from paper import runner
from runtime import workers
from support import ROOT

_DOCUMENT = (ROOT / "docs/clusters.md").read_text()
_PROGRAMS = {
    # Starts the command once per task, and returns the highest exit status.
    "srun": (
        'while [ "${1#--}" != "$1" ]; do shift; done\nhighest=0\nfor SLURM_PROCID in $(seq 0'
        ' $((TASKS - 1))); do\n    export SLURM_PROCID; "$@"; status=$?\n    [ $status -gt $highest'
        " ] && highest=$status\ndone\nexit $highest"
    ),
    "scontrol": 'echo "scontrol $*"',
    "python": 'for argument in "$@"; do echo "python: $argument"; done; exit $STATUS',
}


def run_script(name, arguments, directory, **variables):
    """Runs a Slurm script of the document. Returns its exit status and the lines that it prints."""
    scripts = re.findall("```bash\n(.*?)```", _DOCUMENT, re.DOTALL)
    script = next(text for text in scripts if f"--job-name={name}\n" in text)
    (directory / f"{name}.sbatch").write_text(script)
    (directory / ".venv/bin").mkdir(parents=True)
    (directory / ".venv/bin/activate").write_text(f'PATH="{directory}:$PATH"')
    for program, content in _PROGRAMS.items():
        (directory / program).write_text(f"#!/bin/sh\n{content}\n")
        (directory / program).chmod(0o755)
    process = subprocess.run(
        ["bash", f"{name}.sbatch", *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        env={**os.environ, "SLURM_JOB_ID": "17", **variables},
    )
    assert not process.stderr
    return process.returncode, process.stdout.splitlines()


REQUEUED = "scontrol requeue 17"


@pytest.mark.parametrize("status, ending", [("0", []), ("2", []), ("75", [REQUEUED])])
def test_the_script_for_tables_executes_one_command_and_requeues_stopped_runs(
    status, ending, tmp_path
):
    command = "python --only=color/{} '--flags=--data_dir=\"a b\"'\n"
    (tmp_path / "stage1.txt").write_text("".join(map(command.format, (1, 2, 3))))
    variables = {"SLURM_ARRAY_TASK_ID": "2", "TASKS": "1", "STATUS": status}
    returned, lines = run_script("table", ["stage1.txt"], tmp_path, **variables)
    assert str(returned) == status
    assert lines == ["python: --only=color/2", 'python: --flags=--data_dir="a b"', *ending]


@pytest.mark.parametrize(
    "status, restarts, ending",
    [
        ("3", "", []),
        ("75", "", [REQUEUED]),
        ("137", "", [REQUEUED]),
        ("75", "19", [REQUEUED]),
        (
            "75",
            "20",
            [
                "not requeued: the job was restarted 20 times. To resume the run, submit the job again."
            ],
        ),
    ],
)  # If one task has a permanent error, the others always exit with status 75.
def test_the_script_for_one_run_starts_all_tasks_and_requeues_stopped_runs(
    status, restarts, ending, tmp_path
):
    example = re.search(r"^    sbatch run\.sbatch (.*)$", _DOCUMENT, re.MULTILINE)[1]
    arguments = [*example.split(), "--data_dir=a b"]
    variables = {
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_RESTART_COUNT": restarts,
        "TASKS": "2",
        "STATUS": status,
    }
    returned, lines = run_script("run", arguments, tmp_path, **variables)
    assert str(returned) == status
    flags = ["--cluster=slurm", *arguments]
    assert lines == [*[f"python: {word}" for word in ("run.py", *flags)] * 2, *ending]
    config = runner.config_of(flags)
    assert config.cluster == "slurm" and config.seed is not None and config.data_dir == "a b"


@pytest.mark.parametrize("index", [0, 1])
def test_the_kubernetes_manifest_gives_each_pod_its_tf_config_and_valid_flags(
    index, tmp_path, monkeypatch
):
    manifest = re.search("```yaml\n(.*?)```", _DOCUMENT, re.DOTALL)[1]
    service, job = manifest.split("---\n")
    number = re.search(r"name: PODS\n +value: \"(\d+)\"", job)[1]
    assert f"completions: {number}\n  parallelism: {number}\n" in job
    # The script ends at the next line with less indentation.
    script = textwrap.dedent(re.search(r"        - \|\n((?: {10}.*\n)+)", job)[1])
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$TF_CONFIG" "$@"')
    program.chmod(0o755)
    variables = {"PODS": number, "JOB_COMPLETION_INDEX": str(index)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    output = subprocess.check_output(["bash", "-c", script], env=environment, text=True)
    tf_config, script, *arguments = output.splitlines()
    monkeypatch.setenv("TF_CONFIG", tf_config)
    # Pods are named after the Job and their index, in the subdomain of the Service.
    subdomain, name = re.search(r"subdomain: (.*)", job)[1], re.search(r"\n  name: (.*)", job)[1]
    assert f"\n  name: {subdomain}\n" in service and f"job-name: {name}\n" in service
    own_address, others = workers._read_tf_config()
    addresses = [f"{name}-{pod}.{subdomain}:2222" for pod in range(2)]
    assert own_address == addresses.pop(index) and others == addresses
    config = runner.config_of(arguments)
    assert script == "run.py" and config.seed is not None
    assert config.model_dir.startswith("/shared/")
