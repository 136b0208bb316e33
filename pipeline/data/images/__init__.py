"""Images (`data.kind: images`): stored.py finds the files, dataset.py decodes them."""

from pipeline.data.images.dataset import prepare_images

__all__ = ["prepare_images"]
