"""Bodies to batches: both formats give the same batch, and every refusal names the feature and the sample."""

import copy
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from recshard_lab.serving import Batch, Inputs, SparseInput
from recshard_lab.serving.server.bodies import BINARY, JSON, Decoder, encode
from recshard_lab.serving.server.errors import Refused

INPUTS = Inputs(("age", "price"), (SparseInput("movie", 1000), SparseInput("user", None)))
WEIGHTED = Inputs(("age",), (SparseInput("movie", 10), SparseInput("tag", 10, weighted=True)))
GOOD: dict[str, Any] = {
    "dense": {"age": [1, 2.5], "price": [0.25, 4]},
    "sparse": {"user": [[-5], []], "movie": [[1, 999], [0]]},
}


def changed(path: str, value: Any) -> bytes:
    """The body of `GOOD` with one value changed; "..." deletes it."""
    body = copy.deepcopy(GOOD)
    *above, last = path.split("/")
    at = body
    for name in above:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return orjson.dumps(body)


def tensors(**changes: Any) -> bytes:
    found: dict[str, Any] = {
        "dense": torch.tensor([[1, 0.25], [2.5, 4]]),
        "values": torch.tensor([1, 999, 0, -5]),
        "lengths": torch.tensor([2, 1, 1, 0], dtype=torch.int32),
    }
    found |= changes
    return save({name: tensor for name, tensor in found.items() if tensor is not None})


def refusal(content_type: str, body: bytes, inputs: Inputs = INPUTS, **limits: int) -> Refused:
    with pytest.raises(Refused) as caught:
        Decoder(inputs, **limits).decode(content_type, body)
    assert "Fix: " in str(caught.value)
    return caught.value


def equal(one: Batch, other: Batch) -> bool:
    weights = (one.weights is None) == (other.weights is None)
    weights = weights and (one.weights is None or torch.equal(one.weights, other.weights))  # type: ignore[arg-type]
    return weights and all(torch.equal(getattr(one, n), getattr(other, n)) for n in ("dense", "values", "lengths"))


def test_json_and_tensors_are_the_same_batch() -> None:
    decoder = Decoder(INPUTS)
    one, other = decoder.decode(JSON, orjson.dumps(GOOD)), decoder.decode(BINARY, tensors())
    assert equal(one, other)
    assert one.values.tolist() == [1, 999, 0, -5]
    assert one.lengths.tolist() == [2, 1, 1, 0]
    assert one.dense.tolist() == [[1, 0.25], [2.5, 4]]
    one.check(INPUTS)


@given(st.data())
def test_random_batches_are_read_as_they_were_sent(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 4))
    features = [
        SparseInput(f"f{i}", data.draw(st.sampled_from([None, 1, 50])), data.draw(st.booleans()))
        for i in range(data.draw(st.integers(0, 3)))
    ]
    inputs = Inputs(tuple(f"d{i}" for i in range(data.draw(st.integers(0 if features else 1, 2)))), tuple(features))
    sparse = {}
    for feature in features:
        last = 2**63 - 1 if feature.rows is None else feature.rows - 1
        ids = st.integers(-(2**63) if feature.rows is None else 0, last)
        sparse[feature.name] = data.draw(st.lists(st.lists(ids, max_size=3), min_size=samples, max_size=samples))
    number = st.floats(-100, 100, width=16)
    dense = {c: data.draw(st.lists(number, min_size=samples, max_size=samples)) for c in inputs.dense}
    weights = {f.name: [[0.5 + i for i, _ in enumerate(bag)] for bag in sparse[f.name]] for f in features if f.weighted}
    body = {"dense": dense, "sparse": sparse, "weights": weights}
    batch = Decoder(inputs).decode(JSON, orjson.dumps(body))
    batch.check(inputs)
    flat = [value for feature in features for bag in sparse[feature.name] for value in bag]
    assert batch.values.tolist() == flat
    assert batch.lengths.tolist() == [len(bag) for feature in features for bag in sparse[feature.name]]
    assert batch.dense.tolist() == [[dense[c][i] for c in inputs.dense] for i in range(samples)]
    content = {"dense": batch.dense, "values": batch.values, "lengths": batch.lengths}
    if batch.weights is not None:
        content["weights"] = batch.weights
    assert equal(Decoder(inputs).decode(BINARY, save(content)), batch)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[]", 422, "the body is a list"),
        (changed("extra", 1), 422, "unknown name 'extra'"),
        (changed("sparse", ...), 422, "sparse.movie is missing"),
        (changed("dense/age", ...), 422, "dense.age is missing"),
        (changed("dense/age", [1]), 422, "dense.price: it has 2 samples, but dense.age has 1"),
        (changed("dense/age", [1, None]), 422, "dense.age[1]: the value is null"),
        (changed("dense/age", [1, "a"]), 422, "dense.age[1]: the value is a string"),
        (changed("dense/age", [1, 1e39]), 422, "dense.age[1]: inf is not a finite float32"),
        (changed("sparse/movie", [[1], 2]), 422, "sparse.movie[1]: a sample is the number 2"),
        (changed("sparse/movie", [[1], [2.0]]), 422, "sparse.movie[1]: an id is the number 2.0"),
        (changed("sparse/movie", [[True], [2]]), 422, "sparse.movie[0]: an id is true"),
        (changed("sparse/movie", [[1], [5, 1000]]), 422, "sparse.movie[1]: id 1,000 is not below 1,000"),
        (changed("sparse/movie", [[1], [5, -1]]), 422, "sparse.movie[1]: id -1 is negative"),
        (changed("sparse/user", [[2**63], []]), 422, "sparse.user[0]: id 9,223,372,036,854,775,808 is not an int64"),
        (orjson.dumps({"dense": {"age": [], "price": []}, "sparse": {"movie": [], "user": []}}), 422, "no samples"),
        (changed("weights", {"movie": [[1], [1]]}), 422, "unknown name 'movie'"),
    ],
)
def test_json_is_refused_with_its_place(body: bytes, status: int, words: str) -> None:
    error = refusal(JSON, body)
    assert words in str(error)
    assert error.status == status
    if "[1]:" in words:
        assert error.position == 1
        assert words.startswith(f"{error.field}[1]")


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "safetensors"),
        (tensors()[:-1], 400, "safetensors"),
        (tensors(extra=torch.zeros(1)), 422, "extra: the tensor is unknown"),
        (tensors(dense=None), 422, "dense: the tensor is missing"),
        (tensors(values=torch.zeros(4)), 422, "values: its dtype is F32"),
        (tensors(dense=torch.zeros(2, 3)), 422, "dense: its shape is [2, 3]"),
        (tensors(dense=torch.tensor([[0, 0], [0, torch.nan]])), 422, "dense.price[1]: nan is not a finite"),
        (tensors(values=torch.zeros(2, 2, dtype=torch.int64)), 422, "values: it has 2 dimensions"),
        (tensors(lengths=torch.tensor([2, 1, 1])), 422, "lengths: it has 3 values, but 2 features of 2 samples need 4"),
        (tensors(lengths=torch.tensor([2, 1, 1, 1])), 422, "lengths: its sum is 5, but values has 4"),
        (tensors(lengths=torch.tensor([2, 1, -1, 2])), 422, "sparse.user[0]: length -1"),
        (tensors(lengths=torch.tensor([2**62, 2**62, 2**62, 2**62])), 422, "sparse.movie[0]: length 4,611"),
        (tensors(values=torch.tensor([1, 2, 1000, 0])), 422, "sparse.movie[1]: id 1,000 is not below 1,000"),
        (
            tensors(dense=torch.zeros(0, 2), values=torch.zeros(0).long(), lengths=torch.zeros(0).long()),
            422,
            "no samples",
        ),
    ],
)
def test_tensors_are_refused_with_their_place(body: bytes, status: int, words: str) -> None:
    error = refusal(BINARY, body)
    assert words in str(error)
    assert error.status == status


def test_samples_and_ids_are_bounded() -> None:
    for kind, body in ((JSON, orjson.dumps(GOOD)), (BINARY, tensors())):
        error = refusal(kind, body, max_samples=1)
        assert (error.status, error.reason) == (413, "too_many_samples")
        error = refusal(kind, body, max_ids=3)
        assert (error.status, error.reason) == (413, "too_many_ids")
        Decoder(INPUTS, 2, 4).decode(kind, body)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/jsonx", "multipart/form-data; boundary=x"])
def test_other_content_types_are_refused(content_type: str) -> None:
    assert refusal(content_type, b"{}").status == 415
    assert Decoder(INPUTS).decode("Application/JSON; charset=utf-8", orjson.dumps(GOOD)).size == 2


def test_weights_belong_to_their_ids() -> None:
    body: dict[str, Any] = {
        "dense": {"age": [0, 0]},
        "sparse": {"movie": [[1], [2, 3]], "tag": [[4, 5], []]},
        "weights": {"tag": [[0.5, 2], []]},
    }
    batch = Decoder(WEIGHTED).decode(JSON, orjson.dumps(body))
    assert batch.weights is not None
    assert batch.weights.tolist() == [1, 1, 1, 0.5, 2]
    body["weights"]["tag"] = [[0.5], [2]]
    assert "weights.tag[0]: 1 weights for 2 ids" in str(refusal(JSON, orjson.dumps(body), WEIGHTED))
    del body["weights"]
    assert "weights.tag is missing" in str(refusal(JSON, orjson.dumps(body), WEIGHTED))
    one = {"dense": torch.zeros(1, 1), "values": torch.tensor([1, 2]), "lengths": torch.tensor([1, 1])}
    assert "weights: the tensor is missing" in str(refusal(BINARY, save(one), WEIGHTED))
    bad = save(one | {"weights": torch.tensor([1, torch.inf])})
    assert "weights.tag[0]: inf is not finite" in str(refusal(BINARY, bad, WEIGHTED))


def test_answers_in_both_formats() -> None:
    answer = {"score": np.array([0.5, 2], dtype=np.float32), "items": np.array([[1, 2], [3, 4]])}
    assert orjson.loads(encode(JSON, answer)) == {"score": [0.5, 2], "items": [[1, 2], [3, 4]]}
    found = load(encode(BINARY, answer))
    assert found["items"].tolist() == [[1, 2], [3, 4]]
    assert found["score"].dtype == torch.float32
