"""Settings between versions: what is added later is passed over or refused by name, never taken wrongly."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ConfigDict, Field

from kvfabric.actors.spec import FabricSpec
from kvfabric.fabric import settings
from kvfabric.fabric.kinds import SpecError
from kvfabric.fabric.settings import added, read, written


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OldPart(Strict):
    size: int = 1


class Old(Strict):
    name: str = "x"
    parts: tuple[OldPart, ...] = (OldPart(),)
    named: dict[str, OldPart] = Field(default_factory=dict)


class NewPart(Strict):
    size: int = 1
    layout: str = added(2, "rows", must=True)


class More(Strict):
    speed: int = added(3, 0, must=False)


class New(Strict):
    name: str = "x"
    parts: tuple[NewPart, ...] = (NewPart(),)
    named: dict[str, NewPart] = Field(default_factory=dict)
    hint: str = added(2, "", must=False)
    more: More = added(2, More(), must=False)


def test_what_a_newer_version_left_at_its_default_is_no_matter_to_an_older_one() -> None:
    text = written(New(name="y", named={"a": NewPart(size=3)}))
    assert settings.NUMBER not in json.loads(text)
    assert read(Old, text, "spec") == (Old(name="y", named={"a": OldPart(size=3)}), ())


def test_what_an_older_version_wrote_has_the_defaults_of_what_came_since() -> None:
    assert read(New, written(Old(name="y")), "spec") == (New(name="y"), ())


def test_a_field_that_is_of_use_only_to_who_knows_it_is_passed_over_and_named() -> None:
    text = written(New(hint="quick", more=More(speed=3)))
    assert json.loads(text)[settings.NUMBER] == 3
    assert read(Old, text, "spec") == (Old(), ("hint", "more"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "SCHEMA", 3)
        assert read(New, text, "spec") == (New(hint="quick", more=More(speed=3)), ())


def test_a_field_that_nobody_may_do_without_is_refused_by_name_and_both_numbers() -> None:
    text = written(New(parts=(NewPart(), NewPart(layout="columns")), hint="quick"))
    with pytest.raises(SpecError, match=r"^spec: parts\.1\.layout: of spec schema 2, .* reads 1: upgrade kvfabric"):
        read(Old, text, "spec")


def test_an_unknown_name_in_a_text_of_a_known_schema_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"^spec\.nothing: unknown field"):
        read(Old, json.dumps({"nothing": 1}), "spec")
    with pytest.raises(SpecError, match=r"^spec\.name: "):
        read(Old, json.dumps({settings.NUMBER: 2, "name": 3, "hint": "quick"}), "spec")
    for text in ("{", "[]"):
        with pytest.raises(SpecError, match=r"^spec: "):
            read(Old, text, "spec")


MODEL = {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}


def test_a_spec_with_fields_of_a_newer_version_is_handed_on_with_them_and_a_users_is_refused() -> None:
    plain = FabricSpec.load({"model": MODEL})
    assert FabricSpec.read(plain.text) == plain
    newer = json.dumps({settings.NUMBER: settings.SCHEMA + 1, settings.MUST: [], "novel": 1, **json.loads(plain.text)})
    spec = FabricSpec.read(newer)
    assert (spec.passed_over, spec.text, spec.model_dump()) == (("novel",), newer, plain.model_dump())
    with pytest.raises(SpecError, match=r"spec\.novel: unknown field"):
        FabricSpec.load({"model": MODEL, "novel": 1})
    with pytest.raises(SpecError, match=rf"spec\.{settings.NUMBER}: unknown field"):
        FabricSpec.load({"model": MODEL, settings.NUMBER: settings.SCHEMA + 1})
