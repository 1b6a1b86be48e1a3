"""Compiles every kernel for an H100 or H200, without one, and prints its name and shared memory.

Run by `test_compiled` in a process of its own, since the interpreter takes the kernels over where it is in use.
"""

import importlib
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)
BF16, FP32, INT32 = "*bf16", "*fp32", "*i32"


def compiled(module: str, name: str, types: str, *, warps: int = 4, stages: int = 3, **constants: Any) -> None:
    """:param types: of the arguments that are no constants, in order."""
    kernel = getattr(load(module), name)
    given = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(given) for name in kernel.arg_names}
    assert next(given, None) is None
    pointers = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    result = triton.compile(
        ASTSource(kernel, signature, constants, pointers),
        target=TARGET,
        options={"num_warps": warps, "num_stages": stages},
    )
    assert "cubin" in result.asm
    print(f"{module}.{name}: {result.metadata.shared} bytes of shared memory")


def load(module: str) -> ModuleType:
    return importlib.import_module(f"aphoton.kernels.triton.{module}")


def attention(heads: int, kv_heads: int, D: int, activations: str, *, norms: bool, SPLITS: int, WINDOW: int) -> None:
    a = activations
    none = {} if norms else {"q_norm": None, "k_norm": None}
    shape = {"TABLE": 512, "HEADS": heads, "KV_HEADS": kv_heads, "D": D, "PAGE": 16, "NORM": norms}
    norm = f"{a} {a}" if norms else ""
    compiled(
        "decode_attention",
        "_attend",
        f"{a} {a} {FP32} {FP32} {a} {a} {INT32} {INT32} {INT32} {FP32} {norm} fp32 fp32",
        warps=4 if a == BF16 else 8,
        GROUP=heads // kv_heads,
        PADDED=max(16, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=64,
        SPLITS=SPLITS,
        WINDOW=WINDOW,
        **shape,
        **none,
    )
    compiled("decode_attention", "_combine", f"{a} {FP32} {FP32}", HEADS=heads, D=D, SPLITS=max(SPLITS, 2))
    compiled(
        "rope_append",
        "_rope_append",
        f"{a} {a} {a} {a} {INT32} {INT32} {INT32} {FP32} {norm} fp32",
        PADDED=D,
        BLOCK=16,
        **shape,
        **none,
    )


def main() -> None:
    hidden = {"H": 576, "BLOCK": 1024}
    compiled("norm", "_rms_norm", f"{BF16} {BF16} {BF16} fp32", **hidden)
    compiled("norm", "_add_rms_norm", f"{BF16} {BF16} {BF16} {BF16} fp32", **hidden)
    compiled("embed", "_embed", f"{INT32} {INT32} {BF16} {BF16}", **hidden)
    compiled("activation", "_silu_mul", f"{BF16} {BF16}", WIDTH=1536, BLOCK=1024)
    compiled("page_update", "_update_tables", f"{INT32} {INT32} i32", WIDTH=512, BLOCK=128, warps=1)
    attention(9, 3, 64, BF16, norms=False, SPLITS=1, WINDOW=0)
    attention(32, 8, 128, BF16, norms=True, SPLITS=8, WINDOW=4096)
    attention(32, 8, 64, FP32, norms=False, SPLITS=4, WINDOW=0)
    logits = {"VOCAB": 49152, "BLOCK": 2048, "BLOCKS": 24}
    compiled("argmax", "_partial", f"{BF16} {INT32}", **logits)
    compiled("argmax", "_final", f"{INT32} {INT32} {INT32} {INT32} {INT32}", BLOCKS=24, PADDED=32, warps=1)
    logits = {"VOCAB": 128256, "BLOCK": 4096, "BLOCKS": 32}
    drawn = f"{FP32} {INT32} {INT32} {INT32} {INT32} {INT32} {INT32}"
    none = {"places": None, "best_of": None, "seen": None}
    compiled("sample", "_sample", drawn, STATE=16, PADDED=32, PARTS=0, PARTS_PADDED=1, warps=16, **none, **logits)
    ruled = f"{drawn} {INT32} {INT32} {INT32}"
    compiled("sample", "_sample", ruled, STATE=16, PADDED=32, PARTS=63, PARTS_PADDED=64, warps=16, **logits)
    for soft, hard in ((True, True), (True, False), (False, True)):
        compiled(
            "rules",
            "_adjust",
            f"{BF16} {INT32} {INT32} {INT32} {INT32} {INT32} {INT32} {INT32} {INT32} {FP32} {INT32}",
            STATE=16,
            RULES=2048 + 2 * 4008,
            MASK=4008,
            BIAS=1024,
            VOCAB=128256,
            BLOCK=2048,
            BLOCKS=63,
            SOFT=soft,
            HARD=hard,
        )


if __name__ == "__main__":
    main()
