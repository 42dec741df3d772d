"""Kill one of two processes that train together, and see how the other ends and the run goes on.

The two are forked from this process and speak over gloo; nobody else watches them. They share the
work in turn by one flat message, by DDP and by FSDP2. After the kill the other must end within 60
seconds, by itself and with a sentence. Then the run is resumed with another number of processes,
one or three, and must end; and a copy of its folder is resumed with two, and must end as the run
that nobody killed, bit for bit. Every tenth pair is started by torchrun and killed at any moment,
that of meeting each other included.

With --exchanges the moments are not drawn: each of the two is killed before and after each of its
exchanges, one by one, and each run is resumed with one process. One that has not ended in time is
asked where it is, and how much of a processor it was given.

examples:
  python -m tools.rank_kills --runs 3
  python -m tools.rank_kills --runs 100 --seed 1 --out records/rank-kills-cpu
  python -m tools.rank_kills --exchanges fast
"""

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from tools.kills import KINDS, METHODS, Scenario, differences, outcome, write_data
from tools.ranks import Process, start
from yopo.core import seals
from yopo.runs.settings import validate

BATCH = 18  # in equal shares for one, two or three
OTHERS = (1, 3)  # processes that go on with a run of two
LONG = 40  # epochs of a run that torchrun starts, which takes its time
LIMIT = 60.0  # seconds for the other process to end
PATIENCE = 1800.0  # for a whole run, of two seconds; a busy machine may need many
WAYS = ("flat", "ddp", "fsdp")
EXCHANGES = ("all_reduce", "broadcast", "all_gather", "barrier")
Found = dict[str, Any]


def _die_at_exchange(number: int, after: bool) -> None:
    """From now on this process dies before or after so many of its exchanges."""
    counted = itertools.count(1)

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def exchange(*args: object, **options: object) -> object:
            last = next(counted) == number
            done = real(*args, **options) if after or not last else None
            if last:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return exchange

    for name in EXCHANGES:
        setattr(dist, name, dying(getattr(dist, name)))


def finish(scenario: Scenario, out: Path, world: int) -> list[str]:
    """Train to the end with so many processes; what went wrong."""
    processes = start(scenario, out, world)
    codes = [process.wait(PATIENCE) for process in processes]
    said = [process.words() for process in processes]
    for process in processes:
        process.kill()
        process.close()
    return [] if codes == [0] * world else [f"resumed with {world}: {codes}, {said}"]


def kill_one(scenario: Scenario, out: Path, rng: random.Random) -> Found:
    """Train with two, kill one, and tell how the other ended."""
    processes = start(scenario, out, 2)
    while not all("met" in process.words() for process in processes):
        if any(process.wait(0) is not None for process in processes):
            sys.exit(f"\n{scenario.method}: {[process.words() for process in processes]}")
        time.sleep(0.005)
    rank, after = rng.randrange(2), rng.uniform(0, 1.5)
    time.sleep(after)
    if processes[rank].wait(0) is None:
        os.kill(processes[rank].pid, signal.SIGKILL)
    return {"rank": rank, "after": round(after, 3)} | _other(processes, rank)


def kill_at_exchange(scenario: Scenario, out: Path, rank: int, after: bool, number: int) -> Found:
    """The same at one exchange."""
    processes = start(scenario, out, 2, {rank: partial(_die_at_exchange, number, after)})
    if processes[rank].wait(PATIENCE) not in (0, -signal.SIGKILL):
        sys.exit(f"\n{scenario.method}: {[process.words() for process in processes]}")
    where = f"{'after' if after else 'before'} exchange {number}"
    return {"rank": rank, "where": where} | _other(processes, rank)


def _other(processes: list[Process], rank: int) -> Found:
    """How the other one of two ended, when this one was killed."""
    other, began, found = processes[1 - rank], time.monotonic(), Found(how="forked")
    before, code = other.spent(), other.wait(LIMIT)
    seconds = round(time.monotonic() - began, 2)
    if found_killed := processes[rank].wait(0) in (None, -signal.SIGKILL):
        found |= {"code": code, "seconds": seconds, "of a processor": other.spent() - before}
        if code is None:
            other.tell()
        found["said"] = other.words().removeprefix("met\n")
    for process in processes:
        process.kill()
        process.close()
    return found | {"killed": found_killed}


def kill_one_of_torchrun(scenario: Scenario, out: Path, rng: random.Random) -> Found:
    """The same through torchrun, at any moment after both processes are there."""
    settings = out.with_suffix(".yaml")
    settings.write_text(yaml.safe_dump(validate(scenario.tree).tree()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", "0", "--standalone", "-m", "yopo", "train", str(settings)]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while len(_children(process.pid)) < 2 and process.poll() is None:
        time.sleep(0.05)
    rank, after = rng.randrange(2), rng.uniform(0, 10)
    time.sleep(after)
    found: Found = {"rank": rank, "after": round(after, 3), "how": "torchrun"}
    ranks = _children(process.pid)  # now: a number may soon be another process's
    if process.poll() is not None or len(ranks) < 2:
        process.communicate()
        return found | {"killed": False}
    os.kill(ranks[rank], signal.SIGKILL)
    began = time.monotonic()
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for pid in _children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        said, _ = process.communicate()
    seconds = round(time.monotonic() - began, 2)
    return found | {
        "killed": True,
        "code": process.returncode,
        "seconds": seconds,
        "said": said[-300:],
    }


def _children(pid: int) -> list[int]:
    listed = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return [int(p) for p in subprocess.run(listed, capture_output=True).stdout.split()]


def check(found: Found, scenario: Scenario, out: Path, world: int) -> list[str]:
    """What is wrong after a kill and after the run went on."""
    wrong = []
    if found["killed"] and (found["code"] is None or found["seconds"] > LIMIT):
        wrong.append("the other process did not end")
    elif found["killed"] and found["code"] == 0 and not (out / "result.json").exists():
        wrong.append("the other process ended without a result and without an error")
    elif found["killed"] and found["code"] and found["how"] == "forked":  # torchrun may end it
        told = "cannot reach another one" in found["said"]
        wrong += [] if told else [f"the other process ended without our sentence: {found['said']}"]
    copy = out.with_name(f"{out.name}-two")
    if out.exists():  # else it was killed before it wrote anything
        shutil.copytree(out, copy)
    wrong += finish(scenario, copy, 2)
    wrong += differences(outcome(copy), scenario.expected) if not wrong else []
    wrong += finish(scenario, out, world)
    if wrong:
        return wrong
    lines, torn = seals.read_lines(out / "metrics.jsonl")
    epochs, expected = (
        [line["epoch"] for line in all_of_them if line.get("action") != "rollback"]
        for all_of_them in (lines, scenario.expected["lines"])
    )
    return [] if torn is None and epochs == expected else [f"epochs {epochs}, {torn}"]


def main() -> None:
    """Kill until there are enough; write what was found."""
    args = _options()
    torch.set_num_threads(1)
    began, kills = time.monotonic(), list[Found]()
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
        at = (args.exchanges, args.parallel, Path(folder))
        tries = at_exchanges(*at) if args.exchanges else None
        for found in tries or itertools.islice(at_random(args.seed, Path(folder)), args.runs):
            kills.append(found)
            bad = sum(bool(kill["wrong"]) for kill in kills)
            text = f"\r{len(kills)} runs with a rank killed, {bad} wrong"
            print(text, end="", file=sys.stderr, flush=True)
            for line in found["wrong"]:
                what = f"{found['method']}, {found['parallel']}, {found['kind']}"
                print(f"\n{what}: {line}", file=sys.stderr)
    print(file=sys.stderr)
    text = words(args, kills, time.monotonic() - began)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        kept = [{k: v for k, v in kill.items() if k != "said" or kill["wrong"]} for kill in kills]
        (args.out / "kills.jsonl").write_text("".join(json.dumps(k) + "\n" for k in kept))
        (args.out / "README.md").write_text(text)
    print(text)
    sys.exit(1 if any(kill["wrong"] for kill in kills) else 0)


def at_random(seed: int, folder: Path) -> Iterator[Found]:
    """One method after the other, killed at any moment, resumed with another number of them."""
    rng, count = random.Random(seed), itertools.count()
    data, scenarios = write_data(folder / "data.npz"), dict[tuple[Any, ...], Scenario]()
    names, kinds = [*METHODS], [*KINDS]
    for tries in itertools.count():
        out, world, number = folder / f"run-{tries}", rng.choice(OTHERS), next(count)
        by_torchrun = number % 10 == 9
        name, way = names[tries % len(names)], WAYS[tries % len(WAYS)]
        key = name, way, kinds[tries // len(names) % len(kinds)], by_torchrun
        if key not in scenarios:
            scenarios[key] = scenario = of_two(*key[:3], data)
            if by_torchrun:  # of another interpreter, where nobody provokes a collapse
                scenario.tree["epochs"], scenario.collapses = LONG, False
                scenario.tree["guard"] = {"action": "ignore"}  # nor does one come by itself
            expect(scenario, folder / f"whole-{len(scenarios)}")
        scenario = scenarios[key]
        kill = kill_one_of_torchrun if by_torchrun else kill_one
        found = kill(scenario, out, rng) | _about(scenario) | {"resumed_with": world}
        found["wrong"] = check(found, scenario, out, world)
        if found["killed"] or found["wrong"]:
            yield found
        else:  # it had ended before: again
            count = itertools.count(number)


def at_exchanges(name: str, way: str, folder: Path) -> Iterator[Found]:
    """Each of the two killed before and after each exchange of a run; resumed with one."""
    scenario = of_two(name, way, next(iter(KINDS)), write_data(folder / "data.npz"))
    expect(scenario, folder / "whole")
    for rank, after in itertools.product((0, 1), (False, True)):
        for number in itertools.count(1):
            out = folder / f"run-{rank}-{after}-{number}"
            found = kill_at_exchange(scenario, out, rank, after, number)
            if not found["killed"]:
                break  # there are no more exchanges
            found |= _about(scenario) | {"resumed_with": 1}
            yield found | {"wrong": check(found, scenario, out, 1)}


def of_two(name: str, way: str, kind: str, data: Path) -> Scenario:
    """One whose batch other numbers of processes can share too."""
    scenario = Scenario(name, kind, data)
    scenario.tree["batch"] = BATCH
    scenario.tree["parallel"] = "flat" if name == "pmp" else way  # which it refuses
    return scenario


def _about(scenario: Scenario) -> Found:
    way = scenario.tree["parallel"]
    return {"method": scenario.method, "parallel": way, "kind": scenario.kind}


def expect(scenario: Scenario, out: Path) -> None:
    """Train it once without a kill, and remember how it ends."""
    if wrong := finish(scenario, out, 2):
        sys.exit(f"\nthe unkilled run of {_about(scenario)} failed: {wrong}")
    scenario.expected = outcome(out)


def words(args: argparse.Namespace, kills: list[Found], seconds: float) -> str:
    """The record on a page."""
    root = Path(__file__).parents[1]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    took = {
        kind: [k["seconds"] for k in kills if k["killed"] and k["how"] == kind]
        for kind in ("forked", "torchrun")
    }
    ended = "; ".join(
        f"{len(times)} {kind}, the other ended after {min(times)} to {max(times)} s"
        for kind, times in took.items()
        if times
    )
    counts = Counter(k["parallel"] for k in kills)
    ways = "Gradients went " + ", ".join(f"{counts[way]} times by {way}" for way in WAYS)
    again = [sum(k["resumed_with"] == n for k in kills) for n in OTHERS]
    how = f"--exchanges {args.exchanges} --parallel {args.parallel}" if args.exchanges else ""
    how = how or f"--runs {args.runs} --seed {args.seed}"
    return (
        f"# {len(kills)} runs of two processes, one of which was killed\n\n"
        f"`python -m tools.rank_kills {how}`: {ended}. "
        f"{again[0]} were resumed with one process and {again[1]} with three, and ended; a copy of "
        f"each was resumed with two, and ended as the run that nobody killed, bit for bit. {ways}. "
        f"{sum(bool(k['wrong']) for k in kills)} went wrong.\n\n"
        f"Commit {git.stdout.strip() or None}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {platform.machine()}, gloo, one thread each; {seconds:.0f} s in "
        "all. Each is a line of `kills.jsonl`.\n"
    )


def _options() -> argparse.Namespace:
    first, _, examples = (__doc__ or "").partition("examples:")
    parser = argparse.ArgumentParser(
        prog="python -m tools.rank_kills",
        description=first,
        epilog="examples:" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--exchanges", choices=METHODS, help="at each exchange of a run of this")
    parser.add_argument("--parallel", choices=WAYS, default="flat", help="with --exchanges")
    parser.add_argument("--out", type=Path, help="folder for the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()
