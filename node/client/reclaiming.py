"""The memory of decided contributions goes back to the system between rounds: four bytes a
parameter.

A contribution's memory is one fragment's range of the buffer that script and node share. It is

* **held** once `lend` gave it out to be written,
* **settled** once its outcome is known and the script has let go of it (error feedback reads it
  after the outcome), which nobody has to say: the tensor is gone,
* **asked**: the node says whether it reads it still (its engine may, for a peer that lags behind),
* **returning** to the system, if it does not, piece by piece in a thread of its own: a GiB takes
  some tenths of a second, which training does not wait for; else asked again later,
* **returned**.

The next `lend` makes it held, whatever it was: it stops a return and waits for the piece that is
under way. So nobody writes to pages that are still to be returned. Nobody reads them either: the
node reads a contribution only after it was told of it, which the script does after it wrote it.

Both ends may die at any step. The script's death closes the connection: the node drops the buffer,
and the next script's is another. The node's death leaves the script the mapping, which no other
node knows; a return that is under way goes on, on memory that nobody will read.

The caller sees to it that `lend` and `step` are not under way at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

from ...collectives.errors import VersionMismatchError
from ..control import protocol as p
from ..control.beside import beside
from ..control.shared_memory import FLOAT_BYTES, WritableFloats
from .link import Link, PendingAnswer

if TYPE_CHECKING:
    from torch import Tensor

LEAST_BYTES = 1 << 20  # of a fragment: what is less is not worth a request
AGAIN_S = 0.5  # when the node still reads


@dataclass(slots=True)
class _Loan:
    tensor: ReferenceType[Any]  # dead once the script holds no view of it
    asked: PendingAnswer[p.Unread] | None = None
    not_before_s: float = 0.0


class _Return:
    """Elements [start, stop) on their way back to the system."""

    def __init__(self, floats: WritableFloats, start: int, stop: int) -> None:
        self._stopped = threading.Event()
        self._thread = beside(lambda: floats.clear(start, stop, lambda: not self._stopped.is_set()))

    def stop(self) -> None:
        """Return no further piece. Waits for the one that is under way."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Until it is over."""
        if self._thread is not None:
            self._thread.join()


class Reclaiming:
    """Of one connection's contribution buffer. ``bounds``: the range of each fragment."""

    def __init__(self, floats: WritableFloats, bounds: Sequence[tuple[int, int]]) -> None:
        self._floats, self._bounds = floats, bounds
        self._loans: dict[int, _Loan] = {}  # by fragment: not returned, nor returning
        self._returns: dict[int, _Return] = {}  # by fragment: since it was lent last

    def lend(self, fragment: int) -> Tensor:
        """Where the next contribution is written: float32, the fragment's range."""
        start, stop = self._bounds[fragment]
        if (under_way := self._returns.pop(fragment, None)) is not None:
            under_way.stop()
        tensor, reference = self._floats.lend(start, stop)
        self._loans.pop(fragment, None)
        if (stop - start) * FLOAT_BYTES >= LEAST_BYTES:
            self._loans[fragment] = _Loan(reference)
        return tensor

    def step(self, now: float, link: Link, decided: Callable[[int], bool]) -> None:
        """Go on with what can. ``decided``: whether the outcome of a fragment's newest contribution
        is known. Raises SwarmClosedError.
        """
        for fragment, loan in list(self._loans.items()):
            if loan.asked is None:
                if loan.tensor() is None and now >= loan.not_before_s and decided(fragment):
                    try:
                        loan.asked = link.submit(lambda id_, at=fragment: p.Reclaim(id_, at))
                    except VersionMismatchError:  # an older node cannot say: the memory stays
                        del self._loans[fragment]
            elif loan.asked.done:
                answer, loan.asked = loan.asked.answer, None
                loan.not_before_s = now + AGAIN_S
                if isinstance(answer, p.Unread) and answer.unread:
                    del self._loans[fragment]
                    self._returns[fragment] = _Return(self._floats, *self._bounds[fragment])

    def wait(self) -> None:
        """Until all that is returning is returned."""
        for each in self._returns.values():
            each.wait()
