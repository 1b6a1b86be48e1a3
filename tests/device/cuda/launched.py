"""Compiles the kernels of a small model for an H100 into a folder, or finds them again where the folder is in use.

``launched.py FOLDER`` or, with APHOTON_KERNELS set, ``launched.py``: prints how many were compiled and how many found.
Run by `test_variants` in a process of its own: afterwards launches compile and run nothing.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from aphoton import EngineConfig
from aphoton.device.opening import open_source
from aphoton.kernels.prebuilt import begin, seal, use_prebuilt
from aphoton.kernels.triton.compiling import compile_only

CAPABILITY = (9, 0)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    torch.cuda.get_device_capability = lambda device: CAPABILITY
    with tempfile.TemporaryDirectory() as libcuda:
        if folder is None:
            use_prebuilt(torch.device("cuda", 0))
            os.environ["CC"] = "/nonexistent"
        else:
            library = f"{libcuda}/libcuda.so.1"
            subprocess.run(
                ["cc", "-shared", f"-Wl,-soname,{library}", "-o", library, "-x", "c", "/dev/null"], check=True
            )
            begin(folder, "9.0a")
        compiled = compile_only(folder, CAPABILITY, Path(libcuda))
        from aphoton.device.cuda import variants

        variants.MOST_SPLITS = 1  # what the batches take is enough here
        config = EngineConfig(max_rows=2, max_model_len=256)
        variants.launch_variants(open_source("random:tiny", config, None), config, torch.bfloat16)
    if folder is not None:
        seal(folder)
    print(len(compiled.made), len(compiled.found))


if __name__ == "__main__":
    main()
