"""Kills trainings for a while, and checks that each ends as if never killed: `make soak`.

    python tests/faults/soak.py [--minutes=20] [--kills=40] [--seed=0]

One device, two replicas, and two hosts take turns. Each is killed at random moments, by SIGKILL or SIGTERM, on one host
or on both, until it has come to its end; then its weights, slots and results are compared, bit by bit, with those of a
run that nothing happened to. Goes on until both time and kills are up. Prints a table as Markdown.
"""

import argparse
import collections
import json
import pathlib
import random
import signal
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1]),
                str(pathlib.Path(__file__).parents[2])]

import processes  # noqa: E402

from hosts_test import free_addresses, tf_config  # noqa: E402

_STEPS = dict(device=400, replicas=200, hosts=100)
_LEAST_SECONDS = 3  # until a kill; at most as many as the run that nothing happens to takes


def environments(kind):
    """What tells each process of a run its part."""
    if kind == "hosts":
        addresses = free_addresses(2)
        return [{"TF_CONFIG": tf_config({"worker": addresses}, index=index)} for index in range(2)]
    return [{"REPLICAS": "2"} if kind == "replicas" else {}]


def start(kind, directory):
    """The processes of one run; the second host, which leaves nothing, has the same directory."""
    return [processes.start(directory, environment, train_steps=_STEPS[kind]) for environment in environments(kind)]


def stop(kind, started, directory, draw):
    """Ends processes by a random signal, one or all; returns what was done, None if they had finished before."""
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    victims = draw.choice([started, started[:1], started[-1:]])
    if any(process.poll() is not None for process in started):
        return None
    for process in victims:
        process.send_signal(number)
    deadline = time.monotonic() + 150
    for process in started:  # A host that has lost another ends by itself.
        process.wait(max(deadline - time.monotonic(), 1))
    # By SIGTERM: 75; -15 before it is looked for; 0 after the last safe point. Hosts that have lost another: 75, or 0
    # if nothing was left to do together.
    allowed = {signal.SIGKILL: {-9}, signal.SIGTERM: {75, -15, 0}}[number] | ({75, 0} if kind == "hosts" else set())
    statuses = [process.returncode for process in started]
    if not set(statuses) <= allowed:
        fail(statuses, number.name, directory)
    return number.name if any(statuses) else None


def fail(statuses, what, directory):
    """Ends the soak."""
    raise SystemExit(f"exit statuses {statuses} after {what}: {processes.log_of(directory)[-5000:]}")


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
        print(f"| {kind} | {counts[kind, 'SIGKILL']} | {counts[kind, 'SIGTERM']} | {counts[kind, 'same']} |")


if __name__ == "__main__":
    main()
