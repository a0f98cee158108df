"""The records in a message's content."""

from __future__ import annotations

import re
from typing import Final, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

#: Where Flower's strategies say, in a ConfigRecord, which round it is.
ROUND_KEY: Final = "server-round"

#: How the group of a message begins that says which message of a run it is. A run that goes on sends the
#: same ones again.
NUMBERED: Final = "message "

# As Flower writes the exception of a ClientApp: <class 'package.Name'>:<'text'>
_EXCEPTION: Final = re.compile(r"<class '(?P<module>[\w.]*?)\.?(?P<name>\w+)'>:<'(?P<text>.*)'>", re.DOTALL)
_OURS: Final = "flower_gpu.errors"  # their texts name the client and say what happened

Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of a kind, by name.

    ``content.array_records`` is not used, because its result refers to the content and to itself. It would
    keep the content alive until Python's garbage collector runs.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def records_in(message: Message, kind: type[Record]) -> dict[str, Record]:
    """Return a message's records of a kind, by name; empty if it has an error instead of content."""
    return records_of(message.content, kind) if message.has_content() else {}


def round_of(message: Message) -> int | None:
    """Return the round of a message according to its config or its group, or None."""
    for record in records_in(message, ConfigRecord).values():
        value = record.get(ROUND_KEY)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    group = message.metadata.group_id
    return int(group) if group and group.isdecimal() and len(group) < 10 else None


def reason_of(reply: Message) -> str:
    """Return why a message failed, from the error in its reply: ``"ValueError: no data"``.

    Flower writes ``<class 'ValueError'>:<'no data'>``.
    """
    reason = (reply.error.reason or "").strip()
    match = _EXCEPTION.fullmatch(reason)
    if match is None:
        return reason or f"error {reply.error.code}"
    return match["text"] if match["module"] == _OURS else f"{match['name']}: {match['text']}"
