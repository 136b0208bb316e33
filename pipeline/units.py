"""Units in which sizes of memory are told, in bytes."""

MIB, GIB = 2**20, 2**30
