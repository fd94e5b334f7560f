"""The OpenAPI description of a server, with the columns and features of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recshard_lab.serving.bundle import Inputs
from recshard_lab.serving.server.bodies import BINARY, JSON, json_example

_STATUSES = {
    400: "the body or a header is malformed",
    401: "the bearer token is missing or wrong",
    408: "the request arrives too slowly",
    413: "the body, the number of samples or the number of ids is too large",
    415: "the content type or encoding is not supported",
    422: "a value is not what the model takes; `field` and `position` name it",
    500: "the model failed",
    503: "the queue is full, the model loads or the server stops; see Retry-After",
    504: "the deadline has passed",
}


def openapi(inputs: Inputs, outputs: Sequence[str], version: str, token: bool) -> dict[str, Any]:
    """An OpenAPI 3.1 document.

    >>> from recshard_lab.serving.bundle import SparseInput
    >>> found = openapi(Inputs(("age",), (SparseInput("movie", 10),)), ["probability"], "v1", False)
    >>> found["components"]["schemas"]["Request"]["properties"]["sparse"]["properties"]["movie"]["items"]["items"]
    {'type': 'integer', 'minimum': 0, 'maximum': 9}
    """
    error = {"$ref": "#/components/schemas/Error"}
    answers = {str(status): _answer(words, error) for status, words in _STATUSES.items() if token or status != 401}
    tensors = {"schema": {"type": "string", "contentMediaType": BINARY}}
    answer = {"$ref": "#/components/schemas/Answer"}
    predict = {
        "summary": "Outputs of the model",
        "description": f"A body of type {BINARY} has the tensors dense [B, {len(inputs.dense)}] F32, values [N] I64, "
        f"lengths [{len(inputs.sparse)} * B] I32, feature by feature, then sample by sample, and weights [N] F32 if a "
        f"feature is weighted. The answer has the format of the request unless Accept names the other.",
        "parameters": [
            {"name": name, "in": "header", "schema": schema, "description": words}
            for name, schema, words in (
                ("X-Timeout-Ms", {"type": "integer", "minimum": 1}, "deadline in ms; the server's is the latest"),
                ("X-Request-ID", {"type": "string", "maxLength": 64}, "returned, and written to the log"),
            )
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"$ref": "#/components/schemas/Request"}, "example": json_example(inputs)},
                BINARY: tensors,
            },
        },
        "responses": {
            "200": {
                "description": "one value a sample and output",
                "content": {JSON: {"schema": answer}, BINARY: tensors},
            },
            **answers,
        },
    }
    paths = {
        "/v1/predict": {"post": predict},
        "/v1/model": {"get": _get("What the model expects, with an example")},
        "/v1/reload": {
            "post": {
                "summary": "Look for a newer version now",
                "responses": {
                    "200": {"description": "the served version"},
                    "409": _answer("a newer version was refused; the old one is served", error),
                },
            }
        },
        "/healthz": {"get": _get("The process is alive")},
        "/readyz": {
            "get": {
                **_get("Requests are answered"),
                "responses": {"200": {"description": "ready"}, "503": _answer("it loads or stops", error)},
            }
        },
        "/metrics": {
            "get": {"summary": "Counters and histograms", "responses": {"200": {"description": "Prometheus text"}}}
        },
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "recshard serve", "version": version},
        "paths": paths,
        "components": {"schemas": {"Request": _request(inputs), "Answer": _outputs(outputs), "Error": _ERROR}},
    }
    if token:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


def _get(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "a JSON object"}}}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {JSON: {"schema": schema}}}


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["status", "reason", "message", "field", "position", "request_id"],
            "properties": {
                "status": {"type": "integer"},
                "reason": {"type": "string"},
                "message": {"type": "string"},
                "field": {"type": ["string", "null"]},
                "position": {"type": ["integer", "null"]},
                "request_id": {"type": ["string", "null"]},
            },
        }
    },
}


def _strict(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties, "additionalProperties": False}


def _request(inputs: Inputs) -> dict[str, Any]:
    def bags(item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "array", "minItems": 1, "items": {"type": "array", "items": item}}

    parts = {}
    if inputs.dense:
        column = {"type": "array", "minItems": 1, "items": {"type": "number"}}
        parts["dense"] = _strict(dict.fromkeys(inputs.dense, column))
    if inputs.sparse:
        parts["sparse"] = _strict(
            {
                feature.name: bags(
                    {"type": "integer"} | ({} if feature.rows is None else {"minimum": 0, "maximum": feature.rows - 1})
                )
                for feature in inputs.sparse
            }
        )
    if weighted := [feature.name for feature in inputs.sparse if feature.weighted]:
        parts["weights"] = _strict({name: bags({"type": "number"}) for name in weighted})
    return _strict(parts)


def _outputs(outputs: Sequence[str]) -> dict[str, Any]:
    values = {"type": "array", "description": "B values or lists; null for NaN and infinity, which JSON does not have"}
    return {"type": "object", "properties": dict.fromkeys(outputs, values)}
