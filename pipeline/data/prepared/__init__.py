"""Tokenises documents into the cache: call `prepare_documents`, which returns a TokenStore for each split."""

from pipeline.data.prepared.part_files import TokenStore
from pipeline.data.prepared.prepare import PreparedDocuments, PreparedSource, prepare_documents

__all__ = ["PreparedDocuments", "PreparedSource", "TokenStore", "prepare_documents"]
