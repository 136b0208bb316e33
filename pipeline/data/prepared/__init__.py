"""Documents as tokens in the cache: `prepare_documents` is the way in, TokenStore what it gives."""

from pipeline.data.prepared.prepare import prepare_documents
from pipeline.data.prepared.store import Prepared, PreparedSource, TokenStore

__all__ = ["Prepared", "PreparedSource", "TokenStore", "prepare_documents"]
