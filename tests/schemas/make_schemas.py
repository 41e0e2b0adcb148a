"""Makes `kinds.json`, the schemas of the kinds that `deploy/kubernetes` uses, from published ones.

    python tests/schemas/make_schemas.py CRDS KINDS

CRDS is a folder with the CustomResourceDefinitions of JobSet and Kubeflow Trainer; KINDS is the
folder `v…-local-strict` of the package `kubernetes-validate`. The README beside this script says
where both are from. Descriptions are left out, what is there several times is there once, and a
field that a schema does not name is an error, as `kubectl apply --validate=strict` has it.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path

import yaml

BUILT_IN = (
    "configmap-v1",
    "networkpolicy-networking-v1",
    "persistentvolumeclaim-v1",
    "poddisruptionbudget-policy-v1",
    "priorityclass-scheduling-v1",
)
# What a schema may say of values; the rest is for people, for patches, or CEL.
KEPT = (
    *("type", "properties", "required", "items", "enum", "const", "oneOf", "anyOf", "allOf", "not"),
    *("pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "additionalProperties", "uniqueItems"),
)
WORTH_SHARING = 120  # characters of JSON


def read_kind(folder: Path, name: str) -> dict:
    """The schema of a built-in kind, with the schemas that it refers to in their places."""

    definitions = json.loads((folder / "_definitions.json").read_text())["$defs"]

    def resolved(node):
        if isinstance(node, dict) and "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        if isinstance(node, dict):
            return {key: resolved(value) for key, value in node.items()}
        return [resolved(value) for value in node] if isinstance(node, list) else node

    return resolved(json.loads((folder / f"{name}.json").read_text()))


def cleaned(schema: dict, at_top: bool = False) -> dict:
    """The schema without what is not about values, closed against unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: value for key, value in schema.items() if key in KEPT}
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {"type": "object"}
    for key, value in found.items():
        if key == "properties":
            found[key] = {
                # The API server writes it; a manifest has none.
                name: cleaned(field)
                for name, field in value.items()
                if not (at_top and name == "status")
            }
        elif key in ("items", "not") or (key == "additionalProperties" and isinstance(value, dict)):
            found[key] = cleaned(value)
        elif key in ("oneOf", "anyOf", "allOf"):
            found[key] = [cleaned(option) for option in value]
    if "properties" in found:
        found.setdefault("additionalProperties", False)
    return found


METADATA = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("name", "namespace", "generateName")},
        **{
            name: {"type": "object", "additionalProperties": {"type": "string"}}
            for name in ("labels", "annotations")
        },
    },
    "additionalProperties": False,
}


def read_crd(path: Path) -> tuple[str, dict]:
    crd = yaml.load(path.read_text(), yaml.CSafeLoader)
    (version,) = (v for v in crd["spec"]["versions"] if v["storage"])
    schema = cleaned(version["schema"]["openAPIV3Schema"], at_top=True)
    kind = f"{crd['spec']['group']}/{version['name']}/{crd['spec']['names']['kind']}"
    return kind, schema


def with_metadata(schema: dict) -> dict:
    """The schema in which metadata, of which a CRD says only that it is an object, has fields."""
    if isinstance(schema, list):
        return [with_metadata(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: with_metadata(value) for key, value in schema.items()}
    if found.get("properties", {}).get("metadata") == {"type": "object"}:
        found["properties"]["metadata"] = METADATA
    return found


def shared(kinds: dict) -> dict:
    """The schemas with what is there several times moved to `$defs`."""
    counts: collections.Counter = collections.Counter()

    def count(node):
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            counts[text] += 1
            if counts[text] > 1:
                return
        if isinstance(node, (dict, list)):
            for value in node.values() if isinstance(node, dict) else node:
                count(value)

    count(kinds)
    names = {
        text: f"d{number}"
        for number, text in enumerate(
            text
            for text, found in counts.items()
            if found > 1 and len(text) >= WORTH_SHARING and '"type"' in text
        )
    }

    def moved(node, is_schema=True, whole=False):
        if isinstance(node, list):
            return [moved(value) for value in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if is_schema and text in names and not whole:
            return {"$ref": f"#/$defs/{names[text]}"}
        return {
            key: {name: moved(field) for name, field in value.items()}
            if key == "properties"
            else moved(value)
            for key, value in node.items()
        }

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "kinds": {name: moved(schema) for name, schema in kinds.items()},
        "$defs": {name: moved(json.loads(text), whole=True) for text, name in names.items()},
    }


def main() -> None:
    crds, folder = map(Path, sys.argv[1:3])
    kinds = dict(map(read_crd, sorted(crds.glob("*.yaml"))))
    for name in BUILT_IN:
        schema = read_kind(folder, name)
        (about,) = schema["x-kubernetes-group-version-kind"]
        prefix = f"{about['group']}/" if about["group"] else ""
        kinds[f"{prefix}{about['version']}/{about['kind']}"] = cleaned(schema, at_top=True)
    kinds = {name: with_metadata(schema) for name, schema in kinds.items()}
    path = Path(__file__).with_name("kinds.json")
    path.write_text(json.dumps(shared(kinds), sort_keys=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
