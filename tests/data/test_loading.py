"""The embedded digits are the ones the script made."""

import hashlib

import torch

from yopo.data import mnist_subset

SHA256 = "af52b00a195100266de835c25cd2d64e80cf82673a029ab11ccdbc4c37747658"


def test_hash_shape_and_balance() -> None:
    x_train, y_train, x_test, y_test = tensors = mnist_subset()
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
    assert digest == SHA256
    assert x_train.shape == (6000, 1, 28, 28)
    assert x_test.shape == (2000, 1, 28, 28)
    assert x_train.dtype == x_test.dtype == torch.uint8
    assert torch.equal(y_train.bincount(), torch.full((10,), 600))
    assert torch.equal(y_test.bincount(), torch.full((10,), 200))


def test_train_and_test_do_not_overlap() -> None:
    x_train, _, x_test, _ = mnist_subset()
    seen = {image.numpy().tobytes() for image in x_train}
    assert not any(image.numpy().tobytes() in seen for image in x_test)
