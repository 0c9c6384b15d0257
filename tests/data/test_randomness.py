import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from distflow.data.randomness import generator, permutation, philox4x32, stream_key, uniform_rows, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


def test_philox_known_answers():
    """The vectors published with the authors' Random123 library (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    zero = [int(w[0]) for w in philox4x32(words(0, 0, 0, 0), words(0, 0))]
    assert zero == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    full = [int(w[0]) for w in philox4x32(words(ones, ones, ones, ones), words(ones, ones))]
    assert full == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = philox4x32(words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), words(0xA4093822, 0x299F31D0))
    assert [int(w[0]) for w in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(1, 9), st.integers(1, 33))
def test_entry_does_not_depend_on_the_shape(seed, position, samples, tokens):
    large = uniforms(seed, "sample", position, 12, 40)
    np.testing.assert_array_equal(uniforms(seed, "sample", position, samples, tokens), large[:samples, :tokens])


def test_rows_of_many_streams_equal_one_by_one():
    keys = [stream_key(3, "sample", position) for position in (5, 5, 9)]
    rows = uniform_rows(keys, [0, 2, 1], 7)
    np.testing.assert_array_equal(rows[0], uniforms(3, "sample", 5, 1, 7)[0])
    np.testing.assert_array_equal(rows[1], uniforms(3, "sample", 5, 3, 7)[2])
    np.testing.assert_array_equal(rows[2], uniforms(3, "sample", 9, 2, 7)[1])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=6), st.integers(1, 9))
def test_rows_that_begin_later_are_the_rest_of_whole_ones(wanted, tokens):
    keys = [stream_key(3, "sample", 7)] * len(wanted)
    whole = uniforms(3, "sample", 7, 6, 49)
    rows = uniform_rows(keys, [sample for sample, _ in wanted], tokens, [first for _, first in wanted])
    for row, (sample, first) in zip(rows, wanted, strict=True):
        np.testing.assert_array_equal(row, whole[sample, first : first + tokens])


def test_uniform_and_uncorrelated():
    table = np.concatenate([uniforms(0, "sample", position, 8, 257) for position in range(64)])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    n = table.size
    counts, _ = np.histogram(table, bins=64, range=(0, 1))
    chi_square = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi_square < 63 + 5 * np.sqrt(2 * 63)
    for a, b in ((table[:, 1:], table[:, :-1]), (table[1:], table[:-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(n)


def test_no_collisions_between_seeds_kinds_positions_samples_tokens():
    parts = [uniforms(seed, kind, p, 4, 16) for seed in (0, 1) for kind in ("sample", "data") for p in range(200)]
    table = np.concatenate(parts)
    assert np.unique(table).size == table.size


def test_generator_depends_on_every_part():
    draws = {generator(*key).random() for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1), (0, "a", 0, 1)]}
    assert len(draws) == 5
    assert generator(0, "a", 0).random() == generator(0, "a", 0).random()


def test_permutation_of_each_epoch():
    first, second = permutation(7, 0, 100), permutation(7, 1, 100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert (first != second).any()
    np.testing.assert_array_equal(first, permutation(7, 0, 100))


def test_the_same_in_another_process_and_without_torch():
    code = (
        "import sys; from distflow.data.randomness import uniforms;"
        "print(uniforms(1, 'sample', 2, 2, 3).tolist()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eval(done.stdout) == uniforms(1, "sample", 2, 2, 3).tolist()
