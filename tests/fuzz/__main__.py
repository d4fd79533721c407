"""The command line of the fuzzer: see the package's docstring."""

import argparse
import faulthandler
import json
import os
import random
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter

from tests.fuzz import OPERATIONS, SHARES
from tests.fuzz.draw import Draw
from tests.fuzz.judge import FaultError
from tests.fuzz.judge import select as select_isa

CASE_SECONDS = 90
MEMORY = 12 << 30  # of address space; a call that wants more gets a MemoryError


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz the public API."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="OPERATION", help="one or several, with commas between")
    parser.add_argument("--case", type=int, help="only this one, in this process; needs --only")
    parser.add_argument(
        "--keep-going", type=int, default=20, metavar="N", help="stop after N faults"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else sorted(OPERATIONS)
    if unknown := set(names) - set(OPERATIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: not among {', '.join(OPERATIONS)}")
    if arguments.case is not None:
        if arguments.only is None:
            parser.error("--case needs --only")
        return _case(arguments.seed, names[0], arguments.case)
    if arguments.child is not None:
        return _child(arguments.seed, names, arguments.child)
    return _parent(arguments)


def _run(seed, name, number):
    draw = Draw(seed, name, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's; those of calls are errors there
        OPERATIONS[name](draw, select_isa(draw))


def _case(seed, name, number):
    faulthandler.enable()
    _run(seed, name, number)
    print("no fault")
    return 0


def _child(seed, names, number):
    """Cases from `number` on, until killed: says which one begins, and what came of it."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    shares = [SHARES.get(name, 1) for name in names]
    say = os.fdopen(os.dup(1), "w", buffering=1)
    while True:
        (name,) = random.Random(f"{seed}/{number}").choices(names, shares)
        print(json.dumps([number, name]), file=say)
        try:
            _run(seed, name, number)
        except FaultError as fault:
            print(json.dumps([number, name, str(fault)]), file=say)
        except Exception:
            print(json.dumps([number, name, traceback.format_exc(limit=-6)]), file=say)
        number += 1


def _parent(arguments):
    counts, faults = Counter(), Counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _hunt(arguments, counts, faults)
    except KeyboardInterrupt:
        print("interrupted")
    width = max(map(len, counts), default=0)
    for name in sorted(counts):
        print(f"{name:{width}}  {counts[name]:7} cases  {faults[name]:3} faults")
    print(f"{'all':{width}}  {sum(counts.values()):7} cases  {sum(faults.values()):3} faults")
    return 1 if faults else 0


def _hunt(arguments, counts, faults):
    """One child after the other until the time is over, and what they found."""
    deadline = time.monotonic() + 60 * arguments.minutes
    number = 0
    while time.monotonic() < deadline and sum(faults.values()) < arguments.keep_going:
        for latest, name, fault in _watch(arguments, number, deadline):
            number = latest
            if fault is None:
                counts[name] += 1
                continue
            faults[name] += 1
            print(f"FAULT in {name}: {fault}")
            print(
                f"    python -m tests.fuzz --seed {arguments.seed} --only {name} --case {number}",
                flush=True,
            )
            if sum(faults.values()) >= arguments.keep_going:
                break
        number += 1


def _watch(arguments, number, deadline):
    """Cases of one child, from that number on, until it ends or the time is over."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--seed",
        str(arguments.seed),
        "--child",
        str(number),
    ]
    if arguments.only:
        command += ["--only", arguments.only]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        name, pending = None, b""
        try:
            while True:
                if time.monotonic() >= deadline:
                    return
                # The last case may take its time, too.
                ready, _, _ = select.select([child.stdout], [], [], CASE_SECONDS)
                if not ready:
                    yield number, name, f"no end after {CASE_SECONDS} seconds"
                    return
                chunk = os.read(child.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    number, name, *fault = json.loads(line)
                    yield number, name, fault[0] if fault else None
        finally:
            child.kill()
        status = child.wait()
        what = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        yield number, name or "start", f"the process ended: {what}"


if __name__ == "__main__":
    sys.exit(main())
