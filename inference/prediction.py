"""Class predictions for image files."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from inference import endpoints
from runtime import signals
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path


def predict(saved_model: str, paths: list[str], image_size: int | None = None, top_k: int = 5
           ) -> dict[str, list[tuple[str, float]] | None]:
    """Predicts the most probable classes of image files.

    Args:
      saved_model: see `load_endpoint`.
      paths: image files.
      image_size: image size in pixels. None: the model's image size, or 224 if unknown.
      top_k: number of classes per image.

    Returns:
      A dict that maps each path to a list of (class name, probability), most probable class first, or to None if the
      file cannot be read. Multi-label models use independent probabilities (sigmoid instead of softmax).
    """
    saved_model = check_weights_path("MODEL", saved_model)
    paths = [check_path("IMAGE", path, allow_patterns=True) for path in paths]
    for path in paths:
        if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
            raise UserError(f"IMAGE={path}: no such file. Check the path.")
    function, description = endpoints.load_endpoint(saved_model, "logits_sup")
    names, size = description.get("class_names"), image_size or description.get("image_size", 224)
    to_probabilities = tf.sigmoid if description.get("multi_label") else tf.nn.softmax
    predictions = {}
    crop = endpoints.uses_center_crop(description, size)
    for readable, logits, unreadable in endpoints.compute_endpoint(function, size, crop, paths):
        signals.safe_point("nothing was printed; run the same command again")
        predictions.update(dict.fromkeys(unreadable))
        if readable and names and len(names) != logits.shape[-1]:
            raise UserError(f"MODEL={saved_model}: the linear head has {logits.shape[-1]} classes, but {len(names)} "
                            "class names are recorded. Export the model again.")
        for path, row in zip(readable, to_probabilities(logits).numpy() if readable else []):
            predictions[path] = [(names[index] if names else f"class {index}", float(row[index]))
                                 for index in np.argsort(-row)[:top_k]]
    return {path: predictions[path] for path in paths}
