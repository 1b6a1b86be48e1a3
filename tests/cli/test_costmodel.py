"""The pipeline pays as the theory says: what ``aphoton bench --device sim`` measures."""

import pytest

from aphoton import SimCosts
from aphoton.cli.costmodel import CostModel, measure_cost_model


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def model() -> CostModel:
    return await measure_cost_model(SimCosts(forward_token=0.01e-3), streams=16)


async def test_costs_theory_and_measurement(model: CostModel) -> None:
    for period in model.periods:
        assert period.blocking == pytest.approx(period.blocking_theory, rel=0.01)
        assert period.pipelined == pytest.approx(period.pipelined_theory, rel=0.01)
        assert period.pipelined < period.blocking
    hosts, devices = zip(
        *((p.pipelined_theory == p.host, p.pipelined_theory == p.device) for p in model.periods), strict=True
    )
    assert any(hosts) and any(devices)  # both sides of the larger one

    one = [tax for tax in model.taxes if tax.streams == 1]
    assert [tax.length for tax in one] == [8, 32, 128, 512]
    for tax in one:
        assert tax.theory == pytest.approx(1 / tax.length)
        assert tax.time == pytest.approx(tax.theory, rel=0.1)
        assert tax.zombie_rows == pytest.approx(1 / tax.length)
    for tax in model.taxes:
        if tax.rows > tax.streams > 1:  # a full batch
            assert 0 <= tax.time < 0.15 / tax.length + 0.005
            assert tax.zombie_rows == pytest.approx(1 / tax.length, rel=0.1)
        elif tax.streams > 1:  # with a queue behind it
            assert tax.time == pytest.approx(tax.theory, rel=0.3)
