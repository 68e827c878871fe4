"""Embeddings of images."""

from __future__ import annotations

import contextlib

from inference import endpoints, projector, writers
from runtime import progress, signals
from runtime.paths import check_weights_path


def embed(
    saved_model: str,
    inputs: list[str],
    out: str | None,
    output: str = "final_avg_pool",
    image_size: int | None = None,
    projector_dir: str | None = None,
) -> tuple[int, dict[str, str]]:
    """Writes one vector per image. Only file names and two batches are held in memory.

    Args:
      saved_model: see `endpoints.load_endpoint`.
      inputs: image files, and folders to search recursively (see `endpoints.find_images`).
      out: path of the output file: .npz (arrays `files` and `vectors`), .csv, or .parquet (columns
        `file` and `vectors`). If this is None, only the files for the Embedding Projector are
        written.
      output: name of the endpoint.
      image_size: image size in pixels. If this is None, the model's image size is used (224 if
        unknown).
      projector_dir: directory for the Embedding Projector of TensorBoard (see
        `projector.open_writer`), or None.

    Returns:
      The number of vectors written, and a dict mapping the paths of unreadable images to reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    saved_model = check_weights_path("MODEL", saved_model)
    out = None if out is None else writers.check_out(out)
    projector_dir = None if projector_dir is None else projector.check_directory(projector_dir)
    names = endpoints.find_images(inputs)
    classes = endpoints.find_classes(inputs, names) if projector_dir is not None else {}
    function, description = endpoints.load_endpoint(saved_model, output)
    size = image_size or description.get("image_size", 224)
    written, unreadable = 0, {}
    signals.safe_point(endpoints.NOTHING_WRITTEN)
    with contextlib.ExitStack() as stack:
        add = stack.enter_context(writers.open_writer(out, "vectors")) if out is not None else None
        add_to_projector = (
            stack.enter_context(projector.open_writer(projector_dir, len(names), bool(classes)))
            if projector_dir is not None
            else None
        )
        bar = stack.enter_context(progress.terminal_bar(None, len(names), "images"))
        crop = endpoints.uses_center_crop(description, size)
        for readable, vectors, batch_unreadable in endpoints.compute_endpoint(
            function, size, crop, list(names)
        ):
            if readable:
                vectors, batch_names = (
                    vectors.reshape(len(readable), -1),
                    [names[path] for path in readable],
                )
                if add:
                    add({"file": batch_names}, vectors)
                if add_to_projector:
                    add_to_projector(
                        readable, batch_names, [classes.get(path, "") for path in readable], vectors
                    )
            written += len(readable)
            unreadable.update(batch_unreadable)
            bar.update(len(readable) + len(batch_unreadable))
            signals.safe_point(endpoints.NOTHING_WRITTEN)
        if not written:
            raise endpoints.nothing_readable(unreadable)
    return written, unreadable
