"""Class predictions for image files."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from inference import endpoints
from runtime import signals
from runtime.errors import UserError
from runtime.paths import check_path, check_weights_path


def predict(saved_model: str, paths: list[str], image_size: int | None = None, most: int = 5
           ) -> dict[str, list[tuple[str, float]] | None]:
    """The likeliest classes of image files.

    Returns:
      dict: path -> list of (class name, probability), likeliest first; None for a file that cannot be read. Of a model
      that was trained on several labels an example, each probability stands for itself.
    """
    saved_model = check_weights_path("MODEL", saved_model)
    paths = [check_path("IMAGE", path, allow_patterns=True) for path in paths]
    for path in paths:
        if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
            raise UserError(f"IMAGE={path}: there is no such file")
    function, description = endpoints.load_endpoint(saved_model, "logits_sup")
    names, size = description.get("class_names"), image_size or description.get("image_size", 224)
    to_shares = tf.sigmoid if description.get("multi_label") else tf.nn.softmax  # As they were trained.
    found = {}
    crop = endpoints.uses_center_crop(description, size)
    for good, logits, bad in endpoints.compute_endpoint(function, size, crop, paths):
        signals.safe_point("nothing was printed; start the same command again")
        found.update(dict.fromkeys(bad))
        if good and names and len(names) != logits.shape[-1]:
            raise UserError(f"MODEL={saved_model}: it has {logits.shape[-1]} classes and names of {len(names)}. Export "
                            "it again.")
        for path, row in zip(good, to_shares(logits).numpy() if good else []):
            found[path] = [(names[index] if names else f"class {index}", float(row[index]))
                           for index in np.argsort(-row)[:most]]
    return {path: found[path] for path in paths}
