"""Soak test (`make soak`): kills runs at random times and compares them with uninterrupted runs.

    python tests/faults/soak.py [--minutes=20] [--kills=40] [--seed=0]

Cycles through runs on one device, two replicas and two workers. Each run is killed at random times
with SIGKILL or SIGTERM, on one or both workers, and restarted until it finishes. Its weights,
optimizer slots and results must then be bit-identical to those of an uninterrupted run. The test
continues until both --minutes and --kills are reached, and then prints a Markdown table.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[2])]

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from support import processes  # noqa: E402
from support.addresses import worker_environments  # noqa: E402

_STEPS = dict(device=400, replicas=200, workers=100)
_TITLES = dict(device="one device", replicas="two replicas", workers="two workers")
_MIN_SECONDS = 3  # Minimum time until a kill. The maximum is the duration of the uninterrupted run.


def environments(setup):
    """Returns a list with the additional environment variables of each process of a run."""
    if setup == "workers":
        return worker_environments(2)
    return [{"REPLICAS": "2"} if setup == "replicas" else {}]


def start(setup, directory):
    """Starts the processes of one run, each with its own log. The workers share the directory."""
    return processes.start_workers(directory, environments(setup), train_steps=_STEPS[setup])


def last_line(directory, index):
    """Returns the last line in the log of process `index`, or "" if the log is empty."""
    return (processes.log_of(f"{directory}_{index}").splitlines() or [""])[-1]


def stop(setup, run_processes, directory, generator):
    """Sends a random signal to one process or to all. Returns the signal name, or None if the run had finished."""
    signal_number = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    victims = generator.choice([run_processes, run_processes[:1], run_processes[-1:]])
    if any(process.poll() is not None for process in run_processes):
        return None
    for process in victims:
        process.send_signal(signal_number)
    end_survivors(run_processes, directory)
    # SIGTERM leads to status 75. If it arrives before the handler is installed, the status is -15,
    # and if it arrives after the last safe point, the status is 0. A worker that lost its peer
    # exits with 75, with 0 if no collective operations remained, or with -9 if it was killed during
    # the rendezvous.
    allowed = {signal.SIGKILL: {-9}, signal.SIGTERM: {75, -15, 0}}[signal_number]
    allowed |= {75, 0, -9} if setup == "workers" else set()
    statuses = [process.returncode for process in run_processes]
    if not set(statuses) <= allowed:
        fail(statuses, signal_number.name, directory)
    return signal_number.name if any(statuses) else None


def end_survivors(run_processes, directory):
    """Waits until all processes have exited. Terminates workers that lost their peer during the rendezvous."""
    deadline, terminated = time.monotonic() + 150, set()
    while any(process.poll() is None for process in run_processes):
        time.sleep(0.2)
        late = time.monotonic() > deadline
        for index, process in enumerate(run_processes):
            if (
                process.poll() is None
                and "waiting for" in last_line(directory, index)
                and index not in terminated
            ):
                process.terminate()  # This worker is waiting for a peer that will not be restarted.
                terminated.add(index)
            elif (
                process.poll() is None
                and late
                and "workers are reachable" in last_line(directory, index)
            ):
                # If a peer dies during connection setup, TensorFlow hangs and intercepts SIGTERM.
                process.kill()
            elif process.poll() is None and late:
                process.kill()
                fail([process.poll() for process in run_processes], "150 seconds", directory)


def fail(statuses, event, directory):
    """Exits with a message that contains the run's exit statuses and logs."""
    logs = [
        path.read_text()[-5000:]
        for path in sorted(directory.parent.glob(f"{directory.name}_*.log"))
    ]
    raise SystemExit(
        "\n\n".join([f"{directory.name}: exit statuses {statuses} after {event}", *logs])
    )


def run_uninterrupted(setup, directory):
    """Runs the setup without interruption. Returns the duration in seconds."""
    begin = time.monotonic()
    statuses = [process.wait(600) for process in start(setup, directory)]
    if any(statuses):
        fail(statuses, "no signal", directory)
    return time.monotonic() - begin


def run_with_kills(setup, reference, max_seconds, directory, generator, counts):
    """Kills and restarts a run until it finishes, and compares it with `reference`.

    The time from each start to the next kill is random, and at most `max_seconds`.
    """
    while True:
        run_processes = start(setup, directory)
        deadline = time.monotonic() + generator.uniform(_MIN_SECONDS, max_seconds)
        while time.monotonic() < deadline and all(
            process.poll() is None for process in run_processes
        ):
            time.sleep(0.05)
        signal_name = stop(setup, run_processes, directory, generator)
        if signal_name:
            counts[setup, signal_name] += 1
            continue
        statuses = [process.wait(600) for process in run_processes]
        if any(statuses):
            fail(statuses, "no signal", directory)
        processes.assert_same_run(reference, directory, _STEPS[setup])
        counts[setup, "same"] += 1
        return


def main():
    """Runs the soak test. Exits with an error at the first difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator, counts, begin = (
        random.Random(arguments.seed),
        collections.Counter(),
        time.monotonic(),
    )
    with tempfile.TemporaryDirectory() as scratch:
        references, durations, num_runs = {}, {}, 0
        for setup in _STEPS:
            references[setup] = pathlib.Path(scratch, f"uninterrupted_{setup}")
            durations[setup] = run_uninterrupted(setup, references[setup])
            print(f"{setup}: an uninterrupted run takes {durations[setup]:.0f} s", flush=True)
        while True:
            for setup in _STEPS:
                num_runs += 1
                run_with_kills(
                    setup,
                    references[setup],
                    durations[setup],
                    pathlib.Path(scratch, f"{setup}_{num_runs}"),
                    generator,
                    counts,
                )
                kills = sum(count for (_, event), count in counts.items() if event != "same")
                minutes = (time.monotonic() - begin) / 60
                summary = json.dumps({" ".join(key): count for key, count in counts.items()})
                print(f"{minutes:.1f} minutes, {kills} kills: {summary}", flush=True)
            if minutes >= arguments.minutes and kills >= arguments.kills:
                break
    print("\n| | SIGKILL | SIGTERM | runs identical to an uninterrupted run |\n|---|---|---|---|")
    for setup in _STEPS:
        cells = " | ".join(str(counts[setup, event]) for event in ("SIGKILL", "SIGTERM", "same"))
        print(f"| {_TITLES[setup]} | {cells} |")


if __name__ == "__main__":
    main()
