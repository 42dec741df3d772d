"""Data sets: read them from disk (`load`), fetch them (`get`), make batches (`Loader`).

A file becomes arrays in `formats`, which trusts none; `sources` checks and names them as Arrays,
uint8 all the way; `loader` shuffles and augments them on the device and divides by 255 there.
"""

from yopo.data.augment import Augment
from yopo.data.fetch import get
from yopo.data.items import Items
from yopo.data.loader import Loader
from yopo.data.source import Feed, InMemory, Pictures, Rows, Source, Sources
from yopo.data.sources import Arrays, default_root, load, mnist_subset

__all__ = [
    "Arrays",
    "Augment",
    "Feed",
    "InMemory",
    "Items",
    "Loader",
    "Pictures",
    "Rows",
    "Source",
    "Sources",
    "default_root",
    "get",
    "load",
    "mnist_subset",
]
