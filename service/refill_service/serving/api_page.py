"""What does ``/docs`` show? Every route of the pod, as one page that loads nothing from elsewhere.

FastAPI's own pages load their scripts from the internet: they stay empty where there is none, and run others' code in a
page of the pod.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

__all__ = ["api_page"]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
h2 { margin-top: 2.5rem; } section { border-top: 1px solid #ccc; padding: .6rem 0; }
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""


def api_page(openapi: dict[str, Any]) -> str:
    """:param openapi: the description that ``/openapi.json`` is."""
    info = openapi["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation.get("tags", ["others"])[0], []).append(_operation(method, path, operation))
    groups = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    schemas = json.dumps(openapi.get("components", {}).get("schemas", {}), indent=2)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])}</h1><p>{escape(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="openapi.json">openapi.json</a>.</p>{groups}'
        f"<h2>Schemas</h2><pre>{escape(schemas)}</pre></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (each["name"], f"{each['in']}{', required' if each.get('required') else ''}", each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    if body := operation.get("requestBody"):
        rows.append(("body", ", ".join(body["content"]), _name_of(body)))
    rows += [(f"answer {status}", "", found["description"]) for status, found in operation["responses"].items()]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<section><p><code><b>{method.upper()}</b> {escape(path)}</code></p>"
        f"<p>{escape(operation.get('summary', ''))}</p><table>{table}</table></section>"
    )


def _name_of(body: dict[str, Any]) -> str:
    """Of its schema, where it has one."""
    schema: dict[str, Any] = next(iter(body["content"].values())).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]
