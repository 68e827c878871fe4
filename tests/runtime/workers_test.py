"""Training on multiple workers: TF_CONFIG, Slurm, rendezvous, and results that match those of a single worker."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import tensorflow as tf

import checks
import evaluate
from config import Config
from runtime import devices, signals, workers
from runtime.errors import Stopped
from sources import digits
from support import SMALL, processes, runs, training_worker
from support.addresses import free_addresses, slurm_variables, tf_config, worker_environments
from support.errors import rejects
from support.images import write_images

CLUSTER = {"worker": ["a:1", "b:1"]}

# ------------------------------------------------------------------------------------------------------- TF_CONFIG


@pytest.mark.parametrize(
    "text, message",
    [
        *((text, "Error: ") for text in ("{cluster: 1}", "null")),
        (json.dumps({"cluster": CLUSTER}), "No such job in cluster: None"),
        (tf_config(CLUSTER, "evaluator"), "No such job in cluster: 'evaluator'"),
        (tf_config(CLUSTER, index=2), "No task with index 2 in job 'worker'"),
        (tf_config(CLUSTER, index="first"), "invalid literal"),
        (tf_config({"worker": "a:1"}), "must be a list"),
        (tf_config({"worker": ["a:1", "b"]}), "invalid literal"),
        (tf_config({**CLUSTER, "ps": ["c:1"]}), "only supported jobs are chief and worker"),
    ],
)
def test_invalid_tf_config_gives_a_one_line_error(text, message, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with rejects(f"TF_CONFIG=.* does not name this worker.*{message}") as error:
        workers.count_workers()
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("address", ["b:99999", "b..c:1", "h\u00f6st:1", "[::g]:1", "b:0"])
def test_workers_with_invalid_addresses_are_unreachable(address):
    assert not workers._send("", address)


@pytest.mark.parametrize(
    "text, count",
    [
        ("", 1),
        (tf_config({"worker": ["a:1"]}), 1),
        (tf_config({"chief": ["a:1"], "worker": []}, "chief"), 1),
        (tf_config(CLUSTER, index=1), 2),
        (tf_config({"worker": ["[::1]:2222", "my_host-1.example.com.:2222"]}), 2),
        (tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, index=1), 3),
    ],
)
def test_count_workers_counts_the_workers_in_tf_config(text, count, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert workers.count_workers() == count


def test_a_single_worker_behaves_as_if_tf_config_were_unset(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": ["a:1"]}))
    checks.before_connecting(Config(mode="eval"))
    strategy = devices.make_strategy()
    assert strategy is tf.distribute.get_strategy() and devices.is_chief(strategy)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(seed=None), "--seed: the seed is not set"),
        (dict(seed=1, mode="eval"), "--mode=eval: this mode runs in one process"),
        (dict(seed=1, use_tpu=True), "--use_tpu: one process"),
    ],
)
def test_settings_that_training_on_multiple_workers_does_not_support_are_rejected(
    settings, message, monkeypatch
):
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER))
    with rejects(message):
        checks.before_connecting(Config(**settings))


# ------------------------------------------------------------------------------------------------------------ Slurm


@pytest.fixture
def set_variables(monkeypatch):
    """Returns a function that sets the variables of a Slurm task, without TF_CONFIG and GPUs, for one test."""
    for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES"):
        # The program sets these variables. monkeypatch restores them after the test.
        monkeypatch.setenv(name, "")
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND"):
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize(
    "nodes, tasks_per_node, node, local_task, addresses, index",
    [
        ("node[01-03]", "1(x3)", "node02", 0, ["node01:20017", "node02:20017", "node03:20017"], 1),
        ("b,a", "1(x2)", "b", 0, ["a:20017", "b:20017"], 1),
        ("a,n[1,3-4]", "1(x4)", "n3", 0, ["a:20017", "n1:20017", "n3:20017", "n4:20017"], 2),
        # Slurm starts task 0 on node9.
        ("node[9-10]", "1(x2)", "node9", 0, ["node10:20017", "node9:20017"], 1),
        (
            "n[1-3]",
            "2(x2),1",
            "n2",
            1,
            ["n1:20034", "n1:20035", "n2:20034", "n2:20035", "n3:20034"],
            3,
        ),
        ("n[1-2]", "1,3", "n2", 2, ["n1:20051", "n2:20051", "n2:20052", "n2:20053"], 3),
    ],
)
def test_slurm_variables_give_the_same_cluster_as_tf_config(
    nodes, tasks_per_node, node, local_task, addresses, index, set_variables, monkeypatch
):
    set_variables(slurm_variables(nodes, tasks_per_node, node, local_task, len(addresses)))
    workers.use_slurm_cluster()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.cluster_spec().as_dict(), resolver.task_id) == ({"worker": addresses}, index)
    assert resolver.task_type == "worker" and workers.count_workers() == len(addresses)
    # An equal TF_CONFIG is accepted, so a process can start several runs.
    workers.use_slurm_cluster()


def test_slurm_jobs_of_the_same_shape_use_different_ports_below_the_ephemeral_ports(
    set_variables, monkeypatch
):
    used = []
    for job in (11_999, 12_000, 12_001, 4_294_967_290):
        monkeypatch.setenv("TF_CONFIG", "")
        set_variables(slurm_variables("n1", "8", "n1", 0, 8, job=job))
        workers.use_slurm_cluster()
        used.append(
            {
                int(address.split(":")[1])
                for address in json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
            }
        )
    assert all(20_000 <= port < 32_768 for ports in used for port in ports)
    assert sum(map(len, used)) == len(set().union(*used)) == 32


def test_a_slurm_step_with_one_task_is_a_single_worker(set_variables):
    set_variables(slurm_variables("n1", "1", "n1", 0, 1))
    workers.use_slurm_cluster()
    assert workers.count_workers() == 1 and not os.environ["TF_CONFIG"]
    checks.before_connecting(Config(mode="eval"))


ONE_NODE = {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}


@pytest.mark.parametrize(
    "changes, message",
    [
        *(
            ({name: None}, f"or not supported .*{name}")
            for name in slurm_variables("", "", "", 0, 0)
        ),
        ({"TF_CONFIG": tf_config(CLUSTER)}, "TF_CONFIG is also set. Unset TF_CONFIG"),
        ({"SLURM_STEP_NODELIST": "n[1-2]-ib"}, "not supported .Invalid hostlist format"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "not supported .Invalid tasks-per-node"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, "not supported .Requested 3 tasks but only 2"),
        ({**ONE_NODE, "CUDA_VISIBLE_DEVICES": "0"}, "2 tasks cannot share 1 GPUs equally. Start"),
        ({"SLURMD_NODENAME": "n3"}, "not supported .'n3:20017' is not in list"),
    ],
)
def test_unusable_slurm_variables_give_a_one_line_error(changes, message, set_variables):
    set_variables({**slurm_variables("n[1-2]", "1(x2)", "n1", 0, 2), **changes})
    with rejects(f"--cluster=slurm: .*{message}"):
        workers.use_slurm_cluster()
    assert os.environ["TF_CONFIG"] == changes.get("TF_CONFIG", "")


@pytest.mark.parametrize(
    "tasks_per_node, num_tasks, visible, variables, expected",
    [
        ("2", 2, "0,1,2,3", {}, ["0,2", "1,3"]),
        ("2", 2, "5,GPU-8f", {"SLURM_GPU_BIND": "none"}, ["5", "GPU-8f"]),
        # Slurm has assigned two other GPUs to each task.
        ("2", 2, "0,1", {"SLURM_GPUS_PER_TASK": "2"}, ["0,1", "0,1"]),
        ("2", 2, "0", {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, ["0", "0"]),
        ("2", 2, "0,1", {"SLURM_TRES_PER_TASK": "cpu=4"}, ["0", "1"]),
        ("2", 2, "", {}, ["", ""]),
        ("1(x2)", 2, "0,1", {}, ["0,1"]),
    ],
)
def test_slurm_tasks_on_one_node_share_its_gpus(
    tasks_per_node, num_tasks, visible, variables, expected, set_variables, monkeypatch
):
    for local_task, gpus in enumerate(expected):
        monkeypatch.setenv("TF_CONFIG", "")
        nodes = "n1" if tasks_per_node == "2" else "n[1-2]"
        set_variables(slurm_variables(nodes, tasks_per_node, "n1", local_task, num_tasks))
        set_variables({"CUDA_VISIBLE_DEVICES": visible, **variables})
        workers.use_slurm_cluster()
        workers.use_slurm_cluster()  # Another call does not share the GPUs again.
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus


# ------------------------------------------------------------------------------------------------------- rendezvous


def listen(address):
    return socket.create_server(("", int(address.rpartition(":")[2])))


@pytest.mark.parametrize(
    "have_gpus, without",
    [
        ((True, True, True), []),
        ((False, False, False), []),
        ((True, True, False), [2]),
        ((False, True, False), [0, 2]),
        ((False, None, None), []),  # The others do not answer.
    ],
)
def test_a_worker_waits_for_the_others_and_logs_missing_workers(
    have_gpus, without, monkeypatch, capsys
):
    own_address, *peers = addresses = free_addresses(3)
    monkeypatch.setattr(workers, "_PROBE_INTERVAL", 0.05)
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": addresses}))
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(workers.wait_for_workers, have_gpus[0])
        for address, has_gpu in zip(peers, have_gpus[1:]):
            time.sleep(0.3)
            assert not waiting.done()
            message = "" if has_gpu is None else f"{address} {has_gpu}"
            assert workers._send(message, own_address)
            stack.enter_context(listen(address))
        if without:
            names = ", ".join(addresses[index] for index in without)
            with rejects(f"^TF_CONFIG: {names} found no GPU, but other"):
                waiting.result(10)
        else:
            waiting.result(10)
    assert not workers._send("", own_address)
    warning, *lines = capsys.readouterr().out.splitlines()
    assert (
        warning.startswith("warning: ")
        and "without authentication. Use trusted networks only" in warning
    )
    assert lines == [
        f"{own_address}: waiting for {peers[0]}, {peers[1]} (TF_CONFIG)",
        f"{own_address}: waiting for {peers[1]} (TF_CONFIG)",
        "all 3 workers are reachable",
    ]


def test_a_waiting_worker_answers_repeated_probes(monkeypatch):
    own_address, peer = free_addresses(2)
    monkeypatch.setattr(workers, "_PROBE_INTERVAL", 0.001)
    # The connection queue overflows unless it is drained.
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": [own_address, peer]}))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting, reachable = pool.submit(workers.wait_for_workers, False), []
        for _ in range(9):
            time.sleep(0.1)
            reachable.append(workers._send(f"{peer} False", own_address))
        with listen(peer):
            waiting.result(10)
    assert reachable == [True] * 9


def test_a_signal_ends_the_wait_for_other_workers(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": free_addresses(2)}))
    timer = threading.Timer(
        0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGTERM]
    )
    with (
        signals.StopSignals() as stop,
        pytest.raises(Stopped, match="stopped by SIGTERM"),
        stop.interruptible(),
    ):
        timer.start()
        workers.wait_for_workers(False)


def test_a_port_in_use_is_reported(monkeypatch):
    addresses = free_addresses(2)
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": addresses}))
    with (
        listen(addresses[0]),
        rejects("TF_CONFIG: port .* cannot be used .*Address already in use"),
    ):
        workers.wait_for_workers(False)


@pytest.mark.parametrize(
    "collective, has_gpu, expected",
    [
        ("auto", True, "NCCL"),
        ("auto", False, "RING"),
        ("ring", True, "RING"),
        ("nccl", False, "NCCL"),
    ],
)
def test_workers_with_gpus_communicate_by_nccl(collective, has_gpu, expected, monkeypatch):
    """Clusters in which only some workers have GPUs are rejected; see the tests above."""
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER))
    gpus = ["GPU"] * has_gpu
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: gpus)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: {})

    def make(communication_options):
        extended = types.SimpleNamespace(_communication_options=communication_options)
        return types.SimpleNamespace(extended=extended)

    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", make)
    strategy = devices.make_strategy(collective=collective)
    assert strategy.extended._communication_options.implementation.name == expected
    line = devices.describe(strategy)
    assert line.startswith(f"2 workers, communication by {expected}; this worker: ")


@pytest.mark.parametrize("num_workers", [2, 3])
def test_combined_batches_of_all_workers_match_the_batches_of_one_worker(num_workers):
    source = digits.digits_source()
    shards = [
        [int(key) for key, _, _ in source.records("train[:60]", 5, num_workers, worker)]
        for worker in range(num_workers)
    ]
    keys = [int(key) for key, _, _ in source.records("train[:60]", 5)]
    size = 60 // num_workers // 5
    for batch in range(5):
        joined = set().union(*(shard[batch * size : (batch + 1) * size] for shard in shards))
        assert joined == set(keys[batch * size * num_workers : (batch + 1) * size * num_workers])


# ------------------------------------------------------------------------------------------------ several processes


SETTINGS = dict(
    SMALL,
    dataset="digits",
    train_split="train[:64]",
    train_batch_size=16,
    seed=7,
    color_jitter_strength=0.0,
    learning_rate=0.3,
    warmup_epochs=0,
    use_blur=False,
    linear_head_learning_rate=0.1,
    train_steps=3,
    eval_split="test[:101]",
    eval_batch_size=14,
)
FINISH = dict(
    train_steps=5, mode="train_then_eval", eval_protocol="linear_head,lbfgs,knn,contrastive"
)
TOLERANCE = 1e-9


def run_workers(directories, settings, status=0, environments=None):
    """Runs one worker process for each model directory in `directories`. Returns the outputs of the processes.

    `settings` is a dict for all workers, or a list with one dict per worker. `environments` is a
    list of environment variables for each worker; by default, TF_CONFIG is set. If any process does
    not exit with `status` within five minutes, the test fails and shows all outputs.
    """
    settings = settings if isinstance(settings, list) else [settings] * len(directories)

    def run_worker(directory, settings, environment):
        program = [sys.executable, training_worker.__file__]
        return subprocess.run(
            # Unlike the argument `timeout`, the command keeps the output.
            [
                "timeout",
                "-s",
                "KILL",
                "300",
                *program,
                json.dumps({**settings, "model_dir": directory}),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    environments = environments or worker_environments(len(directories))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = list(pool.map(run_worker, map(str, directories), settings, environments))
    printed, statuses = ([worker.stdout for worker in done], [worker.returncode for worker in done])
    assert set(statuses) == {status}, "\n".join([f"exit status {statuses}", *printed])
    return printed


def assert_same_checkpoint(one, two, step):
    """Asserts that the arrays of two checkpoints match within `TOLERANCE`, relative to each array's largest entry."""
    expected, actual = (processes.tensors(path, step) for path in (one, two))
    assert set(actual) == set(expected) and sum("Momentum" in key for key in expected) > 30
    for key, value in expected.items():
        tolerance = TOLERANCE * np.abs(value).max() + 1e-15
        np.testing.assert_allclose(actual[key], value, rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.slow
def test_two_workers_match_one_worker_in_training_evaluation_and_resumption(tmp_path, float64):
    one, two, elsewhere = (tmp_path / name for name in ("one", "two", "elsewhere"))
    training_worker.run({**SETTINGS, "model_dir": str(one)})
    run_workers([two, elsewhere], SETTINGS)
    assert not elsewhere.exists()
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert_same_checkpoint(one, two, 3)

    training_worker.run({**SETTINGS, **FINISH, "model_dir": str(one)})
    printed = run_workers([two, two], {**SETTINGS, **FINISH})
    assert all("resumed at step 3" in text for text in printed)
    assert "linear head, top-1" in printed[0] and "linear head, top-1" not in printed[1]
    assert_same_checkpoint(one, two, 5)
    results = [runs.read_results(path / "result.json") for path in (one, two)]
    assert {evaluate.LINEAR_TOP_1, evaluate.LBFGS, evaluate.KNN, "eval/contrast_loss"} <= set(
        results[0]
    )
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert files_in(two) == files_in(one)


@pytest.mark.slow
def test_two_slurm_tasks_match_one_worker(tmp_path, float64):
    training_worker.run({**SETTINGS, "model_dir": str(tmp_path / "one")})
    job = next(
        job for job in random.sample(range(6000), 100) if ports_are_free(20_000 + 2 * job, 2)
    )
    printed = run_workers(
        [tmp_path / "two", tmp_path / "elsewhere"],
        {**SETTINGS, "cluster": "slurm"},
        environments=[
            slurm_variables("localhost", "2", "localhost", task, 2, task, job) for task in range(2)
        ],
    )
    for task, text in enumerate(printed):
        assert (
            f"TF_CONFIG from Slurm: worker {task} of 2, localhost:{20_000 + 2 * job + task}" in text
        )
        assert "all 2 workers are reachable" in text
    assert not (tmp_path / "elsewhere").exists()
    assert_same_checkpoint(tmp_path / "one", tmp_path / "two", 3)


def ports_are_free(first, count):
    """Returns whether `count` consecutive local ports, starting at `first`, are not in use."""
    with contextlib.ExitStack() as stack:
        try:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
        except OSError:
            return False
    return True


def files_in(directory):
    """Returns the relative paths of all files except event files, whose names contain the time and the host name."""
    return {
        path.relative_to(directory) for path in directory.rglob("*") if "tfevents" not in path.name
    }


@pytest.mark.slow
def test_only_the_chief_checks_the_images(tmp_path):
    write_images(
        tmp_path / "images", *(f"{label}/{index}.png" for label in "ab" for index in range(20))
    )
    (tmp_path / "images" / "a" / "0.png").write_text("not an image")
    jobs, addresses = ("chief", "worker"), free_addresses(2)
    cluster = {job: [address] for job, address in zip(jobs, addresses)}
    environments = [
        {"TF_CONFIG": tf_config(cluster, job), "XDG_CACHE_HOME": str(tmp_path / job)}
        for job in jobs
    ]
    settings = dict(
        SETTINGS,
        dataset=f"folder:{tmp_path}/images",
        train_split="train",
        train_steps=1,
        corrupt_images="skip",
        eval_split="train",
    )
    printed = run_workers([tmp_path / "run"] * 2, settings, environments=environments)
    assert "skipped: 1 of 40 images cannot be used: a/0.png" in printed[0]
    assert [(tmp_path / job / "simclr-tf2").exists() for job in jobs] == [True, False]
    stopped = run_workers(
        [tmp_path / "run"] * 2,
        dict(settings, corrupt_images="error"),
        status=2,
        environments=environments,
    )
    assert all("1 of 40 images cannot be used: a/0.png (not an image" in text for text in stopped)


@pytest.mark.slow
def test_workers_with_different_flags_are_rejected(tmp_path):
    settings = [SETTINGS, {**SETTINGS, "learning_rate": 0.2}]
    for text in run_workers([tmp_path / "run"] * 2, settings, status=2):
        assert "error: TF_CONFIG: the workers were started with different flags" in text
