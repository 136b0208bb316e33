"""Documents as tokens in the cache: `prepare_documents` is the way in, TokenStore what it gives."""

from pipeline.data.prepared.encoder import Document, Encoder
from pipeline.data.prepared.prepare import prepare_documents
from pipeline.data.prepared.store import Prepared, PreparedSource, TokenPart, TokenStore

__all__ = [
    "Document",
    "Encoder",
    "Prepared",
    "PreparedSource",
    "TokenPart",
    "TokenStore",
    "prepare_documents",
]
