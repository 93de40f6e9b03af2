"""``[join]`` and ``[audit]`` in a manifest: who may enter a run, what a newcomer goes through, and
what is kept to look into.
"""

from __future__ import annotations

from ...collectives.errors import ConfigError
from .manifest import Manifest
from .refusals import refuse


def check_audit(manifest: Manifest, name: str) -> None:
    """Whether a round can be recomputed. Raises ConfigError."""
    if manifest.audit.keep_contributions and manifest.secure is not None:
        why, hint = "Contributions are masked: nobody is to have them.", "Leave one of the two out."
        raise ConfigError(
            f"{name}: $.secure cannot be combined with $.audit.keep_contributions",
            key="$.secure",
            why=why,
            hint=hint,
        )


def check_join(manifest: Manifest, name: str) -> None:
    """Who may enter. Raises ConfigError."""
    from ...security.identity import is_peer_id

    join = manifest.join
    if (join.policy == "allow") != bool(join.allow):
        raise ConfigError(
            (
                f'{name}: $.join.policy is "{join.policy}", and $.join.allow names '
                f"{len(join.allow) or 'no'} peers"
            ),
            key="$.join.allow",
            why="The list says who may enter a run that only they may enter.",
            hint=(
                'policy = "allow", and the peer ids of all who may: each prints hers with atoll id'
            ),
        )
    for peer in join.allow:
        if not is_peer_id(peer):
            raise ConfigError(
                f"{name}: {peer!r} is no peer id",
                key="$.join.allow",
                hint="Whose machine it is prints it: atoll id",
            )
    if not join.probation:
        return
    one_by_one = "What a newcomer would contribute is compared with the round's result, one by one."
    refused = [
        (
            join.policy != "open",
            "$.join.policy",
            "Who enters by an invite or a list is known to somebody.",
            'policy = "open", or leave probation out',
        ),
        (
            manifest.exchange.fragments > 1,
            "$.exchange.fragments",
            "Each fragment has members of its own.",
            "fragments = 1",
        ),
        (
            (manifest.train.start_with or 1) > 1,
            "$.train.start_with",
            (
                "A newcomer on probation becomes a member by rounds, and the first round "
                "would wait for members."
            ),
            "Leave one of the two out.",
        ),
        (manifest.secure is not None, "$.secure", one_by_one, "Leave one of the two out."),
    ]
    refuse(refused, manifest, name, f"$.join.probation = {join.probation}")
