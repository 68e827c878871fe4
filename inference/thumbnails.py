"""Thumbnails of image files."""

from __future__ import annotations

import base64
import io

from PIL import Image

from config import DEFAULT_CONVERSION, Conversion
from sources import image_files


def load_thumbnail(
    path: str, side: int, conversion: Conversion = DEFAULT_CONVERSION
) -> Image.Image | None:
    """Returns an image file as an upright RGB image whose longer side has at most `side` pixels.

    Supports the same file formats as the network's input (see `image_files.convert`). Small images
    are not enlarged. Returns None if the file cannot be read.
    """
    try:
        with image_files.checked_content(path) as content:
            image = Image.open(io.BytesIO(image_files.convert(content, conversion)))
            # JPEG files are decoded at a reduced size, which is faster.
            image.draft("RGB", (2 * side, 2 * side))
            image = image_files.to_rgb(image)
            image.thumbnail((side, side))
            return image
    except MemoryError:
        raise
    except Exception:  # Pillow raises exceptions of many types for corrupt files.
        return None


def encode(image: Image.Image | None) -> str | None:
    """Returns an image as a JPEG data URI for an HTML page, or None if `image` is None."""
    if image is None:
        return None
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
