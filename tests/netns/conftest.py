"""Where no laboratory can be built, every test in this folder is skipped, for one reason that says
what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from netns.lab import Lab, missing


@pytest.fixture(autouse=True, scope="session")
def _can_build() -> None:
    if reason := missing():
        pytest.skip(f"no network laboratory: {reason}")


@pytest.fixture
def build() -> Iterator[Callable[..., Lab]]:
    """Builds laboratories that end with the test."""
    built: list[Lab] = []

    def make(hosts: int, **options: float) -> Lab:
        built.append(Lab(hosts, **options))
        return built[-1]

    yield make
    for lab in built:
        lab.close()
