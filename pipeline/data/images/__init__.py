"""`data.kind: images`: stored.py says what stored images have in common, folder.py and table.py find them."""

from pipeline.data.images.dataset import prepare_images

__all__ = ["prepare_images"]
