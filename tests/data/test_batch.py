import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged, RowRange, join
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


def example_of(lengths: list[int]) -> Batch:
    """Rows of these lengths, with all kinds of columns."""
    ids = Ragged.from_rows([range(length) for length in lengths], torch.int64)
    count = len(ids.values)
    return Batch(
        {
            "group": torch.arange(len(lengths)),
            "ids": ids,
            "logprobs": ids.like(torch.rand(count)),
            "text": Ragged.from_texts(["ü" * length for length in lengths]),
            "pairs": Ragged(torch.rand(len(lengths), 2), torch.arange(len(lengths) + 1)),
            "half": torch.rand(len(lengths), 3).bfloat16(),
        }
    )


@settings(max_examples=50)
@given(st.data())
def test_what_arrived_in_many_buffers_is_joined_as_if_it_had_been_read_by_column(data: st.DataObject) -> None:
    ranges, plain = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        sent = example_of(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
        description, buffer = encode_batch(sent)
        start = data.draw(st.integers(0, sent.rows))
        stop = data.draw(st.integers(start, sent.rows))
        ranges.append(RowRange(decode_batch(description, memoryview(buffer)), start, stop))
        plain.append(RowRange(sent, start, stop))
    joined = join(ranges)
    assert same(joined, join(plain))
    assert joined.ragged("ids").offsets is joined.ragged("logprobs").offsets or len(ranges) == 1
    some = ranges[0]
    lacking = RowRange(some.batch.only(["group", "ids"]), some.start, some.stop)
    assert same(
        join([lacking, lacking]), join([RowRange(plain[0].batch.only(["group", "ids"]), some.start, some.stop)] * 2)
    )


def test_a_shape_that_no_tensor_has_is_refused_on_arrival() -> None:
    columns = msgspec.msgpack.encode([["a", "i64", [1 << 39, 1 << 39, 1 << 39, 0], -1]])
    with pytest.raises(ProtocolError):
        decode_batch({"rows": 1, "columns": columns}, memoryview(bytearray()))


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
    for wrong in (memoryview(buffer)[:-8], memoryview(bytes(buffer) + bytes(8)), memoryview(b"")):
        with pytest.raises(ProtocolError, match=r"a batch of 5 rows in \d+ bytes whose (columns|offsets) take \d+"):
            decode_batch(description, wrong)
    with pytest.raises(ProtocolError, match="a batch of 7 rows in|do not divide"):
        decode_batch({**description, "rows": 7}, memoryview(buffer))
    with pytest.raises(ProtocolError, match="malformed batch description"):
        decode_batch({}, memoryview(buffer))


@pytest.mark.parametrize(
    "columns, message",
    [
        ([["a", "object", [], -1]], "field 'a' has dtype 'object'; expected one of"),
        ([["a", "i64", [], -1], ["a", "f32", [], -1]], "a duplicate column"),
        ([["a", "i64", [], 1]], "offsets numbered .1.; expected 0, 1"),
        ([["a", "i64", [], -2]], "malformed batch description"),
        ([["a", "i64", [-1], 0]], "malformed batch description"),
        ([["a", "i64", [1] * 8, 0]], "malformed batch description"),
        ([["a", "i64", []]], "malformed batch description"),
        ([[7, "i64", [], -1]], "malformed batch description"),
        ([["a", "i64", [1 << 39, 1 << 39], -1]], "whose columns take 2417851639229258349412352"),
        ([], "a batch of 1 rows in 8 bytes whose columns take 0"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns: list[object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_batch({"rows": 1, "columns": msgspec.msgpack.encode(columns)}, memoryview(bytearray(8)))


@given(st.data())
def test_a_batch_with_changed_bytes_is_refused_or_read(data: st.DataObject) -> None:
    description, buffer = encode_batch(example())
    columns = description["columns"]
    assert isinstance(columns, bytes)
    for changed in (described := bytearray(columns), buffer):
        for _ in range(data.draw(st.integers(0, 2))):
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 8]))
    try:
        found = decode_batch(
            {"rows": description["rows"], "columns": bytes(described)}, memoryview(buffer)[: len(buffer) - cut]
        )
    except ProtocolError:
        return
    assert found.nbytes >= len(buffer) - cut, "what the columns share counts for each"
    for column in found.columns.values():
        if isinstance(column, Ragged):
            assert len(list(column.rows())) == found.rows == example().rows


def test_columns_with_the_same_rows_share_offsets_on_the_wire_and_behind_it() -> None:
    ids = Ragged.from_rows([[1, 2], [3]], torch.int64)
    batch = Batch({"ids": ids, "logprobs": ids.like(torch.rand(3)), "mask": ids.like(torch.ones(3, dtype=torch.bool))})
    description, buffer = encode_batch(batch)
    assert len(buffer) == 3 * 8 + 3 * (8 + 4 + 1)
    found = decode_batch(description, memoryview(buffer))
    assert same(found, batch)
    for one in (found, found.slice(1, 2), Batch.concat([found, batch.slice(0, 1)])):
        assert len({id(one.ragged(name).offsets) for name in one.columns}) == 1
        assert len(encode_batch(one)[1]) == (one.rows + 1) * 8 + len(one.ragged("ids").values) * (8 + 4 + 1)


def test_what_is_read_only_is_copied_and_the_rest_is_mapped() -> None:
    batch = Batch({"ids": torch.arange(4)})
    description, buffer = encode_batch(batch)
    mapped = decode_batch(description, memoryview(buffer)).dense("ids")
    copied = decode_batch(description, memoryview(buffer).toreadonly()).dense("ids")
    mapped += 1
    assert torch.frombuffer(buffer, dtype=torch.int64).tolist() == [1, 2, 3, 4]
    assert copied.tolist() == [0, 1, 2, 3]


def test_offsets_that_lie_are_refused() -> None:
    bad = Batch({"ids": Ragged(torch.arange(4), torch.tensor([0, 3, 2]))})
    description, buffer = encode_batch(bad)
    with pytest.raises(ProtocolError, match="offsets of a batch do not divide its values"):
        decode_batch(description, memoryview(buffer))
