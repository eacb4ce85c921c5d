"""Fixtures for every test: the command line in this process, and one thread for torch so that results are repeatable."""

import json
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("untimed", deadline=None)  # how long an example takes says more about the machine than about the code
hypothesis.settings.load_profile("untimed")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that wants a hub starts its own and says so


class Ran:
    """What a command did: exit code, stdout, stderr, and stdout as JSON."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def workbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `workbench ARGUMENTS...` in this process."""
    from workbench.cli import main

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr("sys.argv", ["workbench", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capsys.readouterr()
        return Ran(caught.value.code or 0, out, err)

    return run
