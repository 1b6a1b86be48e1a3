"""A job over a file: each line a prompt, each line of the result an answer, in the order in which they end.

python examples/batch.py PROMPTS.txt ANSWERS.jsonl [MODEL]
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.progress import Progress

import aphoton

AT_ONCE = 64
"""Requests in the engine. It computes so many rows in a step, and reads no further ahead in the file."""


async def work(engine: aphoton.Engine, prompts: Iterator[tuple[int, str]], out: TextIO, progress: Progress) -> None:
    bar = progress.add_task("", total=None)
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        for number, prompt in prompts:
            try:
                done = await engine.generate(prompt, max_tokens=100)
            except (aphoton.InvalidRequest, aphoton.PromptTooLong) as error:  # of this prompt, not of the job
                answer = {"line": number, "error": str(error)}
            else:
                answer = {"line": number, "text": done.text, "finish_reason": done.finish_reason}
                tokens += done.usage.completion_tokens
            out.write(json.dumps(answer) + "\n")
            progress.update(bar, advance=1, description=f"{tokens} tokens")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(worker())
    progress.update(bar, total=progress.tasks[bar].completed)


async def run(model: str, prompts: Iterator[tuple[int, str]], out: TextIO) -> None:
    with Progress() as progress:
        async with aphoton.Engine(model, max_rows=AT_ONCE) as engine:
            await work(engine, prompts, out, progress)


def main(source: str, target: str, model: str = "smollm2") -> None:
    with Path(source).open(encoding="utf-8") as lines, Path(target).open("w", encoding="utf-8") as out:
        prompts = ((number, text) for number, line in enumerate(lines, 1) if (text := line.strip()))
        asyncio.run(run(model, prompts, out))


if __name__ == "__main__":
    main(*sys.argv[1:])
