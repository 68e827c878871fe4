"""Kills trainings for a while, and checks that each ends as if never killed: `make soak`.

    python tests/faults/soak.py [--minutes=20] [--kills=40] [--seed=0]

One device, two replicas, and two hosts take turns. Each is killed at random moments, by SIGKILL or SIGTERM, on one host
or on both, until it has come to its end; then its weights, slots and results are compared, bit by bit, with those of a
run that nothing happened to. Goes on until both time and kills are up. Prints a table as Markdown.
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
from support.addresses import free_addresses, tf_config  # noqa: E402

_STEPS = dict(device=400, replicas=200, hosts=100)
_TITLES = dict(device="one device", replicas="two replicas", hosts="two hosts")
_LEAST_SECONDS = 3  # until a kill; at most as many as the run that nothing happens to takes


def environments(kind):
    """What tells each process of a run its part."""
    if kind == "hosts":
        addresses = free_addresses(2)
        return [{"TF_CONFIG": tf_config({"worker": addresses}, index=index)} for index in range(2)]
    return [{"REPLICAS": "2"} if kind == "replicas" else {}]


def start(kind, directory):
    """The processes of one run, each with its log; the second host, which leaves nothing, has the same directory."""
    return [processes.start(directory, environment, log_path(directory, index), train_steps=_STEPS[kind])
            for index, environment in enumerate(environments(kind))]


def log_path(directory, index):
    """Where process `index` prints to."""
    return directory.with_name(f"{directory.name}_{index}.log")


def last_line(directory, index):
    """The last of what process `index` printed, "" if there is none."""
    return (log_path(directory, index).read_text().splitlines() or [""])[-1]


def stop(kind, started, directory, draw):
    """Ends processes by a random signal, one or all; returns what was done, None if they had finished before."""
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    victims = draw.choice([started, started[:1], started[-1:]])
    if any(process.poll() is not None for process in started):
        return None
    for process in victims:
        process.send_signal(number)
    end_survivors(started, directory)
    # By SIGTERM: 75; -15 before it is looked for; 0 after the last safe point. Hosts that have lost another: 75, or 0
    # if nothing was left to do together; -9 if the other was lost while they met.
    allowed = {signal.SIGKILL: {-9}, signal.SIGTERM: {75, -15, 0}}[number] | ({75, 0, -9} if kind == "hosts" else set())
    statuses = [process.returncode for process in started]
    if not set(statuses) <= allowed:
        fail(statuses, number.name, directory)
    return number.name if any(statuses) else None


def end_survivors(started, directory):
    """Returns when all have ended: a host that has lost another does so by itself, unless they have not met yet."""
    deadline, told = time.monotonic() + 150, set()
    while any(process.poll() is None for process in started):
        time.sleep(0.2)
        late = time.monotonic() > deadline
        for index, process in enumerate(started):
            if process.poll() is None and "waiting for" in last_line(directory, index) and index not in told:
                process.terminate()  # It waits for a host that nobody starts again.
                told.add(index)
            elif process.poll() is None and late and "hosts are reachable" in last_line(directory, index):
                process.kill()  # Lost in the moment of connecting: TensorFlow waits, and catches SIGTERM.
            elif process.poll() is None and late:
                process.kill()
                fail([process.poll() for process in started], "150 seconds", directory)


def fail(statuses, what, directory):
    """Ends the soak."""
    logs = [path.read_text()[-5000:] for path in sorted(directory.parent.glob(f"{directory.name}_*.log"))]
    raise SystemExit("\n\n".join([f"{directory.name}: exit statuses {statuses} after {what}", *logs]))


def run_whole(kind, directory):
    """A run that nothing happens to; returns how many seconds it took."""
    begin = time.monotonic()
    statuses = [process.wait(600) for process in start(kind, directory)]
    if any(statuses):
        fail(statuses, "no signal", directory)
    return time.monotonic() - begin


def one_round(kind, whole, longest, directory, draw, counts):
    """Kills a run until it finishes, then compares; `longest`: seconds until a kill."""
    while True:
        started = start(kind, directory)
        deadline = time.monotonic() + draw.uniform(_LEAST_SECONDS, longest)
        while time.monotonic() < deadline and all(process.poll() is None for process in started):
            time.sleep(0.05)
        done = stop(kind, started, directory, draw)
        if done:
            counts[kind, done] += 1
            continue
        statuses = [process.wait(600) for process in started]
        if any(statuses):
            fail(statuses, "no signal", directory)
        processes.assert_same_run(whole, directory, _STEPS[kind])
        counts[kind, "same"] += 1
        return


def main():
    """Runs until time and kills are up; any difference is an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, counts, begin = random.Random(arguments.seed), collections.Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        wholes, longest, number = {}, {}, 0
        for kind in _STEPS:
            wholes[kind] = pathlib.Path(scratch, f"whole_{kind}")
            longest[kind] = run_whole(kind, wholes[kind])
            print(f"{kind}: a whole run takes {longest[kind]:.0f} s", flush=True)
        while True:
            for kind in _STEPS:
                number += 1
                one_round(kind, wholes[kind], longest[kind], pathlib.Path(scratch, f"{kind}_{number}"), draw, counts)
                kills = sum(count for (_, what), count in counts.items() if what != "same")
                minutes = (time.monotonic() - begin) / 60
                told = json.dumps({" ".join(what): count for what, count in counts.items()})
                print(f"{minutes:.1f} minutes, {kills} kills: {told}", flush=True)
            if minutes >= arguments.minutes and kills >= arguments.kills:
                break
    print("\n| | SIGKILL | SIGTERM | runs that ended as if never killed |\n|---|---|---|---|")
    for kind in _STEPS:
        print(f"| {_TITLES[kind]} | {counts[kind, 'SIGKILL']} | {counts[kind, 'SIGTERM']} | {counts[kind, 'same']} |")


if __name__ == "__main__":
    main()
