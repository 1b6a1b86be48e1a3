"""``aphoton prebuild``."""

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aphoton import EngineConfig, InvalidRequest
from aphoton.cli.compilers import cuda_release, find_cc, find_nvcc
from aphoton.cli.engine import engine_options
from aphoton.cli.missing import MissingExtra
from aphoton.cli.terminal import FetchBar, say
from aphoton.errors import AphotonError

if TYPE_CHECKING:  # it brings torch
    import torch

    from aphoton.device.source import Source

__all__ = ["prebuild"]

NO_MATTER = ("device", "kernels", "pipeline_depth", "kv_pages", "kv_memory", "max_step_tokens", "prefix_cache", "seed")
"""Settings that no kernel is compiled for."""


@engine_options(*NO_MATTER)
def prebuild(
    model: Annotated[str, typer.Option(help="As for other commands: smollm2, a folder, a file, a hub id.")],
    settings: dict[str, Any],
    arch: Annotated[str, typer.Option(help="Compute capability of the GPU, as nvcc has it.")] = "9.0a",
    out: Annotated[Path, typer.Option(help="The folder, for an image to ship.")] = Path("aphoton-kernels"),
) -> None:
    """Compile what a model needs on a GPU, without one, so that an engine starts without compiling.

    It takes minutes, nvcc, and the libraries in the versions that will run the model: do it where the image is built.
    The settings must be those of the engine. Several models may go into one folder.
    """
    from aphoton.kernels.prebuilt import VARIABLE, begin, parse_arch, seal  # brings torch

    config = EngineConfig(**settings)
    capability = parse_arch(arch)
    if config.dtype == "float32":
        raise InvalidRequest("dtype", "the kernels for cuda have no float32: choose bfloat16 or float16")
    _check_tools()
    with FetchBar() as bar:
        source = _source(model, config, bar)
    dtype = _dtype(config)
    begin(out, arch, cuda=cuda_release())
    with tempfile.TemporaryDirectory() as scratch:
        libcuda = _libcuda(Path(scratch))
        since = time.perf_counter()
        count = _triton(source, config, dtype, out, capability, libcuda)
        _report("Triton", count, since)
        since = time.perf_counter()
        _report("FlashInfer", _flashinfer(source, dtype, out, arch, libcuda, scratch), since)
    seal(
        out,
        model=model,
        **{name: getattr(config, name) for name in ("max_rows", "page_size")},
        max_model_len=source.max_model_len,
        dtype=str(dtype).removeprefix("torch."),
    )
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    say(f"{out}: {size / 2**20:.1f} MiB, for compute capability {arch}. Use it, wherever it is put, with")
    typer.echo(f"export {VARIABLE}={out.absolute()}")


def _report(what: str, count: int, since: float) -> None:
    say(f"{what}: {count} modules, {time.perf_counter() - since:.0f} s")


def _source(model: str, config: EngineConfig, progress: FetchBar) -> "Source":
    from aphoton.device.opening import open_source

    return open_source(model, config, progress)


def _dtype(config: EngineConfig) -> "torch.dtype":
    from aphoton.device.cuda.opening import cuda_dtype

    return cuda_dtype(config)


def _check_tools() -> None:
    """:raises MissingExtra: for what is missing, all at once."""
    missing = [
        f"{name} (pip install 'aphoton[cuda]')"
        for name in ("flashinfer", "triton")
        if importlib.util.find_spec(name) is None
    ]
    if not missing and find_nvcc() is None:
        missing.append("nvcc (of the CUDA toolkit; CUDA_HOME says where it is)")
    if shutil.which("ninja") is None:
        missing.append("ninja (pip install ninja)")
    if find_cc() is None:
        missing.append("a C and C++ compiler (gcc, g++)")
    if missing:
        raise MissingExtra(f"this needs {', '.join(missing)}")


STUB = "".join(
    f"void {name}(void) {{}}\n" for name in ("cuInit", "cuGetErrorString", "cuLaunchKernelEx", "cuCtxGetCurrent")
)
"""Functions of the driver that what is built here calls. Linkers that leave out what nothing calls (``--as-needed``,
Ubuntu's default) would leave out a driver without them, and what they made could not be loaded."""


def _libcuda(folder: Path) -> Path:
    """A folder with a libcuda to link with: the driver brings the real one, and there is none here."""
    compiler = find_cc()
    assert compiler is not None
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=STUB.encode(), check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    return folder


def _triton(
    source: "Source", config: EngineConfig, dtype: "torch.dtype", out: Path, capability: tuple[int, int], libcuda: Path
) -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # it takes the place of compiling
    from aphoton.kernels.triton.compiling import compile_only

    compiled = compile_only(out, capability, libcuda)
    from aphoton.device.cuda.variants import launch_variants

    try:
        launch_variants(source, config, dtype)
    except ValueError as error:  # of the decode kernel: the model has a shape that it cannot serve
        raise InvalidRequest("model", str(error)) from error
    return len(compiled.made) + len(compiled.found)


def _flashinfer(source: "Source", dtype: "torch.dtype", out: Path, arch: str, libcuda: Path, scratch: str) -> int:
    from aphoton.attention.prebuild import build_prefill

    # Unless somebody wants to keep it: what is left of building would make an image larger.
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", scratch)
    shape = source.config
    try:
        return len(
            build_prefill(
                out,
                dtype=dtype,
                head_dim=shape.head_dim,
                windows=[shape.window(layer) for layer in range(shape.num_layers)],
                arch=arch,
                libcuda=libcuda,
            )
        )
    except RuntimeError as error:
        say(str(error))
        raise AphotonError("FlashInfer's kernels do not compile: see above") from error
