"""Embeddings of images."""

from __future__ import annotations

from inference import endpoints, writers


def embed(
    path: str,
    inputs: list[str],
    out: str,
    output: str = "final_avg_pool",
    given: dict[str, int] | None = None,
) -> tuple[int, dict[str, str]]:
    """Writes one vector per image. Only file names and a few batches are held in memory.

    Args:
      path: see `endpoints.load_endpoint`.
      inputs: image files, and folders to search recursively (see `endpoints.find_images`).
      out: result of `paths.check_out`: .npz (arrays `files` and `vectors`), .csv, or .parquet
        (columns `file` and `vectors`).
      output: name of the endpoint.
      given: see `inspection.inspect_checkpoint`.

    Returns:
      The number of vectors written, and a dict mapping the paths of unreadable images to reasons.

    Raises:
      UserError: an argument is invalid, or no image can be read.
      errors.Stopped: a signal arrived; nothing is written.
    """
    names, unreadable = endpoints.find_images(inputs), {}
    with writers.open_writer(out, "vectors") as add:
        for images, vectors, _ in endpoints.compute_endpoint(
            path, output, given, list(names), unreadable
        ):
            add({"file": [names[image] for image in images]}, vectors)
    return len(names) - len(unreadable), unreadable
