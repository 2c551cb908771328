"""What TensorBoard's event files hold."""

from __future__ import annotations

from pathlib import Path


def scalars(folder: Path) -> dict[tuple[str, int], list[float]]:
    """Every scalar of the event files there: a length, its checksum, an event and its checksum, again and again."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[tuple[str, int], list[float]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        data, at = file.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event()
            event.ParseFromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault((value.tag, event.step), []).append(value.simple_value)
    return found
