"""A form filled from a paragraph: the answer is an object of a class, whatever the model would like to say.

python examples/form.py [MODEL]
"""

import asyncio
import sys
from typing import Annotated, Any, Literal

import msgspec

import aphoton

PARAGRAPH = """\
Maria Keller, who is 34 years old, wrote to us from Zurich. She bought a pair of trail running shoes last week and is
happy with them, but one lace is broken. She would like a new one sent to her. Her order number is 48213."""

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=60)]


class Form(msgspec.Struct, frozen=True, kw_only=True):
    name: Word
    age: Annotated[int, msgspec.Meta(ge=0, le=130)]
    city: Word
    product: Word
    order_number: Annotated[int, msgspec.Meta(ge=0, le=999_999)]
    mood: Literal["happy", "neutral", "angry"]


async def fill(engine: aphoton.Engine, paragraph: str, **sampling: Any) -> Form:
    question = f"Fill in the form (name, age, city, product, order_number, mood) as JSON from this text:\n{paragraph}"
    messages = [{"role": "user", "content": question}]
    done = await engine.chat(messages, json_schema=Form, max_tokens=1000, **sampling)
    form: Form = done.parsed
    return form


async def main(model: str = "smollm2") -> None:
    async with aphoton.Engine(model) as engine:
        print(await fill(engine, PARAGRAPH))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
