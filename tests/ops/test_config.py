"""Settings: defaults < file < environment < arguments, each value with its origin, nothing unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfabric.fabric.kinds import SpecError
from kvfabric.ops.cli import main
from kvfabric.ops.config.settings import resolved

SPEC = """
model: {groups: [{name: kv, kind: compressed_history, block_tokens: 16, block_bytes: 4096}]}
memory_bytes: 1000000
grant_s: 7
transport: {links: [tcp]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def test_each_source_overrides_the_one_before_and_is_named(file: Path) -> None:
    environ = {"KVFABRIC__GRANT_S": "8", "KVFABRIC__TRANSPORT__TRANSFER_TIMEOUT_S": "3", "HOME": "/root"}
    settings = resolved(file, environ=environ, arguments=["memory_bytes=2000000", "disk.path=/nvme"])
    rows = {field: (value, origin) for field, value, origin in settings.rows()}
    assert rows["lease_s_max"] == (3600.0, "default")
    assert rows["transport.links"] == (["tcp"], str(file))
    assert rows["grant_s"] == (8.0, "KVFABRIC__GRANT_S")
    assert rows["transport.transfer_timeout_s"] == (3.0, "KVFABRIC__TRANSPORT__TRANSFER_TIMEOUT_S")
    assert rows["memory_bytes"] == (2000000, "--set memory_bytes")
    assert rows["disk.path"] == ("/nvme", "--set disk.path")
    assert rows["disk.codec"] == ("none", "default")


@pytest.mark.parametrize(
    ("environ", "arguments", "told"),
    [
        ({"KVFABRIC__GRANTS": "8"}, [], "KVFABRIC__GRANTS: the spec has no field 'grants'"),
        ({}, ["leas_s=3"], "--set leas_s: the spec has no field 'leas_s'"),
        ({}, ["transport.pth=/x"], "transport.pth"),
        ({}, ["grant_s=soon"], "grant_s"),
        ({}, ["grant_s"], "FIELD=VALUE is expected"),
        ({}, ["grant_s.x=1"], "grant_s is a single value"),
    ],
)
def test_what_no_spec_has_is_an_error_that_names_the_source(
    file: Path, environ: dict[str, str], arguments: list[str], told: str
) -> None:
    assert resolved(file, environ={}).spec.grant_s == 7
    with pytest.raises(SpecError, match=told):
        resolved(file, environ=environ, arguments=arguments)


def test_a_bad_file_is_said_of_the_file(file: Path) -> None:
    file.write_text(SPEC + "bogus: 1\n")
    with pytest.raises(SpecError, match="bogus"):
        resolved(file, environ={})


def test_config_show_tells_origins_in_both_forms(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "show", str(file), "--origin", "--set", "grant_s=9"])
    lines = capsys.readouterr().out.splitlines()
    assert "grant_s = 9.0  # --set grant_s" in lines
    assert f"memory_bytes = 1000000  # {file}" in lines
    with pytest.raises(SystemExit):
        main(["config", "show", str(file), "--origin", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["grant_s"] == {"value": 7.0, "origin": str(file)}


def test_the_shell_is_told_how_to_complete(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KVFABRIC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvfabric by")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.split() == ["bypass"]
