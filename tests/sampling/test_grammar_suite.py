"""The JSON-Schema-Test-Suite as a source of schemas: whatever is accepted, random texts are valid.

It comes with the source distribution of the package `jsonschema`, which is fetched once into the cache; or
APHOTON_JSON_SCHEMA_SUITE names that file.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import jsonschema
import pytest
from sampling.grammars import EOS, VOCAB, RandomModel, byte_vocabulary

from aphoton.cachefolder import cache_folder
from aphoton.errors import InvalidRequest
from aphoton.sampling import Grammar, GrammarCompiler

SOURCE = "jsonschema-4.26.0.tar.gz"
PIECES = [bytes([i]) for i in range(256)]


@pytest.fixture(scope="module")
def suite() -> Path:
    if given := os.environ.get("APHOTON_JSON_SCHEMA_SUITE"):
        return Path(given)
    path = cache_folder() / SOURCE
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            package, version = SOURCE.removesuffix(".tar.gz").split("-")
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", package]
            fetched = subprocess.run(
                [*download, "--dest", str(path.parent), f"{package}=={version}"], capture_output=True, text=True
            )
            if fetched.returncode or not path.exists():
                pytest.skip(f"cannot fetch {SOURCE}: {fetched.stderr.strip()[-200:]}")
    return path


def schemas(suite: Path, draft: str) -> list[tuple[str, Any]]:
    """Of a draft, with its formats: what each tests, and the schema."""
    found = []
    folder = f"{SOURCE.removesuffix('.tar.gz')}/json/tests/{draft}"
    with tarfile.open(suite) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            if member.name.endswith(".json") and os.path.dirname(member.name) in (folder, f"{folder}/optional/format"):
                file = archive.extractfile(member)
                assert file is not None
                name = os.path.basename(member.name)
                found += [(f"{name}: {case['description']}", case["schema"]) for case in json.load(file)]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("draft", "validator", "all_of_them", "at_least"),
    [
        ("draft2020-12", jsonschema.Draft202012Validator, 390, 160),
        ("draft7", jsonschema.Draft7Validator, 273, 157),
    ],
)
def test_random_texts_are_valid(
    suite: Path,
    draft: str,
    validator: Any,
    all_of_them: int,
    at_least: int,
    record_property: Callable[[str, object], None],
) -> None:
    compiler = GrammarCompiler(byte_vocabulary())
    accepted, invalid = 0, []
    refused = Counter[tuple[str, str]]()
    for name, schema in schemas(suite, draft):
        try:
            grammar = Grammar.of(json_schema=schema)
            assert grammar is not None
            ready = compiler.compile_here(grammar)
        except InvalidRequest as error:
            refused[error.field, str(error).removeprefix(f"{error.field}: ")[:100]] += 1
            continue
        accepted += 1
        judge = validator(schema, format_checker=validator.FORMAT_CHECKER)
        for seed in range(3):
            output = RandomModel(seed, PIECES).generate(ready.masker(), VOCAB, (EOS,))
            assert output is not None, f"no end: {name}"
            text = bytes(output).decode()
            invalid += [(name, text, error.message) for error in judge.iter_errors(json.loads(text))]
    record_property("accepted", accepted)
    record_property("refused", sum(refused.values()))
    print(f"{draft}: {accepted} schemas accepted, {sum(refused.values())} refused")
    for (_, reason), count in refused.most_common():
        print(f"{count:5} {reason}")
    assert all(field == "json_schema" and reason for field, reason in refused)
    assert not invalid
    assert accepted + sum(refused.values()) == all_of_them
    assert accepted >= at_least
