"""Small data sets in the format of TFDS, with the names and classes of the real ones."""

import pathlib

import numpy as np


def write_tfds(name, data_dir, **sizes):
    """Writes a data set with random 32 x 32 images, whose mean color depends on the class.

    Args:
      name: name of a TFDS data set whose features are an image, a class label and, optionally,
        text.
      data_dir: directory for the prepared data.
      **sizes: number of examples of each split.
    """
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    pathlib.Path(data_dir).mkdir(parents=True, exist_ok=True)
    info = tfds.builder(name, data_dir=data_dir).info
    random, num_classes = np.random.default_rng(0), info.features["label"].num_classes
    colors = random.integers(0, 192, (num_classes, 3))

    def examples(split, count):
        for index in range(count):
            label = index % num_classes
            image = (colors[label] + random.integers(0, 64, (32, 32, 3))).astype(np.uint8)
            texts = {
                feature: f"{split}_{index}"
                for feature in info.features
                if feature not in ("image", "label")
            }
            yield f"{split}_{index}", {"image": image, "label": label, **texts}

    tfds.dataset_builders.store_as_tfds_dataset(
        name,
        str(info.version),
        info.features,
        {split: examples(split, count) for split, count in sizes.items()},
        data_dir=data_dir,
    )
