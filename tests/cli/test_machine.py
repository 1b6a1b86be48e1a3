"""`Machine`: which GPU figures were made on."""

import pytest
import torch

from aphoton.cli.machine import Machine


@pytest.mark.parametrize(
    ("device", "count", "gpu"),
    [
        ("auto", 2, "the first"),
        ("cuda", 2, "the first"),
        ("cuda:1", 2, "the second"),
        ("cuda:1", 1, None),
        ("cpu", 0, None),
    ],
)
def test_the_gpu_that_steps_run_on(device: str, count: int, gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["the first", "the second"].__getitem__)
    machine = Machine.here(device)
    assert machine.gpu == gpu
    assert (gpu or machine.cpu) in str(machine)
