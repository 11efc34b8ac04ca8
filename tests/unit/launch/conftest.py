"""Streams and captures that are told apart, for tests behind the stub of the driver."""

import pytest
import torch
from driver_stub import config

from megamoe.launch import launches


@pytest.fixture
def streams(monkeypatch):
    """Return a call on a stream and in a capture (0: in none), and which streams it waited for."""
    here, waited = {}, []

    class Side:
        def __init__(self):
            self.cuda_stream = here["stream"]

        def wait_event(self, event):
            assert self.cuda_stream == here["stream"]
            waited.append(event.stream.cuda_stream)

    class Event:
        def record(self, stream):
            self.stream = stream

    def on(act, stream, capture=0):
        here.update(stream=stream, capture=capture)
        waited.clear()
        act()
        assert config()["stream"] == stream
        return list(waited)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: Side())
    monkeypatch.setattr(launches, "current_stream_handle", lambda ordinal: here["stream"])
    monkeypatch.setattr(launches, "_capture_id", lambda stream: here["capture"])
    return on
