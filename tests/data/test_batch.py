import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.data.batch_wire import decode_batch, encode_batch
from distflow.errors import ProtocolError

rows = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=5), max_size=6)


def example() -> Batch:
    return Batch(
        {
            "group": torch.tensor([4, 4, 9, 9, 9]),
            "ids": Ragged.from_rows([[1, 2], [], [3], [4, 5, 6], [7]], torch.int64),
            "text": Ragged.from_texts(["a", "", "ü€", "d", "e"]),
            "reward": torch.arange(5.0),
        }
    )


def same(a: Batch, b: Batch) -> bool:
    def equal(x: object, y: object) -> bool:
        if isinstance(x, Ragged) and isinstance(y, Ragged):
            return torch.equal(x.values, y.values) and torch.equal(x.offsets, y.offsets)
        return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and torch.equal(x, y) and x.dtype == y.dtype

    return a.columns.keys() == b.columns.keys() and all(equal(a[name], b[name]) for name in a.columns)


def test_slices_and_selections_keep_rows_together() -> None:
    batch = example()
    assert batch.slice(2, 4).texts("text") == ["ü€", "d"]
    assert batch.select([3, 0]).ragged("ids").values.tolist() == [4, 5, 6, 1, 2]
    assert [row.tolist() for row in batch.ragged("ids").rows()] == [[1, 2], [], [3], [4, 5, 6], [7]]
    assert batch.ragged("ids").row(3).tolist() == [4, 5, 6]


def test_group_bounds_mark_where_groups_begin() -> None:
    assert example().group_bounds() == [0, 2, 5]
    assert Batch({}).group_bounds() == [0]


def test_padding_is_for_computing_only() -> None:
    assert example().padded("ids", fill=-1).tolist()[:3] == [[1, 2, -1], [-1, -1, -1], [3, -1, -1]]
    assert example().ragged("ids").mask().sum(1).tolist() == [2, 0, 1, 3, 1]


@settings(max_examples=50)
@given(st.lists(rows, min_size=1, max_size=4))
def test_concat_then_slice_gives_the_parts_back(parts: list[list[list[int]]]) -> None:
    batches = [Batch({"ids": Ragged.from_rows(part, torch.int64)}) for part in parts]
    whole, at = Batch.concat(batches), 0
    for batch in batches:
        assert same(whole.slice(at, at + batch.rows), batch)
        at += batch.rows


@settings(max_examples=50)
@given(rows, st.booleans())
def test_the_wire_keeps_every_bit(part: list[list[int]], flag: bool) -> None:
    batch = Batch(
        {
            "ids": Ragged.from_rows(part, torch.int64),
            "flags": torch.full((len(part),), flag),
            "half": torch.rand(len(part)).bfloat16(),
            "several": Ragged.from_rows(part, torch.int64).like(torch.rand(sum(map(len, part)), 3)),
            "none": Ragged.from_rows(part, torch.int64).like(torch.rand(sum(map(len, part)), 0)),
            "spans": Ragged(torch.ones(len(part), 4, dtype=torch.int64), torch.arange(len(part) + 1)),
        }
    )
    description, buffer = encode_batch(batch)
    assert same(decode_batch(description, memoryview(buffer)), batch)


def test_rows_must_agree() -> None:
    with pytest.raises(ValueError, match=r"same number of rows, got {'a': 1, 'b': 2}"):
        Batch({"a": torch.zeros(1), "b": torch.zeros(2)})


def test_a_missing_or_misused_field_is_named() -> None:
    with pytest.raises(KeyError, match="field 'rewrad' is not in this batch; it has"):
        example()["rewrad"]
    with pytest.raises(TypeError, match="field 'ids' is ragged"):
        example().dense("ids")
    with pytest.raises(TypeError, match="field 'reward' is dense"):
        example().ragged("reward")


def test_bytes_that_do_not_fit_their_description_are_refused() -> None:
    description, buffer = encode_batch(example())
    with pytest.raises(ProtocolError, match="runs past the end"):
        decode_batch(description, memoryview(buffer)[:-8])
    with pytest.raises(ProtocolError, match="whose columns take"):
        decode_batch(description, memoryview(bytes(buffer) + bytes(8)))
    with pytest.raises(ProtocolError, match="announces 7 rows but has 5"):
        decode_batch({**description, "rows": 7}, memoryview(buffer))
    with pytest.raises(ProtocolError, match="malformed batch description"):
        decode_batch({}, memoryview(buffer))
    with pytest.raises(ProtocolError, match="field 'a' has dtype 'object'; expected one of"):
        decode_batch({"rows": 1, "columns": [["a", "dense", "object", [1]]]}, memoryview(buffer))


def test_offsets_that_lie_are_refused() -> None:
    bad = Batch({"ids": Ragged(torch.arange(4), torch.tensor([0, 3, 2]))})
    description, buffer = encode_batch(bad)
    with pytest.raises(ProtocolError, match="field 'ids': offsets do not divide its 4 values"):
        decode_batch(description, memoryview(buffer))
