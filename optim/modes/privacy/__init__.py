"""Differential privacy of single examples, in a site's own inner steps.

example_ledger   what is spent of single examples' privacy, on disk
examples         DP-SGD: a site's single examples, protected in its own inner steps
ghost            a batch's clipped gradients at once, where opacus is installed
"""
