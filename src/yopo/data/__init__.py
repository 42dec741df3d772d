"""Data sets: read them from disk (`load`), fetch them (`get`), make batches (`Loader`)."""

from yopo.data.fetch import get
from yopo.data.loader import Augment, Loader
from yopo.data.sources import Arrays, default_root, load, mnist_subset

__all__ = ["Arrays", "Augment", "Loader", "default_root", "get", "load", "mnist_subset"]
