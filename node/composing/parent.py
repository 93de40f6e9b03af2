"""A private node ends with its script: how it notices (trio).

Two signs, each enough: the link to the script (`private_node.ParentLink`) reaches its end, or the
script's process is gone. The second holds where a child of the script, forked behind Python's back,
still keeps the link open.
"""

from __future__ import annotations

import os

import trio

from ..home.private_node import ParentLink

POLL_S = 0.25
GONE_S = 0.5


async def watch_parent(link: ParentLink, parent_pid: int) -> str:
    """Returns why the node should end, as soon as the script closed the link or is dead.
    Cancellation: nothing happened.
    """
    reasons: list[str] = []
    async with trio.open_nursery() as nursery:

        async def link_closed() -> None:
            while not link.ended():
                await trio.lowlevel.wait_readable(link.fileno())
            with trio.move_on_after(GONE_S):  # a script that was killed leaves its link first
                await _until_gone(parent_pid)
                reasons.append(f"the script (process {parent_pid}) is gone")
            reasons.append("the script closed its swarm")
            nursery.cancel_scope.cancel()

        nursery.start_soon(link_closed)
        await _until_gone(parent_pid)
        reasons.append(f"the script (process {parent_pid}) is gone")
        nursery.cancel_scope.cancel()
    return reasons[0]


async def _until_gone(pid: int) -> None:
    """Until this process is not our parent any more."""
    await _until_dead(pid)
    while os.getppid() == pid:  # a dead parent's children are given to init or a subreaper
        await trio.sleep(POLL_S)


async def _until_dead(pid: int) -> None:
    """Where the system can tell it (Linux), until this process has ended; elsewhere, and when it is
    no more, it returns at once.
    """
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if os.getppid() == pid:  # else the number is somebody else's by now
            await trio.lowlevel.wait_readable(fd)
    finally:
        os.close(fd)
