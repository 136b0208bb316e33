"""Reads documents: divides the sources of a recipe into parts, and yields the records of a part.

Start with `part.py`: call `find_parts`, then `read_records` or `read_texts` in any process.
"""
