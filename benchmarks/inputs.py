"""Random inputs that our implementations and the baselines share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from PIL import Image

WIDTH, CLASSES = 512, 20


def clusters(count: int, num_classes: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields blocks of examples from overlapping clusters, as (float32 vectors [n, width], labels [n]), n <= 1000."""
    random = np.random.default_rng(0)
    centers = random.normal(size=[num_classes, WIDTH]).astype(np.float32)
    for start in range(0, count, 1000):
        size = min(count - start, 1000)
        labels = random.integers(0, num_classes, size)
        yield centers[labels] + 4 * random.standard_normal([size, WIDTH], np.float32), labels


def in_memory(count: int, num_classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors [count, width] and labels [count] of all examples."""
    return tuple(map(np.concatenate, zip(*clusters(count, num_classes))))


def unit_vectors(count: int) -> np.ndarray:
    """Returns vectors of norm 1, float32 [count, width]; 1 % are near-duplicates."""
    vectors = in_memory(count)[0]
    num_copies = count // 100
    vectors[count - num_copies :] = vectors[:num_copies] + 0.01
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def image_folder(root: str, count: int) -> None:
    """Creates a folder with up to 1,000 classes of links to one photograph of 500 x 375 pixels."""
    values = np.random.default_rng(0).integers(0, 256, [12, 16, 3], np.uint8)
    os.makedirs(f"{root}/.files")
    photograph = f"{root}/.files/a.jpg"
    Image.fromarray(values).resize([500, 375], Image.Resampling.BICUBIC).save(photograph)
    for index in range(count):
        folder = f"{root}/{index % 1000:03}"
        os.makedirs(folder, exist_ok=True)
        os.symlink(photograph, f"{folder}/{index:07}.jpg")


def features(path: str | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first `count` features and labels in an .npz file, or else of a random ReLU layer on digits."""
    if path:
        with np.load(path) as file:
            return file["vectors"][:count], file["labels"][:count]
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    order = random.permutation(len(labels))[:count]
    layer, bias = random.normal(size=(64, WIDTH)) / 8, random.normal(size=WIDTH) / 8
    return np.maximum(images[order] / 16 @ layer + bias, 0).astype(np.float32), labels[order]


def l2_loss(scores: np.ndarray, kernel: np.ndarray, labels: np.ndarray, l2_of_sum: float) -> float:
    """Returns the mean cross-entropy of scores [n, classes] plus the penalty l2_of_sum * |kernel|^2 / (2 * n)."""
    scores = scores - scores.max(1, keepdims=True)
    log_probabilities = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    penalty = l2_of_sum / 2 * np.sum(kernel**2) / len(labels)
    return float(penalty - log_probabilities[np.arange(len(labels)), labels].mean())
