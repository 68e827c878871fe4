"""Several hosts: what TF_CONFIG may say, and two processes on loopback that do what one does."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import evaluate
from runtime import devices, hosts, signals
from runtime.errors import Stopped, UserError
from sources import digits
from support import host_worker
from support.addresses import free_addresses, tf_config

CLUSTER = {"worker": ["a:1", "b:1"]}

# ------------------------------------------------------------------------------------------------------- TF_CONFIG


@pytest.mark.parametrize("text, words", [
    ("{cluster: 1}", "is not the JSON"), ("[1]", "is not the JSON"), ('{"cluster": 5}', "is not the JSON"),
    (json.dumps({"cluster": CLUSTER}), "the task is missing"),
    (json.dumps({"cluster": CLUSTER, "task": {"type": "worker"}}), "the task is missing"),
    (tf_config(CLUSTER, "chief"), "type 'chief' is not in the cluster: use worker"),
    (tf_config(CLUSTER, "evaluator"), "type 'evaluator' is not in the cluster"),
    (tf_config(CLUSTER, index=2), "index 2 is beyond the 2 addresses of worker"),
    (tf_config({"worker": ["a:1"]}, index=1), "index 1 is beyond the 1 addresses"),
    (tf_config(CLUSTER, index=-1), "index -1 is not a whole number"),
    (tf_config(CLUSTER, index=0.5), "index 0.5 is not a whole number"),
    (tf_config(CLUSTER, index="first"), "index 'first' is not a whole number"),
    (tf_config(CLUSTER, index=True), "index True is not a whole number"),
    (tf_config({"worker": ["a:1", "a:1"]}), "a:1 is listed twice"),
    (tf_config({"chief": ["a:1"], "worker": ["a:1"]}), "a:1 is listed twice"),
    (tf_config({"chief": ["a:1", "b:1"]}, "chief"), "several chiefs"),
    (tf_config({"worker": ["a", "b:1"]}), "'a' is not an address: write host:port"),
    (tf_config({"worker": [1, 2]}), "1 is not an address"),
    (tf_config({"worker": ["a:65536", "b:1"]}), "ports are from 1 to 65535"),
    (tf_config({"worker": "a:1"}), "worker must be a list"),
    (tf_config({**CLUSTER, "ps": ["c:1"]}), "'ps', which is not used here"),
    (tf_config({**CLUSTER, "evaluator": ["c:1"]}), "'evaluator', which is not used here")])
def test_a_tf_config_that_cannot_work_is_told_in_one_line(text, words, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match=words) as error:
        hosts.count_hosts()
    assert "TF_CONFIG" in str(error.value) and "\n" not in str(error.value)


NOT_JSON, NOT_AN_ADDRESS, NOT_AN_INDEX = "is not the JSON", "is not an address", "is not a whole number"
TASK = {"type": "worker", "index": 0}


def two_workers(address):
    """A TF_CONFIG with an address as the second of two."""
    return tf_config({"worker": ["a:1", address]})


@pytest.mark.parametrize("text, words", [
    ("null", NOT_JSON), ("0", NOT_JSON), ("false", NOT_JSON), ('""', NOT_JSON), ("[]", NOT_JSON), ("NaN", NOT_JSON),
    (" ", NOT_JSON), ("\ufeff{}", NOT_JSON), ("{'cluster': {}}", NOT_JSON), ('{"cluster": {}} {}', NOT_JSON),
    ("[" * 100_000, NOT_JSON), ('{"cluster": null}', NOT_JSON), ('{"cluster": []}', NOT_JSON),
    ('{"cluster": "worker"}', NOT_JSON), ('{"cluster": [["worker", ["a:1", "b:1"]]]}', NOT_JSON),
    (os.fsdecode(b'{"cluster": {"worker": ["\xff:1"]}}'), NOT_JSON),
    (os.fsdecode(b'{"comment": "\xff"}'), NOT_JSON),
    ('{"cluster": {"worker": ["a:1"]}, "cluster": {"worker": ["a:1", "b:1"]}}', "a key is given twice"),
    ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', "a key is given twice"),
    ('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0, "index": 1}}', "given twice"),
    (json.dumps({"cluster": CLUSTER, "task": None}), NOT_JSON),
    (json.dumps({"cluster": CLUSTER, "task": []}), NOT_JSON),
    (json.dumps({"cluster": CLUSTER, "task": [["type", "worker"], ["index", 0]]}), NOT_JSON),
    (json.dumps({"cluster": CLUSTER, "task": "worker"}), NOT_JSON),
    (json.dumps({"cluster": CLUSTER, "task": 1}), NOT_JSON),
    (json.dumps({"cluster": CLUSTER, "task": {}}), "the task is missing"),
    (tf_config({"worker": None}), "must be a list"), (tf_config({"worker": ""}), "must be a list"),
    (tf_config({"worker": 0}), "must be a list"), (tf_config({"worker": {"0": "a:1"}}), "must be a list"),
    (tf_config({"": ["a:1"]}), "'', which is not used"),
    (tf_config({"Worker": ["a:1"]}), "'Worker', which is not used"),
    (tf_config({"worker": ["a:1", ["b:1"]]}), NOT_AN_ADDRESS),
    (tf_config({"worker": [["a:1", "b:1"]]}), NOT_AN_ADDRESS),
    (tf_config({"worker": ["a:1", None]}), NOT_AN_ADDRESS), (tf_config({"worker": ["a:1", {}]}), NOT_AN_ADDRESS),
    (tf_config({"worker": ["a:1", True]}), NOT_AN_ADDRESS),
    (two_workers(""), NOT_AN_ADDRESS), (two_workers(":2222"), NOT_AN_ADDRESS), (two_workers("b:"), NOT_AN_ADDRESS),
    (two_workers("b: 1"), NOT_AN_ADDRESS), (two_workers("b :1"), NOT_AN_ADDRESS),
    (two_workers("b:1\n"), NOT_AN_ADDRESS),
    (two_workers("b:1/"), NOT_AN_ADDRESS), (two_workers("grpc://b:1"), NOT_AN_ADDRESS),
    (two_workers("b:-1"), NOT_AN_ADDRESS),
    (two_workers("b:1.0"), NOT_AN_ADDRESS), (two_workers("b:\u0662\u0662\u0662\u0662"), NOT_AN_ADDRESS),
    (two_workers("b:\u00b2"), NOT_AN_ADDRESS), (two_workers("h\u00f6st:1"), NOT_AN_ADDRESS),
    (two_workers("\ud800:1"), NOT_AN_ADDRESS), (two_workers("b\x1b[31m:1"), NOT_AN_ADDRESS),
    (two_workers("a..b:1"), NOT_AN_ADDRESS), (two_workers("b" * 64 + ":1"), NOT_AN_ADDRESS),
    (two_workers("b." * 130 + ":1"), NOT_AN_ADDRESS),
    (two_workers("::1:2222"), NOT_AN_ADDRESS), (two_workers("[::g]:1"), NOT_AN_ADDRESS),
    (two_workers("[::1]"), NOT_AN_ADDRESS),
    (two_workers("[]:1"), NOT_AN_ADDRESS), (two_workers("[a]:1"), NOT_AN_ADDRESS),
    (two_workers("b:0"), "ports are from 1"), (two_workers("b:" + "9" * 5000), "ports are from 1"),
    (two_workers("A:1"), "listed twice"), (two_workers("a:01"), "listed twice"),
    (tf_config(CLUSTER, None), "type None is not in"), (tf_config(CLUSTER, ["worker"]), "is not in the cluster"),
    (tf_config(CLUSTER, {}), "is not in the cluster"), (tf_config(CLUSTER, 0), "type 0 is not in"),
    (tf_config(CLUSTER, ""), "type '' is not in"),
    (tf_config({**CLUSTER, "chief": []}, "chief"), "is not in the cluster"),
    (tf_config(CLUSTER, index=None), NOT_AN_INDEX), (tf_config(CLUSTER, index=""), NOT_AN_INDEX),
    (tf_config(CLUSTER, index=[0]), NOT_AN_INDEX), (tf_config(CLUSTER, index={}), NOT_AN_INDEX),
    (tf_config(CLUSTER, index="-0"), NOT_AN_INDEX), (tf_config(CLUSTER, index="\u0661"), NOT_AN_INDEX),
    (tf_config(CLUSTER, index="\u00b2"), NOT_AN_INDEX), (tf_config(CLUSTER, index="1\n"), NOT_AN_INDEX),
    (tf_config(CLUSTER, index=False), NOT_AN_INDEX), (tf_config(CLUSTER, index=0.0), NOT_AN_INDEX),
    (tf_config(CLUSTER, index=1e300), NOT_AN_INDEX), (tf_config(CLUSTER, index=float("nan")), NOT_JSON),
    (tf_config(CLUSTER, index=float("inf")), NOT_JSON), (tf_config(CLUSTER, index=10**200), "is beyond the 2"),
    (tf_config(CLUSTER, index="9" * 5000), "is beyond the 2"),
    (json.dumps({"cluster": CLUSTER, "task": TASK})[:-1] + ', "index": ' + "9" * 5000 + "}", NOT_JSON)])
def test_a_malformed_tf_config_is_refused_in_one_line(text, words, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(UserError, match=words) as error:
        hosts.count_hosts()
    assert "TF_CONFIG" in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("text, count", [
    ("", 1), ("{}", 1), ('{"task": {"type": "worker", "index": 3}}', 1), (tf_config({"worker": ["a:1"]}), 1),
    (tf_config({"chief": ["a:1"], "worker": []}, "chief"), 1), (tf_config(CLUSTER, index=1), 2),
    (tf_config(CLUSTER, index="1"), 2), (tf_config({"worker": ["[::1]:2222", "my_host-1.example.com.:2222"]}), 2),
    (tf_config({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, index=1), 3)])
def test_hosts_are_counted(text, count, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert hosts.count_hosts() == count


def test_one_host_is_as_none(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": ["a:1"]}))
    hosts.check_multi_host_settings(use_tpu=False, mode="eval", seed=None)
    strategy = devices.make_strategy()
    assert strategy is tf.distribute.get_strategy() and devices.is_chief(strategy)


@pytest.mark.parametrize("settings, words", [
    (dict(seed=None), "--seed must be given"), (dict(seed=1, mode="eval"), "--mode=eval runs on one host"),
    (dict(seed=1, use_tpu=True), "--use_tpu: one process")])
def test_what_several_hosts_do_not_bear_is_told_before_they_wait(settings, words, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(CLUSTER))
    with pytest.raises(UserError, match=words):
        hosts.check_multi_host_settings(**{"use_tpu": False, "mode": "train", **settings})


@pytest.mark.parametrize("cluster, job, index, chief", [
    (CLUSTER, "worker", 0, True), (CLUSTER, "worker", 1, False),
    ({"chief": ["a:1"], "worker": ["b:1"]}, "chief", 0, True),
    ({"chief": ["a:1"], "worker": ["b:1"]}, "worker", 0, False)])
def test_one_host_is_the_chief(cluster, job, index, chief, monkeypatch):
    class Strategy:
        cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()

    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, job, index))
    assert devices.is_chief(Strategy) == chief


def test_a_host_waits_for_the_others_and_names_those_that_are_missing(monkeypatch, capsys):
    own, *others = free_addresses(3)
    monkeypatch.setattr(hosts, "_ASK_SECONDS", 0.05)
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": [own, *others]}))
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(hosts.wait_for_hosts)
        for address in others:
            time.sleep(0.3)
            assert not waiting.done() and hosts._answers(own)
            stack.enter_context(socket.create_server(("", int(address.rpartition(":")[2]))))
        assert waiting.result(10) is None
    assert not hosts._answers(own)
    warning, *lines = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: ") and "without authentication: trusted networks only" in warning
    assert lines == [
        f"worker 0: waiting for {others[0]}, {others[1]} (TF_CONFIG)", f"worker 0: waiting for {others[1]} (TF_CONFIG)",
        "all 3 hosts are there"]


def test_a_host_asks_as_often_as_it_takes(monkeypatch):
    own, other = free_addresses(2)
    monkeypatch.setattr(hosts, "_ASK_SECONDS", 0.001)
    monkeypatch.setattr(socket, "SOMAXCONN", 2)  # More are refused unless those that were answered are taken away.
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": [own, other]}))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting, answered = pool.submit(hosts.wait_for_hosts), []
        for _ in range(9):
            time.sleep(0.1)
            answered.append(hosts._answers(own))
        with socket.create_server(("", int(other.rpartition(":")[2]))):
            waiting.result(10)
    assert answered == [True] * 9


def test_a_signal_ends_the_wait_for_other_hosts(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": free_addresses(2)}))
    timer = threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGTERM])
    with signals.StopSignals() as stop, pytest.raises(Stopped, match="stopped by SIGTERM"), \
            stop.interruptible():
        timer.start()
        hosts.wait_for_hosts()


def test_a_port_that_is_taken_is_told(monkeypatch):
    addresses = free_addresses(2)
    monkeypatch.setenv("TF_CONFIG", tf_config({"worker": addresses}))
    with socket.create_server(("", int(addresses[0].rpartition(":")[2]))), \
            pytest.raises(UserError, match="TF_CONFIG: port .* cannot be used .Address already in use"):
        hosts.wait_for_hosts()


@pytest.mark.parametrize("hosts", [2, 3])
def test_each_host_trains_on_its_share(hosts):
    source, parts = digits.digits_source(), []
    for host in range(hosts):
        parts.append([int(key) for key, _, _ in source.records("train[:60]", 5, hosts, host)])
    whole = [int(key) for key, _, _ in source.records("train[:60]", 5)]
    assert sorted(sum(parts, [])) == sorted(whole) and len(set(whole)) == 60
    size = 60 // hosts // 5
    for batch in range(5):  # the hosts' batches together are the whole's batch
        joined = set().union(*(part[batch * size:(batch + 1) * size] for part in parts))
        assert joined == set(whole[batch * size * hosts:(batch + 1) * size * hosts])


# ---------------------------------------------------------------------------------------------------- two processes


SETTINGS = dict(
    dataset="digits", resnet_depth=10, image_size=8, train_split="train[:64]", train_batch_size=16, num_proj_layers=2,
    proj_out_dim=16, seed=7, color_jitter_strength=0.0, learning_rate=0.3, warmup_epochs=0, use_blur=False,
    linear_head_learning_rate=0.1, train_steps=3, eval_split="test[:101]", eval_batch_size=14)
FINISH = dict(train_steps=5, mode="train_then_eval", eval_protocol="linear_head,lbfgs,knn,contrastive")
TOLERANCE = 1e-9


def run_hosts(directories, settings, seconds=300, status=0):
    """Runs a process for each directory as `model_dir`, and returns what they printed.

    `settings` are those of all, or a list with those of each. Fails, with all that was printed, unless all end with
    `status` in time.
    """
    settings = settings if isinstance(settings, list) else [settings] * len(directories)
    addresses = free_addresses(len(directories))
    with contextlib.ExitStack() as stack:
        logs, processes = [], []
        for index, directory in enumerate(directories):
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            environment = {**os.environ, "TF_CONFIG": tf_config({"worker": addresses}, index=index)}
            processes.append(subprocess.Popen(
                [sys.executable, host_worker.__file__, json.dumps({**settings[index], "model_dir": str(directory)})],
                env=environment, stdout=logs[-1], stderr=subprocess.STDOUT))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            time.sleep(0.1)
        printed = []
        for log in logs:
            log.seek(0)
            printed.append(log.read())
        statuses = [process.poll() for process in processes]
        assert statuses == [status] * len(processes), "\n".join([f"exit status {statuses}", *printed])
    return printed


def assert_same_checkpoint(one, two, step):
    """All of the two files agree to `TOLERANCE` of the largest entry of each array."""
    readers = [tf.train.load_checkpoint(str(pathlib.Path(path, f"ckpt-{step}"))) for path in (one, two)]
    shapes = [reader.get_variable_to_shape_map() for reader in readers]
    assert shapes[0] == shapes[1] and sum("Momentum" in key for key in shapes[0]) > 30
    for key in shapes[0]:
        if "OBJECT_GRAPH" not in key:
            ours, theirs = (reader.get_tensor(key) for reader in readers)
            np.testing.assert_allclose(theirs, ours, rtol=0, atol=TOLERANCE * np.abs(ours).max() + 1e-15, err_msg=key)


@pytest.mark.slow
def test_two_hosts_train_resume_and_evaluate_as_one(tmp_path, float64):
    one, two, elsewhere = (tmp_path / name for name in ("one", "two", "elsewhere"))
    host_worker.run({**SETTINGS, "model_dir": str(one)})
    run_hosts([two, elsewhere], SETTINGS)
    assert not elsewhere.exists()
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert_same_checkpoint(one, two, 3)

    host_worker.run({**SETTINGS, **FINISH, "model_dir": str(one)})
    printed = run_hosts([two, two], {**SETTINGS, **FINISH})
    assert all("resumed at step 3" in text for text in printed)
    assert "linear head, top-1" in printed[0] and "linear head, top-1" not in printed[1]
    assert_same_checkpoint(one, two, 5)
    results = [json.loads((path / "result.json").read_text()) for path in (one, two)]
    assert {evaluate.LINEAR_TOP_1, evaluate.LBFGS, evaluate.KNN, "eval/contrast_loss"} <= set(results[0])
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert files_in(two) == files_in(one)


@pytest.mark.slow
def test_two_hosts_take_the_same_share_of_the_labels(tmp_path, float64):
    settings = {**SETTINGS, "train_mode": "supervised", "label_fraction": 0.5, "linear_head_learning_rate": None}
    host_worker.run({**settings, "model_dir": str(tmp_path / "one")})
    run_hosts([tmp_path / "two", tmp_path / "elsewhere"], settings)
    assert_same_checkpoint(tmp_path / "one", tmp_path / "two", 3)


def files_in(directory):
    """Relative paths, but for event files, whose names hold time and host."""
    return {path.relative_to(directory) for path in directory.rglob("*") if "tfevents" not in path.name}


@pytest.mark.slow
def test_hosts_that_do_not_fit_together_are_told(tmp_path):
    with_checkpoint, without = tmp_path / "with", tmp_path / "without"
    with_checkpoint.mkdir()
    tf.train.Checkpoint().write(str(with_checkpoint / "ckpt-3"))
    tf.compat.v1.train.update_checkpoint_state(str(with_checkpoint), "ckpt-3")
    for text in run_hosts([with_checkpoint, without], SETTINGS, status=2):
        assert "error: --model_dir=" in text and "different checkpoints (steps 3, -1" in text
    for text in run_hosts([without, without], [SETTINGS, {**SETTINGS, "learning_rate": 0.2}], status=2):
        assert "error: TF_CONFIG: the hosts were started with different flags" in text
