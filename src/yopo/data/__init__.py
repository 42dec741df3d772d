"""Data sets: read them from disk (`load`), fetch them (`get`), make batches (`Loader`).

A file becomes arrays in `formats`, which trusts none; `sources` checks and names them as Arrays,
uint8 all the way; `loader` shuffles and augments them on the device and divides by 255 there.
"""

from yopo.data.fetch import get
from yopo.data.loader import Augment, Loader
from yopo.data.sources import Arrays, default_root, load, mnist_subset

__all__ = ["Arrays", "Augment", "Loader", "default_root", "get", "load", "mnist_subset"]
