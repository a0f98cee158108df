"""The records in a message's content."""

from __future__ import annotations

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)


def records_of(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """Return the records of a kind, by name.

    ``content.array_records`` would keep the content alive until Python's garbage collector runs: what it
    returns refers to the content and to itself.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def records_in(message: Message, kind: type[Record]) -> dict[str, Record]:
    """Return a message's records of a kind, by name; none if it has an error in the place of a content."""
    return records_of(message.content, kind) if message.has_content() else {}
