"""Checkpoints of other projects: foreign bytes to codes, scales and zeros under a `Format`, a file for each dialect."""
