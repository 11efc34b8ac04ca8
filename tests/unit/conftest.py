"""Tests with the marker `stub` run in a process whose CUDA driver is a stub: driver_stub.py."""

import driver_stub
import pytest

elsewhere = None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("stub") and driver_stub.stub is None:
            item.fixturenames.clear()  # they are set up there


def pytest_pyfunc_call(pyfuncitem):
    global elsewhere
    if not pyfuncitem.get_closest_marker("stub") or driver_stub.stub is not None:
        return None
    elsewhere = elsewhere or driver_stub.Elsewhere()
    if failed := elsewhere.run(pyfuncitem.path, pyfuncitem.name):
        pytest.fail(failed, pytrace=False)
    return True


def pytest_sessionfinish():
    if elsewhere is not None:
        elsewhere.close()


@pytest.fixture(autouse=True)
def _driver(request):
    if request.node.get_closest_marker("stub"):
        driver_stub.on_cpu(request.getfixturevalue("monkeypatch"))
