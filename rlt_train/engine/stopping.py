"""Stop strings: does the text of a completion hold one, wherever its tokens are cut?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]


def find_stop_string(decode: Decode, token_ids: Sequence[int], stop_strings: Sequence[str]) -> str | None:
    """The stop string that the newest token completed, or ``None``.

    Only a tail is decoded: a token stands for at least one byte, so a stop string of L bytes ends within the
    last L tokens; a few more give the decoder the context of a split character.
    """
    tail = max(len(string.encode()) for string in stop_strings) + 4
    text = decode(list(token_ids[-tail:]))
    return next((string for string in stop_strings if string in text), None)
