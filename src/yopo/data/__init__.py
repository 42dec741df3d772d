"""Data sets: read them from disk (`load`), fetch them (`get`), make batches (`Loader`).

A file becomes arrays in `formats`, which trusts none; `sources` checks and names them as Arrays,
uint8 all the way; `loader` shuffles and augments them on the device and divides by 255 there. What
does not fit into memory is `Sources`: `streamed` makes the loader's batches of images that are read
when their turn comes, `items` and `batches` bring data sets and loaders of other libraries.
"""

from yopo.data.augment import Augment
from yopo.data.batches import Batches
from yopo.data.fetch import get
from yopo.data.items import Items
from yopo.data.loader import Loader
from yopo.data.pictures import Folder
from yopo.data.source import Feed, InMemory, Pictures, Rows, Source, Sources
from yopo.data.sources import Arrays, default_root, load, mnist_subset
from yopo.data.streamed import Streamed

__all__ = [
    "Arrays",
    "Augment",
    "Batches",
    "Feed",
    "Folder",
    "InMemory",
    "Items",
    "Loader",
    "Pictures",
    "Rows",
    "Source",
    "Sources",
    "Streamed",
    "default_root",
    "get",
    "load",
    "mnist_subset",
]
