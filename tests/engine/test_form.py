"""The example that fills a form: it is valid whatever the model would like to say."""

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

import aphoton

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "form.py"
    spec = importlib.util.spec_from_file_location("form", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def engine(smollm2: Path) -> AsyncIterator[aphoton.Engine]:
    async with aphoton.Engine(smollm2) as engine:
        yield engine


async def test_what_the_paragraph_says_is_in_the_form(example: ModuleType, engine: aphoton.Engine) -> None:
    form = await example.fill(engine, example.PARAGRAPH)
    assert type(form) is example.Form
    assert (form.name, form.age, form.order_number) == ("Maria Keller", 34, 48213)


@pytest.mark.parametrize("seed", range(5))
async def test_even_nonsense_is_a_form(example: ModuleType, engine: aphoton.Engine, seed: int) -> None:
    form = await example.fill(engine, example.PARAGRAPH, temperature=2.0, seed=seed)
    assert type(form) is example.Form and 0 <= form.age <= 130 and form.mood in ("happy", "neutral", "angry")
