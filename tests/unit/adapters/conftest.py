"""What tests of several files of adapters begin with."""

import pytest


@pytest.fixture
def experts(request):
    """What register() of the `adapter` that a file tests returns, by staged."""
    registered = request.module.adapter.register(backend="staged", max_tokens=16)
    yield registered
    registered.close()
