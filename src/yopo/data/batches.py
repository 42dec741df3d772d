"""Training batches from a loader of the user's own: torch's, torchdata's, webdataset's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from yopo.core.crew import gathered
from yopo.core.digest import values_digest
from yopo.core.plain import restored, told
from yopo.core.random import mix
from yopo.data.items import class_numbers, pair_of, seed_host, streams_left_alone
from yopo.data.source import Feed
from yopo.data.streamed import Deaf

Loads = Iterable[Any]


class Batches:
    """What a loader gives, as a run trains on it: `Sources(train=Batches(loader), ...)`.

    loader: of batches (images, labels) or {"image": ..., "label": ...}, images (B, C, H, W) uint8
    or floating point in [0, 1]; or a function that makes one of a `Feed`, which says how many
    images a batch has in this process (`feed.share`), which process it is, and of how many. The
    loader shuffles, augments and, among several processes, shares out. images: in an epoch, over
    all processes, where the loader has no length. pair: makes (images, labels) of a batch of
    another kind.

    An epoch begins anew: samplers, data sets and loaders that have `set_epoch` hear of it, and
    whatever draws from torch's, Python's or NumPy's own streams finds them seeded by it. Workers
    begin anew as well, whatever `persistent_workers` says. Batches that are not full are left out.
    A loader with `state_dict` (torchdata's StatefulDataLoader) resumes where it was; with any
    other, the batches before are drawn again and passed over.
    """

    def __init__(
        self,
        loader: Loads | Callable[[Feed], Loads],
        images: int | None = None,
        pair: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        if not (hasattr(loader, "__iter__") or callable(loader)):
            raise ValueError(
                "expected a loader of batches, or a function that makes one of a yopo.data.Feed, "
                f"got {type(loader).__name__}"
            )
        self._loader, self._pair, self._given = loader, pair or pair_of, images

    @property
    def images(self) -> int | None:
        """Training images, if that is known."""
        return self._given or _len(getattr(self._loader, "dataset", None))

    def __call__(self, feed: Feed) -> "Opened":
        """The batches for one process."""
        is_ready = hasattr(self._loader, "__iter__")
        loader: Any = self._loader if is_ready else self._loader(feed)  # type: ignore[operator]
        if not hasattr(loader, "__iter__"):
            raise ValueError(f"expected a loader of batches, got {type(loader).__name__}")
        return Opened(loader, self.images, self._pair, feed)


class Opened:
    """A loader's batches in one process."""

    def __init__(
        self,
        loader: Any,  # noqa: ANN401
        images: int | None,
        pair: Callable[[Any], tuple[Any, Any]],
        feed: Feed,
    ) -> None:
        self.loader, self.pair, self.feed = loader, pair, feed
        self._parts = list(_parts(loader, {}))
        self._torchs = [part for part in self._parts if isinstance(part, DataLoader)]
        for part in self._torchs:
            part.worker_init_fn = Deaf(part.worker_init_fn)
        self._looked = feed.world == 1  # whether the processes' images were compared
        self._check_shared_out()
        self.steps = self._steps_in(images)
        self._at = 0, 0  # epoch, and batches of it that were handed over
        self._state: tuple[tuple[int, int], Any] | None = None  # of the loader, there

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.steps

    @property
    def ahead(self) -> int:
        """Batches that worker processes make before they are asked for, as torch's loaders tell."""
        workers, each = (getattr(self.loader, n, 0) for n in ("num_workers", "prefetch_factor"))
        return (workers or 0) * (each or 0)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from step `start` on."""
        if not 0 <= start <= len(self):
            raise ValueError(f"expected start from 0 to {len(self)} steps, got {start}")
        return self._handed(epoch, start)

    def state(self) -> Any:  # noqa: ANN401
        """Where the loader is in the middle of an epoch, for JSON; None where it cannot say."""
        if not self._at[1] or not hasattr(self.loader, "state_dict"):
            return None
        try:
            return told({"at": self._at, "loader": self.loader.state_dict()})
        except ValueError as error:
            self.feed.say(
                f"the state of {type(self.loader).__name__} is not kept ({error}): --resume draws "
                "the batches of the epoch so far again"
            )
            return None

    def restore(self, state: Any) -> str:  # noqa: ANN401
        """Go on there, if that is where the next epoch begins."""
        kept = restored(state)
        if not isinstance(kept, dict) or not {"at", "loader"} <= {*kept}:
            raise ValueError("it has no place in the training data")
        if not hasattr(self.loader, "load_state_dict"):
            return "the loader has no load_state_dict any more; earlier batches are drawn again"
        self._state = kept["at"], kept["loader"]
        return ""

    def _handed(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        if start == len(self):
            return
        first, (state, self._state) = 0, (self._state, None)
        self._tell(epoch)
        batches: Iterator[tuple[Tensor, Tensor]] = self._drawn(epoch, 0)
        if state is not None and state[0] == (epoch, start):
            rest = self._drawn(epoch, start)
            try:
                self.loader.load_state_dict(state[1])
                batches, first = chain([next(rest)], rest), start
            except Exception as error:  # what other libraries raise can be anything
                why = str(error).strip().rpartition("\n")[2]
                self.feed.say(
                    f"{type(self.loader).__name__} did not take its state back ({why[:200]}); "
                    "the batches of the epoch so far are drawn again"
                )
        for step in range(first, len(self)):
            x, y = next(batches)
            if step < start:
                continue
            if not self._looked:
                self._looked = True
                self._check_apart(x, y)
            self._at = epoch, step + 1
            x = x.to(self.feed.device, non_blocking=True)
            x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.to(torch.float32)
            yield x, y.to(self.feed.device, non_blocking=True)

    def _drawn(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Full batches without end: a loader that ends before the epoch does begins again."""
        step, full = first, True
        while full:
            full = False
            for part in self._torchs:
                if part.persistent_workers:  # they would draw on, and not hear of the epoch
                    part._iterator = None
            with self._streams(epoch, "order"):
                batches = iter(self.loader)
            while True:
                with self._streams(epoch, step):
                    batch = next(batches, None)
                if batch is None:
                    break
                images, labels = self.pair(batch)
                x, y = torch.as_tensor(images), class_numbers(labels, len(labels))
                if len(y) > self.feed.share or x.dim() != 4 or y.shape != x.shape[:1]:
                    raise ValueError(self._misfit(x, y))
                if len(y) == self.feed.share:
                    full, step = True, step + 1
                    yield x, y
        raise ValueError(
            f"the loader gave no batch of {self.feed.share} images, as --batch {self.feed.batch} "
            f"needs in each of {self.feed.world} processes; give its batch size to --batch"
        )

    @contextmanager
    def _streams(self, epoch: int, purpose: object) -> Iterator[None]:
        """A loader draws by seed, epoch and step, whatever was drawn before."""
        with streams_left_alone():
            seed_host(mix(self.feed.seed, epoch, purpose, self.feed.rank))
            yield

    def _tell(self, epoch: int) -> None:
        """Say to all that shuffles which epoch it is."""
        for part in self._parts:
            if callable(tell := getattr(part, "set_epoch", None)):
                tell(epoch)
            elif type(part).__module__.startswith("webdataset.") and hasattr(part, "epoch"):
                part.epoch = epoch - 1  # a stage that counts for itself
        for part in self._parts:
            if isinstance(stream := getattr(part, "generator", None), torch.Generator):
                stream.manual_seed(mix(self.feed.seed, epoch, "generator"))

    def _check_shared_out(self) -> None:
        """Refuse a loader that gives all processes the same images."""
        batched = getattr(self.loader, "batch_sampler", None)
        streams = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        if self.feed.world == 1 or streams or not isinstance(batched, BatchSampler):
            return
        if not hasattr(batched.sampler, "num_replicas"):
            raise ValueError(
                f"each of {self.feed.world} processes would train on the same images; make the "
                "loader in a function of feed, with sampler=DistributedSampler(dataset, "
                "feed.world, feed.rank): yopo.data.Batches(function)"
            )

    def _check_apart(self, x: Tensor, y: Tensor) -> None:
        """Refuse the first batches of all processes if two are the same; only these are compared.

        Whoever varies images at random gives them other pixels in each process: there labels alone
        tell, and those of different images may be the same, too.
        """
        digests = (values_digest(x, y), values_digest(y))
        mine = torch.tensor([[*bytes.fromhex(d)] for d in digests], dtype=torch.uint8)
        whole, labels = zip(*(all_.tolist() for all_ in gathered(mine)), strict=True)
        cure = (
            "make the loader in a function of feed that shares them out by feed.rank and "
            "feed.world, as datasets.distributed.split_dataset_by_node and "
            "webdataset.split_by_node do (docs/data.md)"
        )
        if (pair := _equal(whole)) is not None:
            raise ValueError(
                f"processes {pair[0]} and {pair[1]} have the same images in their first batch, so "
                f"that they would train on the same; {cure}"
            )
        if (pair := _equal(labels)) is not None and len(y.unique()) > 1:
            self.feed.say(
                f"processes {pair[0]} and {pair[1]} have the same labels in their first batch, in "
                f"the same order; if they train on the same images, {cure}"
            )

    def _steps_in(self, images: int | None) -> int:
        """Full batches of an epoch, the same number in each process."""
        sampler = getattr(getattr(self.loader, "batch_sampler", None), "sampler", None)
        if (rows := _len(sampler)) is not None:
            many = rows // self.feed.share
        elif images is not None:
            many = images // self.feed.batch
        elif (batches := _len(self.loader)) is not None:
            many = batches
        else:
            raise ValueError(
                "expected images, how many an epoch has, since the loader has no length: "
                "yopo.data.Batches(loader, images=1_281_167)"
            )
        if many < 1:
            raise ValueError(
                f"expected at least one batch of {self.feed.share} images in an epoch, got none; "
                "give a smaller --batch, and the loader's batch size with it"
            )
        return many

    def _misfit(self, x: Tensor, y: Tensor) -> str:
        if x.dim() != 4 or y.shape != x.shape[:1]:
            return (
                "expected batches of images (B, C, H, W) and labels (B,), got shapes "
                f"{tuple(x.shape)} and {tuple(y.shape)}; pair= makes (images, labels) of a batch"
            )
        batch = len(y) * self.feed.world
        return (
            f"expected batches of {self.feed.share} images in each process, got {len(y)}; give "
            f"--batch {batch}, or the loader a batch size of {self.feed.share}"
        )


def _parts(part: Any, seen: dict[int, Any]) -> Iterator[Any]:  # noqa: ANN401
    """A loader, and once each the samplers, data sets and webdataset's stages inside it."""
    seen[id(part)] = part
    yield part
    named = (getattr(part, name, None) for name in ("batch_sampler", "sampler", "dataset"))
    for inside in (*named, *(getattr(part, "pipeline", None) or ())):
        if inside is not None and id(inside) not in seen:
            yield from _parts(inside, seen)


def _equal(digests: Sequence[object]) -> tuple[int, int] | None:
    """The first two processes that have the same."""
    first = map(digests.index, digests)
    return next(((i, rank) for rank, i in enumerate(first) if i < rank), None)


def _len(of: Any) -> int | None:  # noqa: ANN401
    """Its length, if it has one."""
    try:
        return len(of)
    except (TypeError, NotImplementedError, AttributeError):
        return None
