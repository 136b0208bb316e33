"""Documents: from the sources of a recipe to parts, and from a part to records, one by one.

`part.py` is the way in: `find_parts`, then `read_records` or `read_texts` in any process.
"""
