"""Stateless random numbers that depend only on an example's seed, not on the worker, replica or batch."""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

_GAMMA, _MIX_1, _MIX_2 = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64
)
# Random odd constants, chosen so that adding small multiples of them to a key and a seed produces
# no collisions.
_SEED_FACTORS = np.array([0xD1342543DE82EF95, 0xAF251AF3B0F025B5], np.uint64)
_STRIDES = np.array(
    [
        [0x2545F4914F6CDD1D, 0x9FB21C651E98DF25],
        [0xD6E8FEB86659FD93, 0xA0761D6478BD642F],
        [0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3],
    ],
    np.uint64,
)
# levels of `nth_seed` for views and for an operator's additional draws; level 0 is for operators
VIEW, DRAW = 1, 2


def fold_in(seed: tf.Tensor, data: int | tf.Tensor) -> tf.Tensor:
    """Derives a new seed [2] from `seed` [2] and the integer `data`. The new seed has the same dtype as `seed`."""
    return tf.random.experimental.stateless_fold_in(seed, tf.cast(data, seed.dtype))


def step_seed(seed: int, stream: int, step: int | tf.Tensor) -> tf.Tensor:
    """Returns a seed (int64 [2]) for `nth_seed` and `uniforms` that depends on all arguments.

    In contrast to `fold_in`, it returns the same seed in functions compiled by XLA.
    """
    key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64).astype(np.int64)
    return tf.stack([key[0], tf.cast(step, tf.int64)])


def scalar_seed(seed: tf.Tensor) -> tf.Tensor:
    """Draws a random int64 scalar from `seed` [2].

    Using a single element of `seed` would not suffice, because `fold_in` leaves one element
    unchanged.
    """
    return tf.random.stateless_uniform([], seed, minval=None, maxval=None, dtype=tf.int64)


def nth_seed(seed: tf.Tensor, index: int, level: int = 0) -> tf.Tensor:
    """Returns seed number `index` in the sequence that starts with `seed` ([2] or [n, 2]).

    This function is cheaper than `fold_in` and suffices for generators that scramble their seed,
    such as `uniforms` and `tf.image.stateless_*`. Sequences of different levels (0, `VIEW`, `DRAW`)
    can be nested.
    """
    offset = (index * _STRIDES[level]).astype(np.int64)
    return seed + tf.cast(offset, seed.dtype) if index else seed


def uniforms(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Draws uniform random numbers in [0, 1) for each seed, with SplitMix64 (Steele, Lea, Flood 2014).

    `tf.random` cannot generate numbers for many seeds in a single op. For small images, one op per
    image would increase the cost of the entire augmentation pipeline by half.

    Args:
      seeds: integers, [n, 2].
      count: number of draws per seed.

    Returns:
      float32 [n, count].
    """
    products = tf.bitcast(tf.cast(seeds, tf.int64), tf.uint64) * _SEED_FACTORS
    # TensorFlow's graph optimizer rewrites this sum as AddN, which has no GPU kernel for uint64.
    products = tf.bitcast(products, tf.int64)
    offsets = (_GAMMA * np.arange(1, count + 1, dtype=np.uint64)).astype(np.int64)
    bits = tf.bitcast(products[:, :1] + products[:, 1:] + offsets, tf.uint64)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        bits = tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, np.uint64(shift))) * factor
    # Use only the upper 24 bits, the precision of float32. SplitMix64's final xor is omitted,
    # because it does not affect these bits.
    return (
        tf.cast(tf.bitcast(tf.bitwise.right_shift(bits, np.uint64(40)), tf.int64), tf.float32)
        * 2.0**-24
    )


def normals(seeds: tf.Tensor, count: int) -> tf.Tensor:
    """Draws standard normal random numbers for each seed, with the Box-Muller transform.

    Args:
      seeds: integers, [n, 2].
      count: number of draws per seed.

    Returns:
      float32 [n, count].
    """
    half = -(-count // 2)
    draws = uniforms(seeds, 2 * half)
    radius, angle = tf.sqrt(-2 * tf.math.log(1 - draws[:, :half])), 2 * math.pi * draws[:, half:]
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 1)[:, :count]
