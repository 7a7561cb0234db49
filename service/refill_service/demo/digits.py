"""A real dataset to try: scikit-learn's 1,797 handwritten digits, written out as PNG files in class folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

NUM_TEST = 297
"""The last samples are kept for testing; the first 1,500 are for training."""


SIZE = 8
"""Width and height of the digits."""
_MOST_ENLARGED = 8
"""By so many pixels, as photos of several sizes."""


def write_digits(folder: Path, *, several_sizes: bool = False) -> tuple[Path, Path]:
    """Write ``train/<digit>/<number>.png`` and ``test/...``, 8 x 8 grey images; returns the two folders.

    :param several_sizes: each in a width and a height of its own, 8 to 16.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * (255 / 16)).astype(np.uint8)
    first_test = len(images) - NUM_TEST
    for number, (image, digit) in enumerate(zip(images, digits.target.tolist(), strict=True)):
        of_class = folder / ("test" if number >= first_test else "train") / str(digit)
        of_class.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image)
        if several_sizes:
            width, height = number % (_MOST_ENLARGED + 1), number // (_MOST_ENLARGED + 1) % (_MOST_ENLARGED + 1)
            picture = picture.resize((SIZE + width, SIZE + height), Image.Resampling.BILINEAR)
        picture.save(of_class / f"{number:04d}.png")
    return folder / "train", folder / "test"
