"""Every public error of atoll, and nothing else.

A user-facing error says what happened (with the values), why it probably is so, and what to type.
``code`` is stable (``atoll explain E110`` prints its page); ``exit_code`` follows sysexits.

    AtollError
    ├─ ConfigError                the user's to mend; names the key
    ├─ NetworkError               PeerUnreachableError, PeerLostError, DeadlineExceededError
    ├─ ProtocolError              RemoteProtocolError, LocalProtocolError, VersionMismatchError
    ├─ SecurityError              BadSignatureError, NotAdmittedError, MisbehaviourError
    ├─ GroupError                 NotEnoughPeersError
    ├─ StateError                 OutOfDateError, DigestMismatchError, ModelMismatchError,
    │                             RecertifyError, RemovedError, DoubledError, StorageError
    ├─ RefusedBySystemError
    └─ SwarmClosedError
"""

from __future__ import annotations

from .foreign import escaped, shown

MAX_MESSAGE = 4096
"""Characters of a message that concerns a peer."""


class AtollError(Exception):
    """Base of all errors. ``code`` names its page in ``atoll explain``; ``why`` and ``hint`` are
    shown below the message.
    """

    code = "E000"
    exit_code = 1
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        why: str = "",
        hint: str = "",
        exit_code: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        message = shown(message)
        super().__init__(message)
        self.message = message
        self.why = shown(why)
        self.hint = shown(hint)
        if code is not None:
            self.code = code
        if exit_code is not None:
            self.exit_code = exit_code
        if retryable is not None:
            self.retryable = retryable
        self.annotate()

    def annotate(self) -> None:
        """Let a traceback end with ``why`` and ``hint``, as they are now: what a script shows that
        nobody catches it in.
        """
        if self.why or self.hint:
            self.__notes__ = [
                line for line in (self.why, self.hint, f"More: atoll explain {self.code}") if line
            ]


class ConfigError(AtollError):
    """A setting is wrong. ``key`` is its path, such as ``$.train.outer.lr``. ``faults``: an error
    each where several settings are, of which this tells.
    """

    code = "E400"
    exit_code = 78
    faults: tuple[ConfigError, ...] = ()

    def __init__(
        self,
        message: str,
        *,
        key: str = "",
        code: str | None = None,
        why: str = "",
        hint: str = "",
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message, code=code, why=why, hint=hint, exit_code=exit_code)
        self.key = key


class _PeerError(AtollError):
    """An error that concerns one peer; ``peer`` is its id, or "" when unknown."""

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        code: str | None = None,
        why: str = "",
        hint: str = "",
        exit_code: int | None = None,
        retryable: bool | None = None,
    ) -> None:
        # Such a message may tell what a peer said: it stays on one line.
        super().__init__(
            escaped(message, MAX_MESSAGE),
            code=code,
            why=why,
            hint=hint,
            exit_code=exit_code,
            retryable=retryable,
        )
        self.peer = peer


class NetworkError(_PeerError):
    """The network failed us; trying again may help."""

    code = "E100"
    exit_code = 69
    retryable = True


class PeerUnreachableError(NetworkError):
    """No connection to the peer could be made."""

    code = "E110"


class PeerLostError(NetworkError):
    """A peer that was connected fell silent."""

    code = "E111"


class DeadlineExceededError(NetworkError):
    """An operation did not finish within its deadline."""

    code = "E112"
    exit_code = 75


class ProtocolError(_PeerError):
    """A rule of the protocol was broken."""

    code = "E140"
    exit_code = 76


class RemoteProtocolError(ProtocolError):
    """A peer broke a rule; it counts against that peer."""

    code = "E141"


class LocalProtocolError(ProtocolError):
    """We broke a rule: a defect of atoll."""

    code = "E142"
    exit_code = 70


class VersionMismatchError(ProtocolError):
    """No protocol version in common."""

    code = "E140"


class SecurityError(_PeerError):
    """Something could not be trusted."""

    code = "E200"
    exit_code = 77


class BadSignatureError(SecurityError):
    """A signature does not verify."""

    code = "E202"


class NotAdmittedError(SecurityError):
    """The run does not admit this peer, or the invite is wrong or expired."""

    code = "E201"


class MisbehaviourError(SecurityError):
    """A peer provably misbehaved. ``evidence`` is the signed bytes that prove it."""

    code = "E203"

    def __init__(self, message: str, *, peer: str, evidence: bytes = b"") -> None:
        super().__init__(message, peer=peer)
        self.evidence = evidence


class GroupError(AtollError):
    """The group for an operation cannot be formed or kept."""

    code = "E150"
    exit_code = 75
    retryable = True


class NotEnoughPeersError(GroupError):
    """Fewer peers than asked for."""

    code = "E151"


class StateError(AtollError):
    """Local state does not fit."""

    code = "E300"
    exit_code = 74


class OutOfDateError(StateError):
    """Local state is older than the run's log."""

    code = "E304"


class DigestMismatchError(StateError):
    """Bytes do not have the digest they must have."""

    code = "E302"


class ModelMismatchError(StateError):
    """The script's model is not the run's model; the message names the tensors."""

    code = "E301"
    exit_code = 76


class RecertifyError(StateError):
    """The organiser asked for something that cannot be right: nothing was done."""

    code = "E306"
    exit_code = 78


class RemovedError(StateError):
    """The organiser has removed this member's present life from the run: it never votes again."""

    code = "E307"
    exit_code = 77


class DoubledError(StateError):
    """Another process lives under this node's key: neither votes any more."""

    code = "E308"
    exit_code = 77


class StorageError(StateError):
    """A file could not be read or written (disk full, corrupt, unreadable)."""

    code = "E501"


class RefusedBySystemError(AtollError):
    """The operating system gave no more of something: open files, memory, threads, an address."""

    code = "E502"
    exit_code = 71
    retryable = True


class SwarmClosedError(AtollError):
    """The swarm object was closed, or its node ended."""

    code = "E160"
