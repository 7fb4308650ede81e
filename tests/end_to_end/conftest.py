import pytest

from tests.fakes.quick_compilation import quick_compilation


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation(tmp_path_factory):
    with quick_compilation(tmp_path_factory.getbasetemp() / "compiled"):
        yield
