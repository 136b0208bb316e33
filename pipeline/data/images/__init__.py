"""`data.kind: images`: stored.py finds stored images, in folders and in tables."""

from pipeline.data.images.dataset import prepare_images

__all__ = ["prepare_images"]
