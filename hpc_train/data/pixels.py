"""Reads image files with Pillow as 8-bit gray or RGB pixels, upright and without transparency.

``convert`` of Pillow clips values of more than 8 bits, and shows the colors that transparent pixels hide.
"""

from __future__ import annotations

import importlib
import io
from typing import Any, BinaryIO

import numpy as np

from hpc_train.errors import UserError

_ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 0x0102, 0x0106  # tags of EXIF and TIFF
_WHITE_IS_ZERO = 0  # a value of _PHOTOMETRIC
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def pillow() -> Any:
    """Returns the module ``PIL.Image``; raises UserError if it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UserError(
            "data=images needs Pillow, which is not installed",
            where="data.kind",
            fix="pip install 'hpc_train[images]'",
        ) from error


def open_image(file: str | BinaryIO, name: str, mode: str) -> Any:
    """Returns the image of a file as a Pillow image in ``mode``, L or RGB.

    - 16-bit values are scaled to 8 bits.
    - The image is turned as its EXIF orientation says.
    - Transparent pixels are blended with white.

    Args:
        name: the name of the file, for messages.

    Raises:
        UserError: the pixels are integers of 32 bits, floats or LAB colors.
    """
    library = pillow()
    with library.open(file) as image:
        check_pixels(image, name)
        image.load()
        turn = _TURNS.get(_orientation(image))
        decoded = _without_transparency(_in_8_bits(image)).convert(mode)
    if turn is None:
        return decoded
    return decoded.transpose(getattr(library.Transpose, turn))


def check_pixels(image: Any, name: str) -> None:
    """Raises UserError if the pixels of an opened image have no 8-bit equivalent; reads no pixels."""
    if image.mode not in ("F", "I", "LAB") or _is_deep(image):
        return
    content = {"F": "floats", "I": "32-bit integers", "LAB": "LAB colors"}[image.mode]
    raise UserError(
        f"{name} contains {content}, whose conversion to 8 bits is not defined",
        where="data.path",
        fix="convert it to an 8-bit or 16-bit image, or read it with data=custom",
    )


def check_content(content: bytes, name: str) -> None:
    """Checks the pixels of a file as ``check_pixels``; accepts a file that is not an , which fails when it is read."""
    try:
        image = pillow().open(io.BytesIO(content))
    except OSError:
        return
    check_pixels(image, name)


def _is_deep(image: Any) -> bool:
    """Returns whether the pixels are gray with more than 8 bits; Pillow reads some 16-bit files as 32-bit integers."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _in_8_bits(image: Any) -> Any:
    if not _is_deep(image):
        return image
    tags = getattr(image, "tag_v2", {})  # only a TIFF has them
    highest = 2 ** tags.get(_BITS, (16,))[0] - 1
    pixels = np.asarray(image)
    values = pixels.astype(np.float64) * (255 / highest)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        values = 255 - values
    values[pixels == image.info.get("transparency", -1)] = 255  # white, as other transparent pixels
    return pillow().fromarray(np.rint(values).astype(np.uint8))


def _without_transparency(image: Any) -> Any:
    if not image.has_transparency_data:
        return image
    colors = image.convert("RGBA")
    return pillow().alpha_composite(pillow().new("RGBA", colors.size, "white"), colors)


def _orientation(image: Any) -> int:
    """Returns the EXIF orientation; 1, upright, if there is none or it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises what it likes for damaged metadata, which must not make the pixels unreadable
        return 1
