"""The job over a file."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from aphoton import Engine


def test_every_line_has_its_answer(example: Any, tmp_path: Path) -> None:
    prompts = [f"Robot number {number} went" for number in range(150)]
    lines = [*prompts[:70], "", "x" * 5000, *prompts[70:], ""]
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join(lines))
    example("batch").main(str(source), str(target), "random:tiny")
    answers = {answer["line"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert sorted(answers) == [number for number, line in enumerate(lines, 1) if line]
    assert "5000 tokens" in answers.pop(72)["error"]
    assert all(answer["text"] and answer["finish_reason"] in ("stop", "length") for answer in answers.values())


async def test_reads_no_further_than_it_works_and_tells_of_it(example: Any, tiny: Engine) -> None:
    batch = example("batch")
    taken, most = 0, 0

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            nonlocal most
            done = self.getvalue().count("\n")
            most = max(most, taken - done)
            return super().write(text)

    def prompts() -> Any:
        nonlocal taken
        for taken in range(1, 201):
            yield taken, f"Robot {taken}"

    out, screen = Out(), io.StringIO()
    with Progress(console=Console(file=screen), auto_refresh=False) as progress:
        await batch.work(tiny, prompts(), out, progress)
        (bar,) = progress.tasks
    assert bar.completed == bar.total == 200 and bar.finished
    assert bar.description == f"{tiny.stats().tokens} tokens"
    assert most == batch.AT_ONCE
