"""Several streams from one engine inside one asyncio program; one of them is left early.

python examples/story.py [MODEL]
"""

import asyncio
import sys

import aphoton


async def tell(engine: aphoton.Engine, beginning: str) -> None:
    done = await engine.generate(beginning, max_tokens=40, temperature=0.8, seed=7)
    print(f"{beginning}{done.text}\n  ({done.usage.completion_tokens} tokens, first after {done.timings.ttft:.2f} s)\n")


async def first_sentence(engine: aphoton.Engine, question: str) -> str:
    answer = ""
    async with engine.chat_stream([{"role": "user", "content": question}], max_tokens=200) as stream:
        async for piece in stream:
            answer += piece.text
            if "." in answer:
                break  # leaving the block ends the request, whatever step is in flight
    return answer[: answer.find(".") + 1]


async def main(model: str = "smollm2") -> None:
    async with aphoton.Engine(model) as engine, asyncio.TaskGroup() as group:
        answer = group.create_task(first_sentence(engine, "Why is the sky blue?"))
        for beginning in ("Once upon a time", "The last robot on Mars", "Dear diary,"):
            group.create_task(tell(engine, beginning))
    print(answer.result())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
