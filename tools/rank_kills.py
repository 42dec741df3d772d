"""Kill one of two processes that train together, and see how the other ends and the run goes on.

The two are forked from this process and speak over gloo; nobody else watches them. After the kill
the other must end within 60 seconds, by itself and with a sentence. Then the run is resumed, with
one process or two, and must end; with two, as the run that nobody killed, bit for bit. Every tenth
pair is started by torchrun and killed at any moment, that of meeting each other included.

examples:
  python -m tools.rank_kills --runs 3
  python -m tools.rank_kills --runs 100 --seed 1 --out records/rank-kills-cpu
"""

import argparse
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from tools.kills import METHODS, Scenario, differences, outcome, write_data
from yopo.core import seals
from yopo.runs.settings import validate
from yopo.runs.trainer import Trainer

LONG = 40  # epochs of a run that torchrun starts, which takes its time
LIMIT = 60.0  # seconds for the other process to end
PATIENCE = 1800.0  # for a whole run, of two seconds; a busy machine may need many
KINDS = ("BatchNorm, EMA, collapse", "EMA, bf16, collapse")
NAMED = [name for name in METHODS if name != "pmp"]


class Process:
    """One of the processes of a run, forked from this one."""

    def __init__(self, scenario: Scenario, out: Path, rank: int, world: int, port: int) -> None:
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(here)
            _train(scenario, out, rank, world, port, there)
        os.close(there)
        self._pipe, self._words = here, b""
        self.code: int | None = None
        os.set_blocking(here, False)

    def words(self) -> str:
        """What it said so far: that it has met the others, and why it ended."""
        try:
            while part := os.read(self._pipe, 4096):
                self._words += part
        except BlockingIOError:
            pass
        return self._words.decode(errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Its exit status, or None if it still runs."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() > end:
                return None
            time.sleep(0.01)
        return self.code

    def kill(self) -> None:
        """End it, if it still runs."""
        if self.wait(0) is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10)

    def close(self) -> None:
        """Forget it."""
        self.words()
        os.close(self._pipe)


def _train(
    scenario: Scenario, out: Path, rank: int, world: int, port: int, there: int
) -> None:  # in the new process
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        real = Trainer.run

        def run(self: Trainer) -> dict[str, Any]:
            os.write(there, b"met\n")
            return real(self)

        Trainer.run = run  # type: ignore[method-assign]
        scenario.train(out)
        code = 0
    except BaseException as error:
        os.write(there, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(code)


def start(scenario: Scenario, out: Path, world: int) -> list[Process]:
    """All processes of a run."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return [Process(scenario, out, rank, world, port) for rank in range(world)]


def finish(scenario: Scenario, out: Path, world: int) -> list[str]:
    """Train to the end with so many processes; what went wrong."""
    processes = start(scenario, out, world)
    codes = [process.wait(PATIENCE) for process in processes]
    said = [process.words() for process in processes]
    for process in processes:
        process.kill()
        process.close()
    return [] if codes == [0] * world else [f"resumed with {world}: {codes}, {said}"]


def kill_one(scenario: Scenario, out: Path, rng: random.Random) -> dict[str, Any]:
    """Train with two, kill one, and tell how the other ended."""
    processes = start(scenario, out, 2)
    while not all("met" in process.words() for process in processes):
        if any(process.wait(0) is not None for process in processes):
            sys.exit(f"\n{scenario.method}: {[process.words() for process in processes]}")
        time.sleep(0.005)
    rank, after = rng.randrange(2), rng.uniform(0, 1.5)
    time.sleep(after)
    victim, other = processes[rank], processes[1 - rank]
    found: dict[str, Any] = {"rank": rank, "after": round(after, 3), "how": "forked"}
    if victim.wait(0) is not None:
        found["killed"] = False  # it had ended before
        other.wait(LIMIT)
    else:
        os.kill(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        code = other.wait(LIMIT)
        found |= {"killed": True, "code": code, "seconds": round(time.monotonic() - began, 2)}
        found["said"] = other.words().removeprefix("met\n")
    for process in processes:
        process.kill()
        process.close()
    return found


def kill_one_of_torchrun(scenario: Scenario, out: Path, rng: random.Random) -> dict[str, Any]:
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
    found: dict[str, Any] = {"rank": rank, "after": round(after, 3), "how": "torchrun"}
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


def check(found: dict[str, Any], scenario: Scenario, out: Path, world: int) -> list[str]:
    """What is wrong after a kill and after the run went on."""
    wrong = []
    if found["killed"] and (found["code"] is None or found["seconds"] > LIMIT):
        wrong.append("the other process did not end")
    elif found["killed"] and found["code"] == 0 and not (out / "result.json").exists():
        wrong.append("the other process ended without a result and without an error")
    elif found["killed"] and found["code"] and found["how"] == "forked":  # torchrun may end it
        told = "cannot reach another one" in found["said"]
        wrong += [] if told else [f"the other process ended without our sentence: {found['said']}"]
    wrong += finish(scenario, out, world)
    if wrong:
        return wrong
    if world == 2 and found["how"] == "forked":
        return differences(outcome(out), scenario.expected)
    lines, torn = seals.read_lines(out / "metrics.jsonl")
    epochs = [line["epoch"] for line in lines if "collapse" not in line]
    expected = [*range(1, LONG + 1)]
    if found["how"] == "forked":
        told = scenario.expected["lines"]
        expected = [line["epoch"] for line in told if "collapse" not in line]
    return [] if torn is None and epochs == expected else [f"epochs {epochs}, {torn}"]


def main() -> None:
    """Kill until there are enough; write what was found."""
    args = _options()
    torch.set_num_threads(1)
    rng, began = random.Random(args.seed), time.monotonic()
    kills: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rank-kills-") as folder:
        data, scenarios = write_data(Path(folder) / "data.npz"), dict[tuple[str, str], Scenario]()
        tries = 0
        while len(kills) < args.runs:
            name, kind = NAMED[tries % len(NAMED)], KINDS[tries // len(NAMED) % len(KINDS)]
            tries += 1
            scenario = scenarios.setdefault((name, kind), Scenario(name, kind, data))
            if not scenario.expected:
                whole = Path(folder) / f"whole-{name}-{KINDS.index(kind)}"
                if wrong := finish(scenario, whole, 2):
                    sys.exit(f"\nthe unkilled run of {name} failed: {wrong}")
                scenario.expected = outcome(whole)
            out, world = Path(folder) / f"run-{tries}", rng.choice([1, 2])
            if len(kills) % 10 == 9:
                kind = "accumulation, bf16, AdamW"
                scenario = Scenario(name, kind, data)
                scenario.tree["epochs"] = LONG
                found = kill_one_of_torchrun(scenario, out, rng)
            else:
                found = kill_one(scenario, out, rng)
            found |= {"method": name, "kind": kind, "resumed_with": world}
            found["wrong"] = check(found, scenario, out, world)
            kills += [found] if found["killed"] or found["wrong"] else []
            bad = sum(bool(kill["wrong"]) for kill in kills)
            text = f"\r{len(kills)} of {args.runs} runs with a rank killed, {bad} wrong"
            print(text, end="", file=sys.stderr, flush=True)
            for line in found["wrong"]:
                print(f"\n{name}, {kind}: {line}", file=sys.stderr)
    print(file=sys.stderr)
    text = words(args, kills, time.monotonic() - began)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        kept = [{k: v for k, v in kill.items() if k != "said"} for kill in kills]
        (args.out / "kills.jsonl").write_text("".join(json.dumps(k) + "\n" for k in kept))
        (args.out / "README.md").write_text(text)
    print(text)
    sys.exit(1 if any(kill["wrong"] for kill in kills) else 0)


def words(args: argparse.Namespace, kills: list[dict[str, Any]], seconds: float) -> str:
    """The record on a page."""
    root = Path(__file__).parents[1]
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    took = {
        how: [k["seconds"] for k in kills if k["killed"] and k["how"] == how]
        for how in ("forked", "torchrun")
    }
    ended = "; ".join(
        f"{len(times)} {how}, the other ended after {min(times)} to {max(times)} s"
        for how, times in took.items()
        if times
    )
    again = [sum(k["resumed_with"] == n for k in kills) for n in (1, 2)]
    return (
        f"# {len(kills)} runs of two processes, one of which was killed\n\n"
        f"`python -m tools.rank_kills --runs {args.runs} --seed {args.seed}`: {ended}. "
        f"{again[0]} were resumed with one process and {again[1]} with two, and ended. "
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
    parser.add_argument("--out", type=Path, help="folder for the record")
    return parser.parse_args()


if __name__ == "__main__":
    main()
