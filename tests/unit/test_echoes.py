"""Whether a peer reads: by its answers, by how long they take, and by whether this process ran
meanwhile.
"""

from __future__ import annotations

from atoll.node.net.echoes import AGAIN_S, ASK_S, ENDS, ENDS_S, UNREAD_S, WATCHED_S, Echoes


def test_who_answers_reads() -> None:
    echoes, now = Echoes(), 100.0
    assert not echoes.due(now), "nobody wants to know"
    for _ in range(20):
        assert not echoes.unread(now, 0.0)
        assert echoes.due(now)
        echoes.asked(now)
        assert not echoes.due(now + ASK_S), "one is under way"
        echoes.answered(now + 0.1)
        now += ASK_S
    assert not echoes.due(now + WATCHED_S)


def test_who_answers_late_does_not_read_until_it_answers_in_time() -> None:
    echoes, asked_at = Echoes(), 100.0
    echoes.asked(asked_at)
    late, again_s = asked_at + UNREAD_S + 0.1, AGAIN_S + 0.01
    assert not echoes.unread(asked_at + UNREAD_S, 0.0)
    assert not echoes.unread(late, 0.0), "not for long yet"
    assert echoes.unread(late + again_s, 0.0)
    assert not echoes.unread(late + again_s, UNREAD_S), "it is that far"
    assert not echoes.unread(late + again_s, 0.0)
    now = late + 3 * AGAIN_S
    assert echoes.unread(now, 0.0)
    echoes.answered(now)
    assert echoes.unread(now, 0.0), "it read what was said so long ago only now"
    assert echoes.due(now)
    echoes.asked(now)
    echoes.answered(now + 0.1)
    assert not echoes.unread(now + 0.1, 0.0)


def test_a_stream_that_ended_has_no_answers_to_come() -> None:
    echoes = Echoes()
    echoes.asked(0.0)
    assert not echoes.unread(3.0, 0.0)
    assert echoes.unread(4.0, 0.0)
    echoes.ended(4.5)
    assert not echoes.unread(5.0, 0.0)
    assert echoes.due(5.0)


def test_who_was_stopped_itself_takes_nobody_for_slow() -> None:
    echoes = Echoes()
    echoes.asked(0.0)
    assert not echoes.unread(60.0, 0.0), "looked at before anything was taken in"
    echoes.answered(60.1)
    echoes.stopped(60.1)
    assert not echoes.unread(60.2, 0.0)
    echoes.asked(60.2)
    assert not echoes.unread(60.2 + UNREAD_S, 0.0)
    assert not echoes.unread(63.0, 0.0)
    assert echoes.unread(63.5, 0.0)


def test_who_ends_one_stream_after_another_does_not_read_until_a_while_after() -> None:
    echoes = Echoes()
    for number in range(ENDS - 1):
        echoes.ended(0.1 * number)
    echoes.ended(0.4, lost=False)
    assert not echoes.unread(0.5, 0.0), "the last one went on as a wire"
    echoes.ended(0.5)
    assert echoes.unread(0.6, 0.0)
    assert echoes.unread(ENDS_S - 0.1, 0.0)
    assert not echoes.unread(ENDS_S + 0.1, 0.0)
    echoes.ended(ENDS_S + 0.2)
    assert not echoes.unread(ENDS_S + 0.3, 0.0), "so many, but not in so short a time"
