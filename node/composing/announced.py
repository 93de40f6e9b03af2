"""The certificates of announcements, for the network, which knows no run: `read_invite`."""

from __future__ import annotations

from ...collectives.identifiers import PeerId, RunId
from ..net.announcements import Announcement
from ..run.capability import invite_of, recognise


def read_invite(news: Announcement) -> bytes | None:
    """The id of the invite whose certificate an announcement shows; None if the certificate does
    not let this peer into this run of this organiser.
    """
    found = recognise(
        news.certificate,
        run_id=RunId(news.run),
        organiser=PeerId(news.organiser),
        peer=PeerId(news.peer),
    )
    return invite_of(news.certificate) if found is not None else None
