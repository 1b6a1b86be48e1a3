"""An agent: the model calls functions until it calls ``answer``. It must call one each time, and every call is of its
function's schema, whatever the model: the service sees to that. SmolLM2 is too small for calls that make sense; a model
that has learnt to call functions ends with an answer.

aphoton serve smollm2                                     # in another terminal
python examples/agent.py [MODEL] [URL]
"""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import openai

TASK = "Which is warmer now, Oslo or Rome, and by how many degrees?"
MOST_STEPS = 8


def temperature(city: str) -> str:
    return f"{sum(city.encode()) % 40} degrees in {city}"


def subtract(minuend: int, subtrahend: int) -> str:
    return str(minuend - subtrahend)


FUNCTIONS: dict[str, Callable[..., str]] = {"temperature": temperature, "subtract": subtract}


def tool(name: str, description: str, **properties: dict[str, Any]) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


NUMBER = {"type": "integer", "minimum": -1000, "maximum": 1000}
TOOLS = [
    tool("temperature", "The temperature in a city, in degrees.", city={"type": "string", "maxLength": 40}),
    tool("subtract", "The difference of two numbers.", minuend=NUMBER, subtrahend=NUMBER),
    tool("answer", "Tell the user the answer, and end.", text={"type": "string", "maxLength": 300}),
]


async def work(client: openai.AsyncOpenAI, model: str, task: str, **sampling: Any) -> tuple[str | None, list[Any]]:
    """The answer, or None if the model has none within `MOST_STEPS`; and all that was said."""
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(MOST_STEPS):
        done = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="required", max_tokens=1000, **sampling
        )
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "answer":
                return arguments["text"], messages
            result = FUNCTIONS[call.function.name](**arguments)
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None, messages


async def main(model: str = "smollm2", url: str = "http://127.0.0.1:8000") -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        answer, _ = await work(client, model, TASK)
        print(answer or "no answer")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
