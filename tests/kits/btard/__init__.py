"""Bugs planted in BTARD, which its checker has to find."""
