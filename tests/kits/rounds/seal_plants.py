"""Known bugs of recertifying, planted to see that the checker finds them."""

from __future__ import annotations

from atoll.collectives.group import Entry
from atoll.collectives.identifiers import PeerId
from atoll.collectives.modes import sealing as sealing_module

from .plant import Plant

IMPATIENT_S = 0.6


class SealPlant(Plant):
    """A bug that shows only where the organiser recertifies."""

    recertified = 1.0
    shattered = 0.3


class _Alone(sealing_module.Sealing):
    def _nodes(self) -> set[PeerId]:
        """The organiser asks nobody but itself."""
        return {self.view.me.peer}


class NoSeal(SealPlant):
    """The organiser signs without having sealed the others: what they accepted is not known."""

    sealing = _Alone


class _OwnValue(sealing_module.Sealing):
    def choice(self) -> Entry:
        """What others accepted does not count."""
        me = self.view.me.peer
        everybody, self.answers = self.answers, {me: self.answers[me]}
        try:
            return super().choice()
        finally:
            self.answers = everybody


class OwnValueOnly(SealPlant):
    """The organiser completes only what it has itself accepted."""

    sealing = _OwnValue


class _Automatic(sealing_module.Sealing):
    def tick(self, now: float) -> bool:
        """Whoever is silent when no quorum is in sight for a while is removed, without anybody's
        word.
        """
        machine = self.view
        if (
            machine.me.peer == machine.organiser
            and not self.leading
            and now - machine.open.born > IMPATIENT_S
        ):
            silent = [
                who
                for who in machine.config
                if who != machine.me and machine.actions.suspected(who.peer)
            ]
            if silent and not machine.quorum([who for who in machine.config if who not in silent]):
                self.ask(silent)
        return super().tick(now)


class AutomaticRecertify(Plant):
    """Recertify without the organiser's word: the silent may be a live majority."""

    sealing = _Automatic


SEAL_PLANTS: dict[str, type[Plant]] = {
    "no-seal": NoSeal,
    "own-value-only": OwnValueOnly,
    "automatic-recertify": AutomaticRecertify,
}
