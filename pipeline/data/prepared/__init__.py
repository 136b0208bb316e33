"""Tokenises documents into the cache: `prepare_documents` returns each source's tokens in TokenStores."""

from pipeline.data.prepared.part_files import TokenStore
from pipeline.data.prepared.prepare import PreparedDocuments, PreparedSource, prepare_documents

__all__ = ["PreparedDocuments", "PreparedSource", "TokenStore", "prepare_documents"]
