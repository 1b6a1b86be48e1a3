"""What all commands share: help without torch, and errors in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli.running import Run

from aphoton import __version__

FREE = [word for name in ("launch", "forward", "sampling", "copy", "commit") for word in (f"--cost-{name}", "0")]


def test_help_and_version(run: Run) -> None:
    for command in ("pull", "generate", "chat", "bench", "trace"):
        assert command in run("--help").stdout
        assert "Usage" in run(command, "--help").stdout
    assert run("--version").stdout == f"aphoton {__version__}\n"


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nfrom aphoton.cli.app import main\n"
        "sys.argv = ['aphoton', 'bench', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "print({'torch', 'transformers', 'matplotlib', 'psutil'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "aphoton", "generate", "sim", "Hi", "--device", "sim", "--max-tokens", "-1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell that closes files")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("generate random:tiny Hi >&-", 1, "error: standard output is closed\n"),
        ("generate random:tiny - <&-", 2, "error: prompt: standard input is closed\n"),
        ("generate random:tiny '' 2>&-", 2, ""),
        ("chat random:tiny >&-", 1, "error: standard output is closed\n"),
        ("chat random:tiny <&-", 2, "error: messages: standard input is closed\n"),
    ],
)
def test_files_that_are_closed(arguments: str, code: int, message: str) -> None:
    command = ["sh", "-c", f'"$0" -m aphoton {arguments}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", message)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "random:huge", "Hi"], 1, "error: random:huge: no such random model"),
        (["generate", "random:tiny", ""], 2, "error: prompt: must hold at least one token"),
        (
            ["generate", "random:tiny", "Hi", "--temperature", "-1"],
            2,
            "error: temperature: must be in [0, 100]",
        ),
        (["generate", "random:tiny", "Hi", "--depth", "3"], 2, "error: pipeline_depth: must be one of 1, 2, not 3"),
        (["generate", "random:tiny", "Hi", "--stop", ""], 2, "error: stop: must not be empty"),
        (["generate", "sim", "Hi", "--device", "sim", "--kv-memory", "1"], 2, "error: kv_memory: sim has no memory"),
        (["bench", "--concurrency", "1,x"], 2, "error: concurrency: must be integers"),
        (["bench", "--concurrency", "0"], 2, "error: concurrency: must be from 1 to 4096, not 0"),
        (["bench", "--depth", "3"], 2, "error: depth: must be from 1 to 2, not 3"),
        (["bench", "--dtype", "float32,int4"], 2, "error: dtype: must be one of"),
        (["bench", "--cost-launch", "1"], 2, "error: cost_launch: only the simulated device has costs"),
        (["bench", "--device", "sim", "--cost-copy", "-1"], 2, "error: cost_copy: must be in [0, 1e+06], not -1"),
        (["bench", "--device", "sim", "--cost-copy", "nan"], 2, "error: cost_copy: must be a finite number, not nan"),
        (["trace", "--device", "sim", "--cost-launch", "inf"], 2, "error: cost_launch: must be a finite number"),
        (["bench", "--device", "sim", *FREE], 2, "error: cost_forward: must leave a step some time"),
        (["trace", "--device", "sim", *FREE], 2, "error: cost_forward: must leave a step some time"),
        (["bench", "--device", "sim", "--heartbeat"], 2, "error: heartbeat: means nothing on the simulated device"),
        (["bench", "--device", "sim", "--dtype", "float32"], 2, "error: dtype: means nothing on the simulated device"),
        (["bench", "--memory", "--concurrency", "1,2"], 2, "error: concurrency: does not go with --memory"),
        (["bench", "random:tiny", "--prompt-tokens", "5000"], 2, "error: prompt: 5000 tokens leave no room"),
        (["trace", "--device", "sim", "--window", "0"], 2, "error: window: must be in [0.01, 1e+06], not 0"),
        (["trace", "--device", "sim", "--window", "nan"], 2, "error: window: must be a finite number, not nan"),
        (["trace", "--depth", "1,2,3"], 2, "error: depth: must be from 1 to 2, not 3"),
    ],
)
def test_errors_in_one_line(run: Run, arguments: list[str], code: int, message: str) -> None:
    result = run(*arguments, code=code)
    last = result.stderr.splitlines()[-1]
    assert last.startswith(message)
    assert not result.stdout


def test_a_file_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    short = ("--device", "sim", "--concurrency", "1", "--output-tokens", "4")
    missing = tmp_path / "missing"
    for command, option in (("trace", "out"), ("trace", "png"), ("bench", "json")):
        result = run(command, *short, f"--{option}", str(missing / "file"), code=2)
        assert result.stderr == f"error: {option}: there is no folder {missing}\n"
        result = run(command, *short, f"--{option}", str(tmp_path), code=2)
        assert result.stderr == f"error: {option}: must be a file, and {tmp_path} is a folder\n"
    same = tmp_path / "same"
    for picture in (same, tmp_path / ".." / tmp_path.name / "same"):
        result = run("trace", *short, "--out", str(same), "--png", str(picture), code=2)
        assert result.stderr == f"error: png: must be another file than the trace's, {same}\n"
    if Path("/dev/full").exists():
        result = run("trace", *short, "--out", "/dev/full", code=1)
        assert result.stderr.splitlines()[-1] == "error: No space left on device"


def test_a_library_that_is_not_installed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    arguments = ["--device", "sim", "--out", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]
    result = run("trace", *arguments, code=1)
    assert result.stderr == "error: this needs matplotlib: pip install 'aphoton[plot]'\n"
    assert not list(tmp_path.iterdir())
