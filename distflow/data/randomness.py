"""Counter-based randomness: a number depends on its purpose, never on the worker or the batch that draws it.

The stream of (seed, kind, position) is named by a 128-bit BLAKE2b digest: half of it is the key of Philox4x32-10, the
other half fills the upper counter words; the lower ones count samples and tokens. Philox: J. Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011, https://doi.org/10.1145/2063384.2063405.

Shapes: R rows (one sample each), N blocks of four 32-bit words, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
OF_PROMPT = 2**32 - 1
"""The row of a stream that belongs to the prompt: no sample has this number."""


def stream_key(seed: int, kind: str, position: int, sample: int | None = None) -> bytes:
    """The 16-byte name of one stream of random numbers."""
    return hashlib.blake2b(repr((seed, kind, position, sample)).encode(), digest_size=16).digest()


def sample_stream(seed: int, position: int, stream: Sequence[int] = ()) -> bytes:
    """The name of the stream that draws the tokens of a group; `stream`: of an episode (`SampleRequest`)."""
    return stream_key(seed, f"sample/{'.'.join(map(str, stream))}" if stream else "sample", position)


def length_seed(seed: int, stream: Sequence[int]) -> int:
    """The seed of `length_draws` for a stream of an episode; for its first sequence it is that of the run."""
    return step_seed(seed, f"call {'.'.join(map(str, stream))}") if stream else seed


def step_seed(seed: int, step: str) -> int:
    """The seed of the samples that a generate step of a further model makes, in a run of this seed: below 2⁶³."""
    return int.from_bytes(stream_key(seed, f"generate:{step}", 0)[:8], "little") >> 1


def uniforms(seed: int, kind: str, position: int, samples: int, tokens: int) -> NDArray[np.float64]:
    """[samples, tokens] numbers in [0, 1) with 53 random bits; entry (i, t) does not depend on the shape asked for."""
    key = stream_key(seed, kind, position)
    return uniform_rows([key] * samples, range(samples), tokens)


def uniform_rows(
    keys: Sequence[bytes], samples: Sequence[int], tokens: int, first: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Rows of several streams at once, [R, tokens]: row r is row `samples[r]` of `uniforms` for stream `keys[r]`.

    `first`: the token from which on each row is wanted; None: from 0.
    """
    rows = len(keys)
    words_R4 = np.frombuffer(b"".join(keys), dtype="<u4").reshape(rows, 4).astype(np.uint64)
    starts_R = np.asarray([0] * rows if first is None else first, dtype=np.uint64)
    odd_R = starts_R & _ONE
    # One block of four words holds the numbers of two consecutive tokens.
    blocks = (tokens + int(odd_R.any()) + 1) // 2
    shape = (rows, blocks)
    places: Words = np.add((starts_R >> _ONE).reshape(rows, 1), np.arange(blocks, dtype=np.uint64), dtype=np.uint64)
    counter = (
        places,
        np.broadcast_to(np.asarray(samples, dtype=np.uint64).reshape(rows, 1), shape),
        np.broadcast_to(words_R4[:, 2:3], shape),
        np.broadcast_to(words_R4[:, 3:4], shape),
    )
    a, b, c, d = philox4x32(counter, (words_R4[:, 0:1], words_R4[:, 1:2]))
    out = np.empty((rows, blocks, 2))
    out[..., 0] = _to_unit(a, b)
    out[..., 1] = _to_unit(c, d)
    flat = out.reshape(rows, 2 * blocks)
    if odd_R.any():
        flat = np.take_along_axis(flat, odd_R.astype(np.int64)[:, None] + np.arange(tokens), axis=1)
    return flat[:, :tokens]


def length_draws(
    seed: int, positions: Sequence[int], samples: Sequence[int], first: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """[R, 2] numbers in [0, 1) that decide how long emulated samples are: one of each row's prompt, and its own.

    `first`: the token from which on a row goes on, as in `uniform_rows`.
    """
    keys = {position: stream_key(seed, "length", position) for position in set(positions)}
    keys_R = [keys[position] for position in positions]
    prompts_R1 = uniform_rows(keys_R, [OF_PROMPT] * len(keys_R), 1)
    return np.hstack([prompts_R1, uniform_rows(keys_R, samples, 1, first)])


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Philox4x32-10 on arrays of 32-bit words kept in uint64; counter words and key words broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def generator(seed: int, kind: str, position: int, sample: int = 0) -> np.random.Generator:
    """A numpy generator of its own for (seed, kind, position, sample)."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(stream_key(seed, kind, position, sample), "little")))


def permutation(seed: int, epoch: int, size: int, source: str = "") -> NDArray[np.int64]:
    """The order [size] in which pass `epoch` visits the data, or one source of several."""
    kind = f"permutation/{source}" if source else "permutation"
    return generator(seed, kind, epoch).permutation(size).astype(np.int64)


def _to_unit(high: Words, low: Words) -> NDArray[np.float64]:
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
