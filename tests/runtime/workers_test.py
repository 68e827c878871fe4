"""Training on multiple workers: TF_CONFIG, Slurm, rendezvous, and results that match those of a single worker."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
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
from support import processes, replica_worker, runs
from support.addresses import free_addresses, slurm_variables, tf_config, worker_environments
from support.errors import rejects
from support.images import write_folder

CLUSTER, ONE_WORKER = {"worker": ["a:1", "b:1"]}, {"worker": ["a:1"]}

# ------------------------------------------------------------------------------------------------------- TF_CONFIG


def test_invalid_tf_config_gives_a_one_line_error(monkeypatch):
    for text, message in (
        ("{cluster: 1}", "Error: "),
        (json.dumps({"cluster": CLUSTER}), "No such job in cluster: None"),
        (tf_config(CLUSTER, "evaluator"), "No such job in cluster: 'evaluator'"),
        (tf_config(CLUSTER, index=2), "No task with index 2 in job 'worker'"),
        (tf_config({"worker": "a:1"}), "must be a list"),
        (tf_config({"worker": ["a:1", "b"]}), "invalid literal"),
        (tf_config({**CLUSTER, "ps": ["c:1"]}), "only supported jobs are chief and worker"),
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        with rejects(f"TF_CONFIG=.* does not name this worker.*{message}") as error:
            workers.count_workers()
        assert len(str(error.value)) < 600


def test_workers_with_invalid_addresses_are_unreachable():
    for address in ("b:99999", "b..c:1", "h\u00f6st:1", "[::g]:1", "b:0"):
        assert not workers._send("", address)


def test_count_workers_counts_the_workers_in_tf_config(monkeypatch):
    for text, count in (
        ("", 1),
        (tf_config(ONE_WORKER), 1),
        (tf_config({"chief": ["a:1"], "worker": []}, "chief"), 1),
        (tf_config(CLUSTER, index=1), 2),
        (tf_config({"worker": ["[::1]:2222", "my_host-1.example.com.:2222"]}), 2),
        (tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, index=1), 3),
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        assert workers.count_workers() == count


def test_settings_that_training_on_multiple_workers_does_not_support_are_rejected(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER))
    for settings, message in (
        ({"seed": None}, "--seed: the seed is not set"),
        ({"seed": 1, "mode": "eval"}, "--mode=eval: this mode runs in one process"),
        ({"seed": 1, "use_tpu": True}, "--use_tpu: one process"),
    ):
        with rejects(message):
            checks.before_connecting(Config(**settings))


# ------------------------------------------------------------------------------------------------------------ Slurm


@pytest.fixture
def set_variables(monkeypatch):
    """Returns a function that sets the variables of a Slurm task, without TF_CONFIG and GPUs, for one test."""
    # The program sets this variable and TF_CONFIG. monkeypatch restores them after the test.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND"):
        monkeypatch.delenv(name, raising=False)

    def set_all(variables):
        monkeypatch.setenv("TF_CONFIG", "")
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_all


def test_slurm_variables_give_the_same_cluster_as_tf_config(set_variables):
    for nodes, tasks_per_node, node, local_task, expected, index in (
        ("node[01-03]", "1(x3)", "node02", 0, "node01:20017 node02:20017 node03:20017", 1),
        ("b,a", "1(x2)", "b", 0, "a:20017 b:20017", 1),
        ("a,n[1,3-4]", "1(x4)", "n3", 0, "a:20017 n1:20017 n3:20017 n4:20017", 2),
        # Slurm starts task 0 on node9.
        ("node[9-10]", "1(x2)", "node9", 0, "node10:20017 node9:20017", 1),
        ("n[1-3]", "2(x2),1", "n2", 1, "n1:20034 n1:20035 n2:20034 n2:20035 n3:20034", 3),
        ("n[1-2]", "1,3", "n2", 2, "n1:20051 n2:20051 n2:20052 n2:20053", 3),
    ):
        addresses = expected.split()
        set_variables(slurm_variables(nodes, tasks_per_node, node, local_task, len(addresses)))
        workers.use_slurm_cluster()
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        assert resolver.cluster_spec().as_dict() == {"worker": addresses}
        assert (resolver.task_type, resolver.task_id) == ("worker", index)
        assert workers.count_workers() == len(addresses)
        # An equal TF_CONFIG is accepted, so a process can start several runs.
        workers.use_slurm_cluster()


def test_slurm_jobs_of_the_same_shape_use_different_ports_below_the_ephemeral_ports(set_variables):
    used = []
    for job in (11_999, 12_000, 12_001, 4_294_967_290):
        set_variables(slurm_variables("n1", "8", "n1", 0, 8, job=job))
        workers.use_slurm_cluster()
        used += json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
    ports = {int(address.split(":")[1]) for address in used}
    assert len(used) == len(ports) == 32
    assert min(ports) >= 20_000 and max(ports) < 32_768


def test_a_single_worker_behaves_as_if_tf_config_were_unset(set_variables, monkeypatch):
    set_variables(slurm_variables("n1", "1", "n1", 0, 1))
    workers.use_slurm_cluster()
    assert workers.count_workers() == 1 and not os.environ["TF_CONFIG"]
    monkeypatch.setenv("TF_CONFIG", tf_config(ONE_WORKER))
    checks.before_connecting(Config(mode="eval"))
    strategy = devices.make_strategy()
    assert strategy is tf.distribute.get_strategy() and devices.is_chief(strategy)


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
    "tasks_per_node, visible, variables, expected",
    [
        ("2", "0,1,2,3", {}, ["0,2", "1,3"]),
        ("2", "5,GPU-8f", {"SLURM_GPU_BIND": "none"}, ["5", "GPU-8f"]),
        # Slurm has assigned two other GPUs to each task.
        ("2", "0,1", {"SLURM_GPUS_PER_TASK": "2"}, ["0,1", "0,1"]),
        ("2", "0", {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, ["0", "0"]),
        ("2", "0,1", {"SLURM_TRES_PER_TASK": "cpu=4"}, ["0", "1"]),
        ("2", "", {}, ["", ""]),
        ("1(x2)", "0,1", {}, ["0,1"]),
    ],
)
def test_slurm_tasks_on_one_node_share_its_gpus(
    tasks_per_node, visible, variables, expected, set_variables
):
    for local_task, gpus in enumerate(expected):
        nodes = "n1" if tasks_per_node == "2" else "n[1-2]"
        task = slurm_variables(nodes, tasks_per_node, "n1", local_task, 2)
        set_variables({**task, "CUDA_VISIBLE_DEVICES": visible, **variables})
        workers.use_slurm_cluster()
        workers.use_slurm_cluster()  # Another call does not share the GPUs again.
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpus


# ------------------------------------------------------------------------------------------------------- rendezvous


@pytest.fixture
def join_cluster(monkeypatch):
    """Returns a function that sets TF_CONFIG for the first of several workers, and returns their addresses."""

    def join(count):
        addresses = free_addresses(count)
        monkeypatch.setenv("TF_CONFIG", tf_config({"worker": addresses}))
        return addresses

    return join


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
    have_gpus, without, join_cluster, monkeypatch, capsys
):
    own_address, *peers = addresses = join_cluster(3)
    monkeypatch.setattr(workers, "_PROBE_INTERVAL", 0.05)
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
    assert re.match("warning: .* without authentication. Use trusted networks only", warning)
    assert lines == [
        f"{own_address}: waiting for {peers[0]}, {peers[1]} (TF_CONFIG)",
        f"{own_address}: waiting for {peers[1]} (TF_CONFIG)",
        "all 3 workers are reachable",
    ]


def test_a_waiting_worker_answers_repeated_probes(join_cluster, monkeypatch):
    own_address, peer = join_cluster(2)
    monkeypatch.setattr(workers, "_PROBE_INTERVAL", 0.001)
    # The connection queue overflows unless it is drained.
    monkeypatch.setattr(socket, "SOMAXCONN", 2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting, reachable = pool.submit(workers.wait_for_workers, False), []
        for _ in range(9):
            time.sleep(0.1)
            reachable.append(workers._send(f"{peer} False", own_address))
        with listen(peer):
            waiting.result(10)
    assert reachable == [True] * 9


def test_a_signal_ends_the_wait_for_other_workers(join_cluster):
    join_cluster(2)
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


def test_a_port_in_use_is_reported(join_cluster):
    own_address, _ = join_cluster(2)
    with listen(own_address), rejects("TF_CONFIG: port .* cannot be used .*Address already in use"):
        workers.wait_for_workers(False)


@pytest.mark.parametrize(
    "collective, gpus, expected",
    [
        ("auto", ["GPU"], "NCCL"),
        ("auto", [], "RING"),
        ("ring", ["GPU"], "RING"),
        ("nccl", [], "NCCL"),
    ],
)
def test_workers_with_gpus_communicate_by_nccl(collective, gpus, expected, monkeypatch):
    """Clusters in which only some workers have GPUs are rejected; see the tests above."""
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER))
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
    def batches_of(*shard):
        records = digits.digits_source().records("train[:60]", 5, *shard)
        return np.reshape([int(key) for key, _, _ in records], [5, -1])

    joined = np.hstack([batches_of(num_workers, worker) for worker in range(num_workers)])
    np.testing.assert_array_equal(np.sort(joined), np.sort(batches_of()))


# ------------------------------------------------------------------------------------------------ several processes


SETTINGS = {
    **processes.FLAGS,
    "mode": "train",
    "learning_rate": 0.3,
    "warmup_epochs": 0,
    "use_blur": False,
    "train_steps": 3,
    "eval_split": "test[:101]",
    "eval_batch_size": 14,
}
FINISH = {
    "train_steps": 5,
    "mode": "train_then_eval",
    "eval_protocol": "linear_head,lbfgs,knn,contrastive",
}


def run_workers(directories, *settings, status=0, environments=None):
    """Runs one worker process in double precision for each of two model directories. Returns their outputs.

    `settings` is a dict for both workers, or one dict per worker. `environments` is a list of
    environment variables for each worker; by default, TF_CONFIG is set. If a process does not exit
    with `status`, the test fails and shows all outputs.
    """
    logs = [directory.with_name(f"{index}.log") for index, directory in enumerate(directories)]
    for log in logs:
        log.unlink(missing_ok=True)
    arguments = zip(
        directories, environments or worker_environments(2), logs, itertools.cycle(settings)
    )
    started = [
        processes.start(directory, {**environment, "EXACT": "1"}, log, **flags)
        for directory, environment, log, flags in arguments
    ]
    statuses = [process.wait(300) for process in started]
    printed = [log.read_text() for log in logs]
    assert statuses == [status] * 2, printed
    return printed


@pytest.mark.slow
def test_two_workers_match_one_worker_in_training_evaluation_and_resumption(
    tmp_path, tiny_resnet, float64
):
    """The workers get their addresses from TF_CONFIG at first, and from Slurm after the resumption."""
    one, two, elsewhere = (tmp_path / name for name in ("one", "two", "elsewhere"))
    runs.run(one, SETTINGS, with_export=True, **SETTINGS)
    run_workers([two, elsewhere], SETTINGS)
    assert not elsewhere.exists()

    def assert_same_run(step):
        assert runs.lasting_files(two).keys() == runs.lasting_files(one).keys()
        replica_worker.assert_equal(*(processes.tensors(path, step) for path in (two, one)))

    assert_same_run(3)

    finish = {**SETTINGS, **FINISH}
    runs.run(one, finish, with_export=True, **finish)
    jobs = random.sample(range(6000), 100)
    job = next(job for job in jobs if ports_are_free(20_000 + 2 * job, 2))
    printed = run_workers(
        [two, two],
        {**finish, "cluster": "slurm"},
        environments=[
            slurm_variables("localhost", "2", "localhost", task, 2, task, job) for task in range(2)
        ],
    )
    for task, text in enumerate(printed):
        address = f"localhost:{20_000 + 2 * job + task}"
        assert f"TF_CONFIG from Slurm: worker {task} of 2, {address}" in text
        assert "all 2 workers are reachable" in text and "resumed at step 3" in text
    assert "linear head, top-1" in printed[0] and "linear head, top-1" not in printed[1]
    assert_same_run(5)
    results = [runs.read_results(path / "result.json") for path in (one, two)]
    measured = {evaluate.LINEAR_TOP_1, evaluate.LBFGS, evaluate.KNN, "eval/contrast_loss"}
    assert measured <= results[0].keys()
    assert results[1] == pytest.approx(results[0], rel=1e-6)


def ports_are_free(first, count):
    """Returns whether `count` consecutive local ports, starting at `first`, are not in use."""
    with contextlib.ExitStack() as stack:
        try:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
        except OSError:
            return False
    return True


@pytest.mark.slow
def test_only_the_chief_checks_the_images(tmp_path):
    dataset = write_folder(tmp_path / "images", 20, *"ab")
    (tmp_path / "images/a/0.png").write_text("not an image")
    jobs, addresses = ("chief", "worker"), free_addresses(2)
    cluster = {job: [address] for job, address in zip(jobs, addresses)}
    environments = [
        {"TF_CONFIG": tf_config(cluster, job), "XDG_CACHE_HOME": str(tmp_path / job)}
        for job in jobs
    ]
    settings = {
        **SETTINGS,
        "dataset": dataset,
        "train_split": "train",
        "train_steps": 1,
        "corrupt_images": "skip",
        "eval_split": "train",
    }
    printed = run_workers([tmp_path / "run"] * 2, settings, environments=environments)
    assert "skipped: 1 of 40 images cannot be used: a/0.png" in printed[0]
    assert [(tmp_path / job / "simclr-tf2").exists() for job in jobs] == [True, False]
    stopped = run_workers(
        [tmp_path / "run"] * 2,
        {**settings, "corrupt_images": "error"},
        status=2,
        environments=environments,
    )
    assert all("1 of 40 images cannot be used: a/0.png (not an image" in text for text in stopped)


@pytest.mark.slow
def test_workers_with_different_flags_are_rejected(tmp_path):
    changed = {**SETTINGS, "learning_rate": 0.2}
    for text in run_workers([tmp_path / "run"] * 2, SETTINGS, changed, status=2):
        assert "error: TF_CONFIG: the workers were started with different flags" in text
