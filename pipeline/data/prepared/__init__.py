"""Documents as tokens in the cache: `prepare_documents` is the way in, TokenStore what it gives."""

from pipeline.data.prepared.part_files import TokenStore
from pipeline.data.prepared.prepare import PreparedDocuments, PreparedSource, prepare_documents

__all__ = ["PreparedDocuments", "PreparedSource", "TokenStore", "prepare_documents"]
