"""The pytest fixture `gradlab_audit`, which pytest finds by itself where gradlab is installed."""

from collections.abc import Callable, Collection
from typing import Any

import pytest


@pytest.fixture
def gradlab_audit() -> Callable[..., Any]:
    """A function that audits a training loop and fails the test if it has a bug.

    Its arguments are those of `gradlab.audit`, and `known`: the names of bugs that do not fail the
    test, such as "tail_carried". It returns the `Audit`.

    Example:
        def test_accumulation(gradlab_audit):
            gradlab_audit(my_adapter)
    """

    def check(
        train: Callable[..., Any],
        supports: Collection[str] | None = None,
        *,
        known: Collection[str] = (),
    ) -> Any:
        from gradlab.auditing.audit import audit
        from gradlab.auditing.bugs import BUGS

        if isinstance(known, str) or any(name not in BUGS for name in known):
            raise ValueError(f"known must hold names of {', '.join(BUGS)}. Received: {known!r}")
        found = audit(train, supports)
        for finding in found.findings:
            explanations = [
                [finding.bug],
                *(candidate.split(" and ") for candidate in finding.candidates),
            ]
            if not any(set(explanation) <= set(known) for explanation in explanations):
                pytest.fail(found.text(), pytrace=False)
        return found

    return check
