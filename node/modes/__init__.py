"""Modes of a run: what some runs ask for, behind doors of `atoll.node.session`.

choosing  which modes a run's settings ask for, for whoever makes its sessions
"""
