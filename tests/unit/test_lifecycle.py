"""One node a home: who holds its lock, who waits for it, and a home that goes away."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atoll.collectives.errors import StateError
from atoll.node.cli.daemon import first_there
from atoll.node.home.lifecycle import NodeFile, NodeLock, node_there, read_node_file
from atoll.node.home.output import Terminal
from atoll.node.home.paths import find_paths


def test_a_lock_is_one_nodes_and_is_seen_from_outside(atoll_home: Path) -> None:
    paths = find_paths()
    assert not node_there(paths)  # nor is anything made by looking
    assert not paths.runtime_dir.exists()
    lock = NodeLock.acquire(paths)
    assert lock.in_place
    assert node_there(paths)
    with pytest.raises(StateError, match="a node is starting or ending"):
        NodeLock.acquire(paths)
    lock.release()
    assert not node_there(paths)
    NodeLock.acquire(paths).release()


def test_the_lock_of_a_home_that_is_gone_is_no_lock_of_the_one_made_anew(atoll_home: Path) -> None:
    paths = find_paths()
    old = NodeLock.acquire(paths)
    paths.runtime_dir.rename(atoll_home / "away")
    assert not old.in_place
    new = NodeLock.acquire(paths)
    new.publish(NodeFile(pid=os.getpid(), socket="new"))
    assert (old.in_place, new.in_place) == (False, True)
    old.release()
    found = read_node_file(paths)
    assert found is not None
    assert found.socket == "new"  # the other's file stays
    new.release()
    assert read_node_file(paths) is None


def test_up_waits_for_a_node_that_starts_or_ends(atoll_home: Path) -> None:
    lock, returned = NodeLock.acquire(find_paths()), threading.Event()
    found = list[object]()

    def wait() -> None:
        found.append(first_there(Terminal()))
        returned.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not returned.wait(0.5)  # for as long as there is one
    lock.release()
    waiter.join()
    assert found == [None]
