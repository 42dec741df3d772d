"""States of loaders as JSON: what is written comes back as it was, and nothing else is read."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yopo.core.files import parse_json
from yopo.core.plain import KINDS, restored, told

Values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.sampled_from(["dict", "int"]), inner)
    ),
    max_leaves=5,
)


def there_and_back(value: Any) -> Any:
    return restored(parse_json(json.dumps(told(value)), "x", nan=True))


@settings(max_examples=40)
@given(Values)
def test_what_is_written_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)  # a tuple is no list, and 1 is not True


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_come_back_with_their_type_and_shape(
    kind: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 9).to(kind)
    found = there_and_back({"a": tensor, "b": tensor.numpy(), "c": np.int64(3)})
    assert found["a"].dtype == kind
    assert torch.equal(found["a"], tensor)
    assert found["b"].dtype == tensor.numpy().dtype
    assert np.array_equal(found["b"], tensor.numpy())
    assert found["c"] == 3
    generator = torch.Generator()
    generator.set_state(there_and_back(generator.get_state()))
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "a object"),
        ({1, 2}, "a set"),
        (torch.zeros(2, dtype=torch.bfloat16), "a tensor of bfloat16"),
        (b"x" * 50_000, "50,000 bytes in one piece"),
        ([[]] * 0 or eval("[" * 40 + "]" * 40), "more than 32 brackets"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        told(value)


@pytest.mark.parametrize(
    "words",
    [
        {"tensor": ["int64", [3], "AAAA"]},
        {"tensor": ["object", [], "AAAA"]},
        {"tensor": 3},
        {"int": "x"},
        {"bytes": "not base64"},
        {"dict": [[1]]},
        {"dict": [[[1], 2]]},
        {"text": "/w=="},
    ],
)
def test_what_was_not_written_here_is_refused(words: Any) -> None:
    with pytest.raises(ValueError, match="no value that was written here"):
        restored(words)
