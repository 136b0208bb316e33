"""Bytes in what memory is told in."""

MIB, GIB = 2**20, 2**30
