"""A client of a service on Ray Serve, with OpenAI's own package: a stream, an object of a schema, and a crowd.

serve run aphoton_serve.app:build model=smollm2           # in another terminal
python examples/client.py [MODEL] [URL]                   # the key, if the service wants one: $OPENAI_API_KEY
"""

import asyncio
import os
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Review(BaseModel):
    mood: Literal["happy", "neutral", "angry"]
    stars: Literal[1, 2, 3, 4, 5]


async def stream(client: openai.AsyncOpenAI, model: str, question: str) -> str:
    said = ""
    async with client.chat.completions.stream(
        model=model, messages=[{"role": "user", "content": question}], max_tokens=60
    ) as events:
        async for event in events:
            if event.type == "content.delta":
                said += event.delta
                print(event.delta, end="", flush=True)
    print()
    return said


async def rate(client: openai.AsyncOpenAI, model: str, text: str) -> Review | None:
    done = await client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": f"Rate this review: {text}"}], response_format=Review
    )
    return done.choices[0].message.parsed


async def crowd(client: openai.AsyncOpenAI, model: str, prompts: list[str]) -> list[str]:
    """All at once: the engines batch them, and the package tries again when a queue is full (429)."""
    asked = [client.completions.create(model=model, prompt=prompt, max_tokens=20) for prompt in prompts]
    return [done.choices[0].text for done in await asyncio.gather(*asked)]


async def main(model: str = "smollm2", url: str = "http://127.0.0.1:8000") -> None:
    key = os.environ.get("OPENAI_API_KEY", "unused")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        print("models:", *[offered.id async for offered in client.models.list()])
        await stream(client, model, "Why is the sky blue?")
        print(await rate(client, model, "The shoes fit, but one lace is broken."))
        for text in await crowd(client, model, [f"{n} robots went to Mars and" for n in range(1, 9)]):
            print("-", text.replace("\n", " "))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
