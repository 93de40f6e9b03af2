"""``[join]`` and ``[audit]`` in a manifest: who may enter a run, what a newcomer goes through, and
what is kept to look into.
"""

from __future__ import annotations

from .hints import PEER
from .manifest import Manifest
from .refusals import Row, against

_NAMED = f'allow = ["{PEER}", "{PEER}"]'
_PRINTED = "Whose machine it is prints its peer id: atoll id"


def audit_rows(manifest: Manifest) -> list[Row]:
    """Whether a round can be recomputed."""
    kept = manifest.audit.keep_contributions
    return against(
        "$.audit.keep_contributions",
        [
            (
                kept > 0 and manifest.secure is not None,
                "$.secure",
                "Contributions are masked: nobody is to have them.",
                "Leave [audit] out.",
            )
        ],
    )


def join_rows(manifest: Manifest) -> list[Row]:
    """Who may enter."""
    from ...security.identity import is_peer_id

    join = manifest.join
    named, listed = join.policy == "allow", bool(join.allow)
    says = (
        f'$.join.policy is "{join.policy}", and $.join.allow names {len(join.allow) or "no"} peers'
    )
    full = "The list says who may enter a run that only they may enter."
    strange = [peer for peer in join.allow if not is_peer_id(peer)]
    return [
        Row(
            named and not listed,
            "$.join.allow",
            f"{full} {_PRINTED}",
            f'{_NAMED}, or policy = "invite"',
            says=says,
        ),
        Row(
            listed and not named,
            "$.join.allow",
            full,
            'policy = "allow", or leave it out.',
            says=says,
        ),
        *(
            Row(
                True,
                "$.join.allow",
                f"{_PRINTED}.",
                f'{_NAMED}, or leave it out and policy = "invite"',
                says=f"{peer!r} is no peer id",
            )
            for peer in strange
        ),
        *_probation_rows(manifest),
    ]


def _probation_rows(manifest: Manifest) -> list[Row]:
    """What newcomers on probation do not go with."""
    join = manifest.join
    if not join.probation:
        return []
    one_by_one = "What a newcomer would contribute is compared with the round's result, one by one."
    none = "leave [join] probation out"
    return against(
        f"$.join.probation = {join.probation}",
        [
            (
                join.policy != "open",
                "$.join.policy",
                "Who enters by an invite or a list is known to somebody.",
                f'policy = "open", or {none}',
            ),
            (
                manifest.exchange.fragments > 1,
                "$.exchange.fragments",
                "Each fragment has members of its own.",
                f"fragments = 1, or {none}",
            ),
            (
                (manifest.train.start_with or 1) > 1,
                "$.train.start_with",
                "A newcomer on probation becomes a member by rounds, and the first round would "
                "wait for members.",
                f"Leave it out, or {none}.",
            ),
            (manifest.secure is not None, "$.secure", one_by_one, f"{none}, or leave it out"),
        ],
    )
