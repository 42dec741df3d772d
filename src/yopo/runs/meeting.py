"""How the processes of a run find each other, and what ends them if one does not come.

torchrun keeps one store for all its restarts, and what processes wrote that were killed since stays
in it: their addresses among others, at which those that come later would wait for hours
(pytorch#135712). So each meeting has keys of its own, which the first process draws.
"""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long who meets waits, in seconds."""

    coming: float = 300.0  # for all to be there: machines may start one after the other
    connecting: float = 25.0  # for a connection
    told: float = 25.0  # for the others to say whether they have theirs
    tries: int = 3
    waiting: float = 7200.0  # later, for each other: a first epoch may read slowly


def meet(backend: str, device: torch.device | None, patience: Patience = Patience()) -> None:  # noqa: B008
    """Join the group that the environment names; all processes are in it, or in all it fails.

    One that is killed once it has come is missed by the others within a minute.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        wait, end = timedelta(seconds=patience.coming), time.monotonic() + patience.coming
        shared, _, _ = next(rendezvous("env://", rank, world, timeout=wait))
    except dist.DistError as error:
        raise _late(rank, world, patience, error) from None
    try:
        store = _own_keys(shared, rank, world, end)
    except TimeoutError as error:
        raise _late(rank, world, patience, error) from None
    except dist.DistError as error:  # the store was in a process that is gone
        raise _lost(rank, error) from None
    wrong = ""
    for number in range(patience.tries):
        here, began = PrefixStore(f"try {number}", store), time.monotonic()
        mine = _connected(here, rank, world, backend, device, patience)
        if not (wrong := _first_wrong(here, mine, rank, world, began, patience)):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=patience.waiting))
            shared.set_timeout(timedelta(seconds=patience.coming))
            return
        _leave()
    raise RuntimeError(
        f"the processes could not connect to each other, {patience.tries} times ({wrong}). Let "
        "machines reach each other (GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names the network), "
        "and start the run again with --resume"
    )


def another_group(patience: Patience = Patience()) -> dist.ProcessGroup:  # noqa: B008
    """All processes once more, over gloo, for what is said beside the exchanges of training."""
    dist.barrier()  # they come when they come; from here on who is missing was killed
    wait = timedelta(seconds=patience.connecting / 5)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=wait)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=patience.waiting), group)
    return group


def _own_keys(store: Store, rank: int, world: int, end: float) -> Store:
    """The store with keys that only those processes know which are here now.

    The first one draws the keys' name, and admits who wrote a number below it. What killed ones
    left names other keys, or holds other numbers.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        store.set("first", mine)
        others = [f"{mine}/{other}" for other in range(1, world)]
        _until(lambda: store.check(others), end)
        for key in others:
            store.set(f"admitted/{store.get(key).decode()}", mine)
        return PrefixStore(mine, store)
    admitted = f"admitted/{mine}"

    def ask() -> bool:
        if store.check(["first"]):  # may be that of a killed one, until the new one is there
            store.set(f"{store.get('first').decode()}/{rank}", mine)
        return store.check([admitted])

    _until(ask, end)
    return PrefixStore(store.get(admitted).decode(), store)


def _connected(
    store: Store,
    rank: int,
    world: int,
    backend: str,
    device: torch.device | None,
    patience: Patience,
) -> str:
    """Connect to all others; what went wrong."""
    # gloo waits for a connection five times as long as it is told to.
    wait = timedelta(seconds=patience.connecting / (5 if backend == "gloo" else 1))
    store.set_timeout(wait)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=wait, device_id=device
        )
    except RuntimeError as error:
        return f"process {rank}: {_first_line(error)}"
    return ""


def _first_wrong(
    store: Store, mine: str, rank: int, world: int, began: float, patience: Patience
) -> str:
    """What went wrong in the first process in which something did; all are told the same."""
    keys = [f"told by {other}" for other in range(world)]
    end = max(began + patience.connecting, time.monotonic()) + patience.told
    try:
        store.set(keys[rank], mine)
        _until(lambda: store.check(keys), end)
        return next(filter(None, (store.get(key).decode() for key in keys)), "")
    except (dist.DistError, TimeoutError) as error:
        raise _lost(rank, error) from None


def _leave() -> None:
    """Leave the group, if this process is in it; torch counts groups, in all of them alike."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _until(done: Callable[[], bool], end: float) -> None:
    """Wait, so that Ctrl-C is heard meanwhile."""
    while not done():
        if time.monotonic() > end:
            raise TimeoutError("not all have answered")
        time.sleep(0.02)


def _late(rank: int, world: int, patience: Patience, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"process {rank} of {world} waited {patience.coming:.0f} s for all to come "
        f"({_first_line(error)}); start all of them at about the same time, with the same "
        "MASTER_ADDR and MASTER_PORT, or let torchrun do it"
    )


def _lost(rank: int, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"process {rank} cannot reach another one, which may have been killed while they met "
        f"({_first_line(error)}); start the run again with --resume"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
