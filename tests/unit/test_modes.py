"""A session takes no run that asks for a mode which it was not given."""

from __future__ import annotations

import pytest

from atoll.collectives.arrivals import ArrivalSettings
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.swarm import RunSettings
from atoll.node.session.composing import log_settings_of, modes_of
from atoll.node.session.modes import PLAIN

ASKING = {"lie": RunSettings(lying=1), "arrivals": RunSettings(arrivals=ArrivalSettings(count=2))}


@pytest.mark.parametrize("word", sorted(ASKING))
def test_a_run_gets_the_modes_that_it_asks_for_and_no_others(word: str) -> None:
    settings, plain = ASKING[word], RunSettings()
    modes_of(settings, None).check(log_settings_of(settings))
    with pytest.raises(LocalProtocolError, match=word):
        PLAIN.check(log_settings_of(settings))
    with pytest.raises(LocalProtocolError, match=word):
        modes_of(settings, None).check(log_settings_of(plain))
    PLAIN.check(log_settings_of(plain))
