"""Finds what is wrong with the machines of a job before it starts: asks every host and judges each answer."""
