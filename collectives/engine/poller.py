"""Waiting for sockets: poll(2) where there is one, `selectors` elsewhere."""

from __future__ import annotations

import select
import selectors
from typing import Protocol

READ, WRITE = 1, 2


class Poller(Protocol):
    """Which of the watched descriptors can be read or written."""

    def watch(self, fd: int, interest: int) -> None:
        """Wait for these (READ | WRITE; 0 for errors only where the system can) from now on."""
        ...

    def forget(self, fd: int) -> None:
        """Stop watching; the descriptor may be closed afterwards."""
        ...

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """(descriptor, READ | WRITE) of those that are ready; errors and hang-ups count as both."""
        ...

    def close(self) -> None:
        """Give resources back."""
        ...


class PollPoller:
    """select.poll: no descriptor of its own, and changing an interest is no system call."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._interest: dict[int, int] = {}

    def watch(self, fd: int, interest: int) -> None:
        if self._interest.get(fd) == interest:
            return
        self._interest[fd] = interest
        self._poll.register(
            fd,
            (select.POLLIN if interest & READ else 0) | (select.POLLOUT if interest & WRITE else 0),
        )

    def forget(self, fd: int) -> None:
        if self._interest.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for fd, mask in self._poll.poll(
            None if timeout_s is None else max(0, round(1000 * timeout_s + 0.5))
        ):
            ready = (READ if mask & select.POLLIN else 0) | (WRITE if mask & select.POLLOUT else 0)
            found.append(
                (
                    fd,
                    READ | WRITE
                    if mask & (select.POLLERR | select.POLLHUP | select.POLLNVAL)
                    else ready,
                )
            )
        return found

    def close(self) -> None:
        """Nothing to give back."""


class SelectorPoller:
    """For systems without poll."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._interest: dict[int, int] = {}

    def watch(self, fd: int, interest: int) -> None:
        old = self._interest.get(fd, 0)
        if old == interest:
            return
        events = (selectors.EVENT_READ if interest & READ else 0) | (
            selectors.EVENT_WRITE if interest & WRITE else 0
        )
        if not interest:
            self.forget(fd)
        elif old:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)
        if interest:
            self._interest[fd] = interest

    def forget(self, fd: int) -> None:
        if self._interest.pop(fd, 0):
            self._selector.unregister(fd)

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for key, events in self._selector.select(timeout_s):
            found.append(
                (
                    key.fd,
                    (READ if events & selectors.EVENT_READ else 0)
                    | (WRITE if events & selectors.EVENT_WRITE else 0),
                )
            )
        return found

    def close(self) -> None:
        self._selector.close()


def make_poller() -> Poller:
    """The best poller of this system."""
    return PollPoller() if hasattr(select, "poll") else SelectorPoller()
