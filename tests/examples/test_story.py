"""The story."""

from pathlib import Path
from typing import Any

import pytest


async def test_it_is_told(example: Any, talker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await example("story").main(str(talker))
    printed = capsys.readouterr().out
    for beginning in ("Once upon a time", "The last robot on Mars", "Dear diary,"):
        assert beginning in printed
    assert printed.count("(40 tokens, first after") == 3
