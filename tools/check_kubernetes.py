"""Checks the Helm chart and the manifests that it makes: against the services' flags, and against schemas.

usage: python -m tools.check_kubernetes [--write] [--crds DIR]

The chart is linted and rendered with its own values and with each file of deploy/chart/examples, by the package
helm-python-sdk, which holds Helm itself; deploy/rendered has the results, and --write writes them. The schemas of
Kubernetes come with the package kubernetes-validate. Resources of other projects are checked against
tools/custom_resources.json, which has the part of their CustomResourceDefinitions that the manifests use: a field
that is not there is refused. With --crds they are checked against whole definitions (YAML) in a folder, and --write
then writes that file, too.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from quire.runtime.settings import ConfigurationError
from tools.kubernetes_manifests import NAMESPACE, RELEASE, Manifests, documents_of
from tools.kubernetes_rules import breaches

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
CHART = DEPLOY / "chart"
RENDERED = DEPLOY / "rendered"
DEFAULT = RENDERED / "default.yaml"
"""The manifests of the chart's own values."""
KUBERNETES_VERSIONS = ("1.30", "1.36", "1.37")
"""The manifests fit both, and the versions between."""
CUSTOM_RESOURCES = Path(__file__).with_name("custom_resources.json")
"""Pruned schemas by apiVersion and kind."""
_LIMITS = ("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ASSERTIONS = ("type", "required", "enum", "pattern", *_LIMITS)
_OWN_GROUPS = ("apps", "policy", "autoscaling", "v1")


def main(argv: Sequence[str]) -> int:
    """Prints the problems; returns 1 if there are some, or if a package is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write deploy/rendered anew")
    parser.add_argument("--crds", type=Path, metavar="DIR", help="folder with CustomResourceDefinitions")
    flags = parser.parse_args(argv)
    wrong: list[str] = []
    try:
        wrong += chart_problems()
        texts = rendered()
        schemas = read_schemas() if flags.crds is None else schemas_of(flags.crds)
        used: list[Mapping[str, Any]] = []
        wrong += [f"{file.name}: no values make it" for file in sorted(RENDERED.iterdir()) if file.name not in texts]
        for name, text in texts.items():
            if flags.write:
                (RENDERED / name).write_text(text, encoding="utf-8")
            manifests = Manifests.read(RENDERED / name)
            found = [] if (RENDERED / name).read_text(encoding="utf-8") == text else ["differs from the chart; --write"]
            found += [*problems(manifests), *schema_problems(manifests), *custom_problems(manifests, schemas)]
            used += (each for each in manifests.documents if not is_of_kubernetes(each))
            print(f"{name}: {len(manifests.documents)} documents")
            wrong += [f"{name}: {line}" for line in found]
        if flags.crds is not None and flags.write:
            write_schemas(schemas, used)
    except ModuleNotFoundError as error:
        wrong.append(f"failed: {error.name} is not installed; `make setup` installs it")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def chart_problems() -> list[str]:
    """The messages of Helm's linter about the chart, warnings included."""
    import helm_python

    result = helm_python.lint(CHART)
    # 1 is a hint, such as that an icon is recommended.
    return [f"chart: {each['path']}: {each['error']}" for each in result["messages"] if each["severity"] > 1]


def rendered() -> Mapping[str, str]:
    """The manifests by the names of their files: of the chart's own values and of each example."""
    examples = {file.name: yaml.safe_load(file.read_text("utf-8")) for file in sorted((CHART / "examples").iterdir())}
    return {name: render(values) for name, values in {DEFAULT.name: {}, **examples}.items()}


def render(values: Mapping[str, Any], release: str = RELEASE) -> str:
    """Helm's output for the chart, without comments, in the order of its files. ValueError if Helm refuses it."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        try:
            chart.validate_schema(chart.merge_values(dict(values)))
            texts = chart.render(dict(values), name=release, namespace=NAMESPACE)
        except helm_python.HelmError as error:
            raise ValueError(str(error)) from error
    files = [name for name in sorted(texts) if name.endswith(".yaml")]
    documents = [each for name in files for each in documents_of(texts[name]) if each is not None]
    return yaml.safe_dump_all(documents, sort_keys=False, width=120)


def problems(manifests: Manifests) -> list[str]:
    """The breaches of rules; if a service would not start, only that."""
    try:
        return breaches(manifests)
    except ConfigurationError as error:
        return [str(error)]


def is_of_kubernetes(document: Mapping[str, Any]) -> bool:
    group = document["apiVersion"].partition("/")[0]
    return group in _OWN_GROUPS or (group.endswith(".k8s.io") and group.startswith("networking."))


def schema_problems(manifests: Manifests) -> Iterator[str]:
    """The mismatches with the schemas of Kubernetes, unknown fields included."""
    import kubernetes_validate

    for version in KUBERNETES_VERSIONS:
        for document in filter(is_of_kubernetes, manifests.documents):
            name = _name_of(document)
            try:
                kubernetes_validate.validate(dict(document), version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(map(str, error.path))
                yield f"{name}: {path or 'document'}: {error.message} (Kubernetes {version})"
            except kubernetes_validate.SchemaNotFoundError as error:
                yield f"{name}: {error.message}"


def schemas_of(directory: Path) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """The schemas of CustomResourceDefinitions by apiVersion and kind; fields that they do not have are refused."""
    schemas = {}
    for file in sorted(directory.rglob("*.yaml")):
        for definition in documents_of(file.read_text(encoding="utf-8")):
            if definition is None or definition.get("kind") != "CustomResourceDefinition":
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                schemas[key] = _closed(version["schema"]["openAPIV3Schema"])
    return schemas


def read_schemas() -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """The schemas of `CUSTOM_RESOURCES`."""
    stored = json.loads(CUSTOM_RESOURCES.read_text(encoding="utf-8"))
    return {(version, kind): schema for version, kinds in stored.items() for kind, schema in kinds.items()}


def write_schemas(schemas: Mapping[tuple[str, str], Mapping[str, Any]], documents: Sequence[Mapping[str, Any]]) -> None:
    """Writes the parts of the schemas that the documents use."""
    stored: dict[str, dict[str, Any]] = {}
    for version, kind in sorted({(each["apiVersion"], each["kind"]) for each in documents}):
        values = [each for each in documents if (each["apiVersion"], each["kind"]) == (version, kind)]
        stored.setdefault(version, {})[kind] = _pruned(schemas[version, kind], values)
    lines = (
        f' "{version}": {{\n' + ",\n".join(_in_lines(kind, schema) for kind, schema in kinds.items()) + "\n }"
        for version, kinds in stored.items()
    )
    CUSTOM_RESOURCES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _in_lines(kind: str, schema: Mapping[str, Any]) -> str:
    """JSON in lines of at most 120 characters."""
    lines = [""]
    for token in json.JSONEncoder(sort_keys=True).iterencode(schema):
        if len(lines[-1]) + len(token) > 115:
            lines.append("")
        lines[-1] += token
    return f'  "{kind}":\n' + "\n".join(f"  {line.strip()}" for line in lines)


def _pruned(schema: Mapping[str, Any], values: Sequence[Any]) -> Mapping[str, Any]:
    """The parts of a closed schema that concern the fields of some values, without prose."""
    kept = {key: schema[key] for key in _ASSERTIONS if key in schema}
    if len(kept.get("pattern", "")) > 100:
        del kept["pattern"]  # a line's length is limited
    objects = [each for each in values if isinstance(each, Mapping)]
    if "properties" in schema:
        names = sorted({name for each in objects for name in each} & schema["properties"].keys())
        fields = {name: [each[name] for each in objects if name in each] for name in names}
        kept["properties"] = {name: _pruned(schema["properties"][name], fields[name]) for name in names}
        # Kubernetes drops what a schema does not name; here it is refused.
        kept["additionalProperties"] = schema.get("additionalProperties", False)
    elif isinstance(schema.get("additionalProperties"), Mapping):
        inner = [value for each in objects for value in each.values()]
        kept["additionalProperties"] = _pruned(schema["additionalProperties"], inner)
    if "items" in schema:
        items = [value for each in values if isinstance(each, list) for value in each]
        kept["items"] = _pruned(schema["items"], items)
    return kept


def custom_problems(manifests: Manifests, schemas: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[str]:
    """The resources that do not fit the schema of their CustomResourceDefinition, or have none."""
    import jsonschema

    for document in (each for each in manifests.documents if not is_of_kubernetes(each)):
        schema = schemas.get((document["apiVersion"], document["kind"]))
        if schema is None:
            yield f"{_name_of(document)}: no CustomResourceDefinition of {document['apiVersion']}"
            continue
        for error in jsonschema.Draft202012Validator(schema).iter_errors(dict(document)):
            yield f"{_name_of(document)}: {error.json_path}: {error.message}"


def _closed(schema: Any) -> Any:
    """As the API server's strict validation reads it: only the fields that are named, integers or strings as said."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        closed["additionalProperties"] = False
    # Every resource has these, with fields that the API server knows.
    if {"apiVersion", "kind", "metadata"} <= closed.get("properties", {}).keys():
        closed["properties"]["metadata"] = {"type": "object"}
    return closed


def _name_of(document: Mapping[str, Any]) -> str:
    return f"{document['kind']} {document['metadata']['name']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
