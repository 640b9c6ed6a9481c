"""Conversations: a column that holds a list of messages, as chat datasets have it."""

from __future__ import annotations

from typing import Any

from polypeft.errors import UserError

Turns = tuple[tuple[str, str], ...]
"""(role, content) of each message, in order."""
ROLES = ("system", "user", "assistant")


def turns(value: list[Any], place: str) -> Turns:
    """The messages of one record. Raises UserError naming `place` for anything but {"role": ..., "content": text} objects."""
    for i, message in enumerate(value, 1):
        fits = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not fits or not message["content"].strip():
            raise UserError(
                f"{place}: message {i} is {message!r}; expected an object with a role ({', '.join(ROLES)}) and a content that is text"
            )
    return tuple((message["role"], message["content"]) for message in value)


def prompt_and_answer(spoken: Turns, place: str) -> tuple[Turns, str]:
    """A conversation as what the model reads and the last answer, which it learns. Raises UserError unless user and assistant end it."""
    if len(spoken) < 2 or spoken[-1][0] != "assistant":
        raise UserError(f"{place}: the messages must end with one of the assistant, which is the target; give another `target:` otherwise")
    return checked_prompt(spoken[:-1], place), spoken[-1][1]


def checked_prompt(spoken: Turns, place: str) -> Turns:
    """`spoken`, which must end with the user's turn."""
    if not spoken or spoken[-1][0] != "user":
        raise UserError(f"{place}: what the model answers must be a message of the user; found {spoken[-1][0] if spoken else 'no message'}")
    return spoken
