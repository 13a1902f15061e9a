"""Images: from a row's value to the pixels that a model reads.

    path, encoded bytes (PNG, JPEG, ...) or array --> decode --> uint8 [H, W, 3] --> transforms (augment.py)
        --> image processor of the model --> pixel_values fp32 [3, H, W]

A token store holds paths and encoded bytes. Images are decoded when an episode with them is loaded, in loader
processes. An array is stored in the .npy format and needs no Pillow; pickles in it are refused.

H, W height and width.
"""

import hashlib
import io
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmmeta.common.errors import UsageError, usage_errors
from fmmeta.common.security import is_inside
from fmmeta.common.text import shortened, to_json

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".npy")
ARRAY = b"\x93NUMPY"  # the first bytes of a .npy file
PROCESSOR_FILE = "preprocessor_config.json"


class EncodedImage(NamedTuple):
    """An image that is not decoded. where: path of its file; the origin of `content`, for messages."""

    where: str
    content: bytes | None = None


def encoded_image(value: Any, column: str, origin: str, folder: Path | None) -> tuple[str, EncodedImage]:
    """The name of a row's image, and the image. Its name is a path below `folder`, or a digest of its bytes.

    value: a path, bytes, {"bytes": ..., "path": ...} as `datasets` stores an image, an array uint8 [H, W] or
    [H, W, 3], or an image of Pillow; an `EncodedImage` is returned unchanged. folder: relative paths begin
    there and may not leave it; None: at the current folder. Raises `UsageError` without the origin.
    """
    if isinstance(value, EncodedImage):
        return value.where, value
    given: Any = value
    if isinstance(value, dict) and value.keys() >= {"bytes", "path"}:
        value = value["path"] if value["bytes"] is None else value["bytes"]
    if isinstance(value, (str, os.PathLike)) and str(value) and "\0" not in str(value):
        name, path = str(value), Path(folder or "", value)
        if folder and not is_inside(folder, path):
            raise UsageError(f"has {column}={shortened(name)}, outside of {folder}; copy the image")
        return name, EncodedImage(str(path.absolute()))
    if isinstance(value, np.ndarray):
        value = array_bytes(value, f"has {column}")
    elif hasattr(given, "mode") and hasattr(given, "save"):
        file = io.BytesIO()
        as_rgb(given, f"has {column}").save(file, "PNG")
        value = file.getvalue()
    if not isinstance(value, bytes) or not value:
        raise UsageError(
            f"has {column}={shortened(given)}, which is no image; give a path, the bytes of a file,"
            " or an array of uint8"
        )
    return hashlib.sha256(value).hexdigest()[:32], EncodedImage(origin, value)


def array_bytes(array: np.ndarray, what: str = "an image") -> bytes:
    """An array in the .npy format. Raises `UsageError` for one that is no image."""
    check_array(array, what)
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def check_array(array: np.ndarray, what: str) -> None:
    """Raise `UsageError` unless the array is uint8 [H, W], [H, W, 1] or [H, W, 3]."""
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{what} of type {type(array).__name__}; give an array of uint8")
    shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
    if array.dtype != np.uint8 or not shaped or not array.size:
        raise UsageError(
            f"{what} with the shape {list(array.shape)} and dtype {array.dtype}; give uint8 of the shape"
            " [height, width] or [height, width, 3]"
        )


def content_of(value: Any) -> str:
    """A text that identifies a value of a row, for digests: exact for bytes, arrays, tensors and images."""
    if hasattr(value, "mode") and hasattr(value, "tobytes") and hasattr(value, "size"):  # an image of Pillow
        value = np.asarray(value.convert("RGBA") if value.mode == "P" else value)
    if hasattr(value, "tolist") and not isinstance(value, (np.ndarray, bytes)):
        return repr((str(getattr(value, "dtype", "")), value.tolist()))  # repr leaves out digits and elements
    if isinstance(value, np.ndarray):
        value = repr((value.shape, str(value.dtype))).encode() + value.tobytes()
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


def content_digest(image: EncodedImage) -> str:
    """Of its bytes; empty for a file that cannot be read, which `decode` reports."""
    with suppress(OSError):
        return content_of(Path(image.where).read_bytes() if image.content is None else image.content)
    return ""


def pixels_digest(image: EncodedImage) -> str:
    """Of the pixels that a model reads; of its bytes or its path if it cannot be decoded."""
    with suppress(OSError, UsageError):
        return content_of(np.ascontiguousarray(decode(image)))
    return content_of(image.content or image.where)


def decode(image: EncodedImage) -> np.ndarray:
    """The pixels, uint8 [H, W, 3]. Raises `UsageError`, and `OSError` for a file that cannot be read."""
    name = image.where
    content = Path(name).read_bytes() if image.content is None else image.content
    if content.startswith(ARRAY):
        with usage_errors(f"{name} cannot be decoded as an image", "fix or remove it"):
            array = np.load(io.BytesIO(content), allow_pickle=False)
        check_array(array, f"{name} is an array")
    else:
        array = with_pillow(content, name)
    return three_channels(array)


def three_channels(array: np.ndarray) -> np.ndarray:
    """uint8 [H, W], [H, W, 1] or [H, W, 3] as [H, W, 3]."""
    array = array[:, :, None] if array.ndim == 2 else array
    return np.broadcast_to(array, (*array.shape[:2], 3))


def as_rgb(image: Any, name: str) -> Any:
    """An image of Pillow in RGB, turned as its EXIF data say. Raises `UsageError` for more than 8 bits."""
    from PIL import ImageOps

    if image.mode == "F" or image.mode.startswith("I"):
        raise UsageError(f"{name} has pixels of mode {image.mode}; convert the image to 8 bits a channel")
    return ImageOps.exif_transpose(image).convert("RGB")


def with_pillow(content: bytes, name: str) -> np.ndarray:
    """Decode an image file with Pillow. Raises `UsageError`."""
    with usage_errors(f"{name}: Pillow, which decodes images, is missing", "pip install fmmeta[vision]"):
        from PIL import Image, UnidentifiedImageError
    with usage_errors(f"{name} cannot be decoded as an image", "fix or remove it"):
        try:
            with Image.open(io.BytesIO(content)) as opened:
                return np.asarray(as_rgb(opened, name))
        except UnidentifiedImageError:  # its text has an address
            raise ValueError("no image format is recognised") from None


@dataclass(frozen=True)
class ImageReader:
    """Reads images as a model's image processor prepares them; it takes a tokenizer's place. Picklable.

    settings: of preprocessor_config.json. processor: of transformers; None where Pillow is missing.
    """

    settings: dict[str, Any]
    processor: Any = None

    bos_token_id = None
    chat_template = None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(to_json(self.settings, sort_keys=True).encode()).hexdigest()

    def read(self, image: EncodedImage) -> Tensor:
        """The pixels of an encoded image, fp32 [3, H, W]. Raises `UsageError` and `OSError`."""
        return self.prepare(decode(image))

    def prepare(self, pixels: np.ndarray) -> Tensor:
        """uint8 [H, W, 3] as the model reads it, fp32 [3, H', W']. Raises `UsageError`.

        Pixels of the model's size are only scaled and normalised, which is done here: also without Pillow,
        and with the same numbers.
        """
        size, pixels = self.exact_size, three_channels(pixels)
        if size == pixels.shape[:2]:
            s = self.settings
            scaled = pixels.astype(np.float32) * np.float32(s["rescale_factor"])
            mean, std = (np.asarray(s[name], np.float32) for name in ("image_mean", "image_std"))
            return torch.from_numpy(np.ascontiguousarray(((scaled - mean) / std).transpose(2, 0, 1)))
        if self.processor is None:
            raise UsageError(
                f"an image of {pixels.shape[0]} x {pixels.shape[1]} pixels needs Pillow to be resized; pip"
                " install fmmeta[vision]"
            )
        with usage_errors("the image processor failed", f"fix its {PROCESSOR_FILE}"):
            found = self.processor(
                images=[np.ascontiguousarray(pixels)], input_data_format="channels_last", return_tensors="pt"
            )["pixel_values"]
        return found[0]

    @property
    def exact_size(self) -> tuple[int, int] | None:
        """Height and width of images that are only scaled and normalised; None if there is more to do."""
        s = self.settings
        steps = {name for name, value in s.items() if name.startswith("do_") and value} - {"do_convert_rgb"}
        size, three = (
            s.get("size") or {},
            all(len(s.get(f"image_{name}") or ()) == 3 for name in ("mean", "std")),
        )
        if (
            steps - {"do_resize"} != {"do_rescale", "do_normalize"}
            or {*size} != {"height", "width"}
            or not three
        ):
            return None
        return size["height"], size["width"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write preprocessor_config.json, as transformers does."""
        text = json.dumps(self.settings, indent=2, sort_keys=True)
        Path(folder, PROCESSOR_FILE).write_text(text + "\n", encoding="utf-8")
