"""Embeddings of images."""

from __future__ import annotations

from inference import endpoints, writers
from runtime import progress, signals
from runtime.paths import check_weights_path


def embed(saved_model: str, inputs: list[str], out: str, output: str = "final_avg_pool", image_size: int | None = None
         ) -> tuple[int, dict[str, str]]:
    """Writes one vector per image. Only file names and two batches are held in memory.

    Args:
      saved_model: see `endpoints.load_endpoint`.
      inputs: image files, and folders to search recursively (see `endpoints.find_images`).
      out: path of the output, a .npz file (`files`, `vectors`), a .csv file or a .parquet file (`file`, `vectors`).
      output: name of the endpoint.
      image_size: image size in pixels. None: the model's image size, or 224 if unknown.

    Returns:
      The number of vectors written, and a dict mapping the paths of unreadable images to reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    saved_model, out = check_weights_path("MODEL", saved_model), writers.check_out(out)
    names = endpoints.find_images(inputs)
    function, description = endpoints.load_endpoint(saved_model, output)
    size = image_size or description.get("image_size", 224)
    written, unreadable = 0, {}
    signals.safe_point(endpoints.NOTHING_WRITTEN)
    with writers.open_writer(out, "vectors") as add, progress.terminal_bar(None, len(names), "images") as bar:
        crop = endpoints.uses_center_crop(description, size)
        for readable, vectors, batch_unreadable in endpoints.compute_endpoint(function, size, crop, list(names)):
            if readable:
                add({"file": [names[path] for path in readable]}, vectors.reshape(len(readable), -1))
            written += len(readable)
            unreadable.update(batch_unreadable)
            bar.update(len(readable) + len(batch_unreadable))
            signals.safe_point(endpoints.NOTHING_WRITTEN)
        if not written:
            raise endpoints.nothing_readable(unreadable)
    return written, unreadable
