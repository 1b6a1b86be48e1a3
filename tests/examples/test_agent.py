"""The agent's loop, against a model that knows nothing: its calls are calls all the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from aphoton_serve.local import LocalBackend


@pytest.fixture
def reader(talker: Path, tmp_path: Path) -> Path:
    """A talker that can read what an agent has done, a byte a token."""
    folder = shutil.copytree(talker, tmp_path / "reader")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32_768}))
    return folder


@pytest.mark.timeout(300)
async def test_every_call_can_be_made(example: Any, reader: Path) -> None:
    agent = example("agent")
    answers, called = [], set()
    backend = LocalBackend({"reader": reader}, device="cpu", dtype="float32", max_rows=1)
    async with serving(backend) as served:
        for seed in range(12):
            answer, messages = await agent.work(served.ai, "reader", agent.TASK, seed=seed, temperature=2.0)
            answers.append(answer)
            assert messages[0] == {"role": "user", "content": agent.TASK}
            for said, result in zip(messages[1::2], messages[2::2], strict=False):
                (call,) = said["tool_calls"]
                function = agent.FUNCTIONS[call["function"]["name"]]
                called.add(call["function"]["name"])
                assert result["tool_call_id"] == call["id"]
                assert result["content"] == function(**json.loads(call["function"]["arguments"]))
            last = messages[-1]
            assert (answer is None) == (last["role"] == "tool")
            if answer is not None:
                (call,) = last["tool_calls"]
                assert json.loads(call["function"]["arguments"]) == {"text": answer}
            if called and any(answer is not None for answer in answers):
                break
        else:
            pytest.fail(f"called {called}, answered {answers}")
