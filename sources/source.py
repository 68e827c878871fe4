"""Where examples come from: TFDS, folders of images, and the embedded `digits`.

A source yields undecoded records `(key, item, label)`: `key` is an int64 that names the example for good, `item` the
encoded image (or a small uint8 array), `label` an int64, -1 without labels; where examples have several labels, int64
[classes], see `Source.multi_label`. Order is a function of the seed alone.
"""

from __future__ import annotations

import tensorflow as tf


class Source:
    """A data set. Each kind has

    - `split_names`: names of the whole splits;
    - `num_examples(split, shards=1, shard=0)`: examples of a split (slices allowed), or of one of its shards;
      ValueError for an unknown split;
    - `handles(split, seed=None, shards=1, shard=0, buffer_mb=1024)`: a dataset of what stands for an example until it
      is needed. `seed` is an int64 scalar, a tensor or not: another order for each; None: always the same. `buffer_mb`:
      most memory for shuffling, where examples have no random access.
    - `fetch(split)`: a function from a handle to `(key, item, label)`;
    - `restrict(split, fraction, seed)`: from then on, `split` is `choose_balanced` of its labelled examples;
      `UserError` if these are too few;
    - `describe_data()`: see there.
    """

    name: str
    class_names: list[str] | None
    # Whether an example may show several classes. Then its label is, for each class, 1: shown; 0: not; -1: neither is
    # to be learnt or tested (objects that PASCAL VOC calls difficult).
    multi_label = False

    @property
    def num_classes(self):
        """Number of classes, or None without labels."""
        return None if self.class_names is None else len(self.class_names)

    def describe_data(self) -> dict:
        """Returns what identifies the data, as JSON types: at least `name` and `splits`, name -> number of examples.

        Neither slices, `restrict` nor images that are left out change it, so that a run can compare it at each start.
        """
        raise NotImplementedError

    def check_files(self, split):
        """Raises `UserError` if files that hold the split are missing or empty, where that can be checked quickly."""
        del split

    def no_label(self):
        """The label of what has none."""
        return tf.fill([self.num_classes] if self.multi_label else [], tf.constant(-1, tf.int64))

    def is_sparse(self, split):
        """Whether reading the split means to read much more than its examples, so that they should be cached."""
        del split
        return False

    def records(self, split, seed=None, shards=1, shard=0, buffer_mb=1024):
        """A dataset of `(key, item, label)`; arguments as for `handles`."""
        return self.handles(split, seed, shards, shard, buffer_mb).map(self.fetch(split), tf.data.AUTOTUNE)

    def decode(self, item):
        """An item as uint8 [h, w, 3]."""
        return tf.io.decode_image(item, channels=3, expand_animations=False)
