"""Errors that a user can cause and mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: the message says what was found, what was expected and what to do next.

    The command line prints the message alone and exits with status 2; from Python it is an ordinary `ValueError`.
    """


class NonFiniteLoss(RuntimeError):
    """The loss became infinite or not a number; the message names the step, the tasks and the rows. The command line exits with status 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt `name`: " (did you mean 'x'?)", or "" when nothing in `known` is close."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
